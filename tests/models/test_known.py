"""What is known of tokens before a policy's first step: importance weights, paid divergences, moments."""

from __future__ import annotations

import math

import numpy as np
import pytest

from masflow.models.experience import Row
from masflow.models.known import Mismatch, Moments, importance_weights, paid


def row(*logprobs: float) -> Row:
    return Row("t", "m", (1,), tuple(range(len(logprobs))), logprobs, 0, "", "")


def test_importance_weights_are_bounded_ratios_and_what_is_measured_is_before_the_bound():
    """Engine 0.5, 0.5, 0.2; trainer 0.25, 0.5, 0.8: ratios 0.5, 1 and 4, the last cut at 2."""
    sums = Mismatch()
    engine = row(math.log(0.5), math.log(0.5), math.log(0.2))
    found = importance_weights({7: [math.log(0.25), math.log(0.5), math.log(0.8)]}, [engine] * 8, 2.0, sums)
    assert found == {7: pytest.approx([0.5, 1.0, 2.0])}
    assert sums.weight == pytest.approx(3.5) and sums.capped == 1
    assert sums.distance == pytest.approx(math.log(2) + math.log(4))
    # k3 of KL(engine ‖ trainer), ratio - 1 - ln ratio: 0.5 - 1 + ln 2, 0, 3 - ln 4
    assert sums.kl == pytest.approx(-0.5 + math.log(2) + 3 - math.log(4))


def test_an_impossible_tokens_weight_is_finite():
    sums = Mismatch()
    assert importance_weights({0: [0.0, -900.0]}, [row(-900.0, 0.0)], math.inf, sums) == {
        0: pytest.approx([math.exp(20), math.exp(-20)])
    }
    assert math.isfinite(sums.kl)


def test_a_token_pays_for_its_own_and_all_later_divergences():
    """Gaps 1, -2 and 3 nats at weight 0.1: 5 less 0.1 · (1 - 2 + 3), then · (-2 + 3), then · 3."""
    assert paid(5.0, [1.0, 0.0, 3.0], [0.0, 2.0, 0.0], 0.1) == pytest.approx([4.8, 4.9, 4.7])


def test_moments_of_parts_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3, 2, size=n).tolist() for n in (1, 5, 0, 9)]
    whole = np.concatenate(parts)
    moments = sum((Moments.of(part) for part in parts), Moments())
    np.testing.assert_allclose(
        moments.whitened(whole.tolist()), (whole - whole.mean()) / (whole.std() + 1e-8), rtol=1e-9
    )


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_equal_values_whiten_to_zeros_also_when_they_differ_by_rounding(value):
    values = [value, value * (1 + 1e-15), value]
    assert Moments.of(values).whitened(values) == [0.0] * 3
