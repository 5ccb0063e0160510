"""Advantages over tokens and chains of turns; the numbers were worked out on paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from masflow.rl.gae import chain_gae, explained_variance, token_gae, whiten


def array(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float64)


def test_three_tokens_by_hand():
    # g = 0.9, λ = 0.5. δ2 = 1 - 0.5 = 0.5; δ1 = 0.9·0.5 - 0.2 = 0.25; δ0 = 0.9·0.2 - 0.1 = 0.08.
    # A2 = 0.5; A1 = 0.25 + 0.45·0.5 = 0.475; A0 = 0.08 + 0.45·0.475 = 0.29375.
    found = token_gae(array(0.1, 0.2, 0.5), 1.0, 0.9, 0.5)
    assert found == pytest.approx([0.29375, 0.475, 0.5], abs=1e-15)


def test_with_lambda_one_a_token_gets_the_discounted_reward_minus_its_value():
    # 0.5² · 2 - 0.1 = 0.4; 0.5 · 2 - 0.2 = 0.8; 2 - 0.5 = 1.5.
    assert token_gae(array(0.1, 0.2, 0.5), 2.0, 0.5, 1.0) == pytest.approx([0.4, 0.8, 1.5])


def test_with_lambda_zero_a_token_gets_one_difference():
    assert token_gae(array(0.1, 0.2, 0.5), 1.0, 1.0, 0.0) == pytest.approx([0.1, 0.3, 0.5])


def test_with_gamma_zero_only_the_last_token_sees_the_reward():
    assert token_gae(array(0.1, 0.2, 0.5), 1.0, 0.0, 1.0) == pytest.approx([-0.1, -0.2, 0.5])


def test_one_token_is_its_reward_minus_its_value():
    assert token_gae(array(0.25), 1.0, 0.9, 0.95) == pytest.approx([0.75])


def test_two_turns_of_a_chain_by_hand():
    # δ1 = 1 - 0.6 = 0.4; δ0 = 0.2 + 0.81·0.6 - 0.5 = 0.186; A0 = 0.186 + 0.81·0.5·0.4 = 0.348.
    found = chain_gae(array(0.5, 0.6), array(0.2, 1.0), (1, None), array(0.81, 1.0), 0.5)
    assert found == pytest.approx([0.348, 0.4], abs=1e-15)


def test_the_order_in_which_turns_are_listed_changes_nothing():
    found = chain_gae(array(0.6, 0.5), array(1.0, 0.2), (None, 0), array(1.0, 0.81), 0.5)
    assert found == pytest.approx([0.4, 0.348], abs=1e-15)


def test_two_copies_that_ran_at_once_share_their_successor():
    # The last: 1 - 0.5 = 0.5. Copies: 0 + 0.5 - 0.1 + 0.5 = 0.9, and 0.3 + 0.5 - 0.2 + 0.5 = 1.1.
    found = chain_gae(array(0.1, 0.2, 0.5), array(0.0, 0.3, 1.0), (2, 2, None), array(1, 1, 1), 1.0)
    assert found == pytest.approx([0.9, 1.1, 0.5])


def test_chains_do_not_touch_each_other():
    found = chain_gae(array(0.0, 0.0, 9.0), array(1.0, 2.0, 0.0), (1, None, None), array(1, 1, 1), 1.0)
    assert found == pytest.approx([3.0, 2.0, -9.0])


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match="circle"):
        chain_gae(array(0, 0), array(0, 0), (1, 0), array(1, 1), 1.0)


def test_a_chain_of_a_thousand_turns_needs_no_deep_recursion():
    n = 3000
    successors = [*range(1, n), None]
    found = chain_gae(np.zeros(n), np.ones(n), successors, np.ones(n), 1.0)
    assert found[0] == n


numbers = st.floats(-10, 10)


@given(st.lists(numbers, min_size=1, max_size=8), numbers, st.floats(0, 1), st.floats(0, 1))
def test_tokens_are_the_double_sum_of_the_paper(values, reward, gamma, lam):
    size = len(values)
    after = [*values[1:], 0.0]
    deltas = [(reward if t == size - 1 else 0.0) + gamma * after[t] - values[t] for t in range(size)]
    wanted = [sum((gamma * lam) ** k * deltas[t + k] for k in range(size - t)) for t in range(size)]
    assert token_gae(np.array(values), reward, gamma, lam) == pytest.approx(wanted, abs=1e-9)


@given(st.lists(numbers, min_size=2, max_size=9))
def test_whitened_numbers_have_mean_zero_and_spread_one_or_are_all_zero(advantages):
    found = whiten(np.array(advantages))
    assert found.mean() == pytest.approx(0, abs=1e-6)
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-5) or not found.any() or np.ptp(advantages) < 1e-3


def test_whitening_by_hand():
    # Mean 2, deviations -1, 0, 1, standard deviation 1 (ddof 1).
    assert whiten(array(1, 2, 3)) == pytest.approx([-1, 0, 1], abs=1e-7)
    assert whiten(array(0.3)).tolist() == [0.3]
    assert whiten(array(0.1 + 0.2, 0.3)).tolist() == [0, 0]


def test_explained_variance_by_hand():
    # Var(target) = 1; the errors ±0.5 have variance 0.25.
    assert explained_variance(array(-0.5, 0.5), array(-1, 1)) == pytest.approx(0.75)
    assert explained_variance(array(0.7, 0.7), array(-1, 1)) == pytest.approx(0.0)
    assert explained_variance(array(5, 6), array(1, 1)) == 0.0
