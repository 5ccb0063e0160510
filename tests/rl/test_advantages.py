"""Advantages of one group, worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from masflow.rl.advantages import ADVANTAGES, against_role, group_mean, group_norm, leave_one_out
from masflow.spec.experiment import Algorithm

rewards_lists = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12)


def test_group_norm_divides_by_the_standard_deviation_with_ddof_1():
    # 1 0 0 1: mean 1/2, squares 4 · 1/4 = 1, over 3: std = 1/√3, so ±√3/2
    expected = [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2]
    assert group_norm(np.array([1.0, 0, 0, 1])) == pytest.approx(expected, rel=1e-5)


def test_group_mean_and_leave_one_out():
    rewards = np.array([1.0, 0.0, 0.5])
    assert group_mean(rewards) == pytest.approx([0.5, -0.5, 0])
    assert leave_one_out(rewards) == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])


@given(rewards_lists)
def test_group_mean_is_leave_one_out_times_n_minus_1_over_n(rewards):
    array, n = np.array(rewards), len(rewards)
    others = [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    if np.ptp(array) > 1e-6 * max(1, np.abs(array).max()):
        np.testing.assert_allclose(leave_one_out(array), others, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(group_mean(array), np.array(others) * (n - 1) / n, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_give_exact_zeros_also_when_they_differ_by_rounding(name):
    assert not ADVANTAGES[name](np.array([0.3, 0.1 + 0.2, 0.3])).any()
    assert not ADVANTAGES[name](np.array([1e6, 1e6])).any()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_one_sample_has_no_baseline(name):
    with pytest.raises((ValueError, ZeroDivisionError)):
        ADVANTAGES[name](np.array([1.0]))


@given(rewards_lists, st.sampled_from(sorted(ADVANTAGES)))
def test_grouping__leave_one_out_over_std_explodes__no_advantage_leaves_its_range(rewards, name):
    array, n = np.array(rewards), len(rewards)
    bound = np.ptp(array) * 1.0001 if name != "group_norm" else (n - 1) / math.sqrt(n) * 1.0001
    assert np.abs(ADVANTAGES[name](array)).max() <= bound + 1e-9


def test_grouping__leave_one_out_over_std_explodes__the_pair_can_not_be_asked_for():
    with pytest.raises(ValidationError):
        Algorithm(advantage="leave_one_out_norm")  # type: ignore[arg-type]


def test_against_role_is_the_difference_to_other_episodes_and_bounded_when_they_agree():
    assert against_role(1.0, np.array([0.0, 0.5]), "leave_one_out") == 0.75
    # own 1, others 0 0 0: difference 1, std of (0, 0, 0, 1) with ddof 1 is 1/2
    assert against_role(1.0, np.zeros(3), "group_norm") == pytest.approx(2, rel=1e-5)
    assert against_role(1.0, np.ones(3), "group_norm") == 0
