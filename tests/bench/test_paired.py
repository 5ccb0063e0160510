"""The bootstrap behind the tables of learning, against cases worked out by hand."""

import pytest

from tests.bench.paired import difference


def test_a_constant_gain_has_an_interval_of_no_width():
    before = {str(i): i / 10 for i in range(5)}
    after = {task: value + 0.25 for task, value in before.items()}
    assert difference([after], [before]) == pytest.approx((0.25, 0.25, 0.25))


def test_rows_are_paired_so_that_what_varies_between_them_does_not_widen_the_interval():
    before = {str(i): float(i % 2) for i in range(100)}
    after = {task: value + (0.1 if int(task) < 50 else 0.0) for task, value in before.items()}
    mean, low, high = difference([after], [before])
    assert mean == pytest.approx(0.05)
    # The standard error of a mean of 100 draws of 0 or 0.1 is 0.05 / 10; 1.96 of them on either side.
    assert low == pytest.approx(0.05 - 0.0098, abs=0.002)
    assert high == pytest.approx(0.05 + 0.0098, abs=0.002)


def test_seeds_are_averaged_a_row_before_rows_are_drawn():
    before = [{"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}]
    after = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}]
    assert difference(after, before) == pytest.approx((0.5, 0.5, 0.5))


def test_sides_without_a_common_row_are_refused():
    with pytest.raises(SystemExit, match="no held-out row in common"):
        difference([{"a": 1.0}], [{"b": 1.0}])
