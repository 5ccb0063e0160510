"""Which rows a position draws."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from masflow.runtime.schedule import draw, epoch_order


@given(st.integers(1, 30), st.integers(0, 100), st.integers(0, 5))
def test_an_epoch_holds_every_row_once(num_rows: int, seed: int, epoch: int):
    assert sorted(epoch_order(num_rows, seed, epoch)) == list(range(num_rows))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 20), st.integers(0, 20))
def test_drawing_in_two_parts_is_drawing_at_once(num_rows: int, position: int, first: int, second: int):
    at_once = draw(num_rows, position, first + second, seed=3)
    parts = draw(num_rows, position, first, seed=3) + draw(num_rows, position + first, second, seed=3)
    assert parts == at_once


def test_without_shuffling_rows_come_in_their_order_again_and_again():
    assert draw(3, 2, 5, seed=0, shuffle=False) == [2, 0, 1, 2, 0]


def test_epochs_and_seeds_differ():
    orders = {epoch_order(20, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
