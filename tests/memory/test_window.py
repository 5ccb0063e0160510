"""Bounds of rewards, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from masflow.memory.window import Bounds, bounds, percentile


def test_a_percentile_lies_between_the_two_nearest_values():
    # 5 values have places 0 to 4: 97.5 % is place 3.9, 2.5 % is place 0.1.
    assert percentile([50.0, 10.0, 30.0, 20.0, 40.0], 97.5) == pytest.approx(40 + 0.9 * 10)
    assert percentile([50.0, 10.0, 30.0, 20.0, 40.0], 2.5) == pytest.approx(10 + 0.1 * 10)
    assert percentile([7.0], 97.5) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_from_forty_rewards_on_bounds_are_percentiles():
    # 0, 1, …, 40: places are the values themselves, so 97.5 % of 40 is 39 and 2.5 % is 1.
    found = bounds([float(i) for i in range(41)])
    assert found is not None and found == Bounds(39.0, 1.0, 20.0)
    assert found.is_good(39.0) and not found.is_good(38.9)
    assert found.is_bad(0.9) and not found.is_bad(1.0)


def test_forty_are_enough_and_thirty_nine_are_few():
    # 0 … 39: place 39·0.975 = 38.025. 0 … 38: mean 19, squared distances 2·(1² + … + 19²) = 4940,
    # s² = 4940 / 38 = 130, 1.96·√130 = 22.3475.
    forty = bounds([float(i) for i in range(40)])
    assert forty is not None and forty.upper == pytest.approx(38.025)
    few = bounds([float(i) for i in range(39)])
    assert few is not None
    assert few.upper == pytest.approx(41.3475, abs=1e-4) and few.lower == pytest.approx(-3.3475, abs=1e-4)


def test_few_rewards_with_an_outlier():
    # 1, 1, 1, 1, 1, 1, 1, 5: mean 1.5, squares 7·0.25 + 12.25 = 14, s = √(14 / 7) = 1.41421; ± 2.77186.
    # Two values: as binary ones, the upper bound is the higher of them.
    found = bounds([1.0] * 7 + [5.0])
    assert found is not None and found.lower == pytest.approx(-1.27186, abs=1e-5) and found.upper == 5.0
    # 0, 1 (six times), 5: mean 11/8 = 1.375, squares 1.890625 + 6·0.140625 + 13.140625 = 15.875,
    # s² = 15.875 / 7 = 2.267857, s = 1.505940; upper 1.375 + 2.951642.
    found = bounds([0.0, *[1.0] * 6, 5.0])
    assert found is not None and found.upper == pytest.approx(4.326642, abs=1e-5)
    assert found.is_good(5.0) and not found.is_good(1.0) and not found.is_bad(0.0)


def test_rewards_that_are_all_the_same_tell_nothing_apart():
    assert bounds([]) is None
    assert bounds([1.0]) is None
    assert bounds([0.0] * 100) is None


@pytest.mark.parametrize("num_ones", [1, 10, 50, 90])
def test_binary_rewards_remember_success_and_blame_failure_only_where_it_is_rare(num_ones: int):
    # 100 rewards, places 0 to 99: 2.5 % is place 2.475, a 0 as long as at least 4 are.
    found = bounds([1.0] * num_ones + [0.0] * (100 - num_ones))
    assert found is not None
    assert found.is_good(1.0) and not found.is_good(0.0)  # one success in 100 has the percentile at 0
    assert not found.is_bad(0.0) and not found.is_bad(1.0)


def test_a_rare_binary_failure_is_blamed():
    found = bounds([1.0] * 98 + [0.0] * 2)  # place 2.475 is a 1 already
    assert found is not None and found.is_bad(0.0) and not found.is_bad(1.0)
    assert found.is_good(1.0) and not found.is_good(0.0)


def test_few_binary_rewards():
    # 4 ones of 8: mean 0.5, s² = 8·0.25 / 7, mean + 1.96 s = 1.55: no success would ever reach it.
    found = bounds([1.0] * 4 + [0.0] * 4)
    assert found is not None and found.is_good(1.0) and not found.is_good(0.0) and not found.is_bad(0.0)
    # 19 of 20: mean 0.95, squares 19·0.0025 + 0.9025 = 0.95, s = √(0.95 / 19) = 0.2236; 0.95 - 0.4383.
    found = bounds([1.0] * 19 + [0.0])
    assert found is not None and found.lower == pytest.approx(0.5117, abs=1e-4) and found.is_bad(0.0)


def test_where_both_bounds_stand_on_the_usual_value_the_usual_is_not_good():
    # 98 of 100 are 0.5: places 2.475 and 96.525 are both 0.5.
    found = bounds([0.0, *[0.5] * 98, 1.0])
    assert found is not None and found.upper == found.lower == 0.5
    assert found.is_good(1.0) and found.is_bad(0.0)
    assert not found.is_good(0.5) and not found.is_bad(0.5)
