"""Which rows a position draws."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from masflow.runtime.schedule import Mixture, draw, epoch_order, shares


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 100), st.integers(0, 5))
def test_an_epoch_holds_every_row_once(num_rows: int, seed: int, epoch: int):
    assert sorted(epoch_order(num_rows, seed, epoch)) == list(range(num_rows))


@settings(deadline=None)
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


WEIGHTS = st.lists(st.floats(0.01, 50).map(lambda w: round(w, 2)), min_size=2, max_size=5)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 200), st.integers(0, 40))
def test_a_mixture_goes_on_from_any_position_as_if_it_had_never_stopped(
    weights: list[float], position: int, count: int
):
    from_the_start = shares(weights, 0, position + count)
    assert shares(weights, position, count) == from_the_start[position:]
    drawn: Counter[int] = Counter()
    for number, before in from_the_start:
        assert before == drawn[number]
        drawn[number] += 1


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 200))
def test_every_source_of_a_mixture_has_its_share_at_any_moment(weights: list[float], count: int):
    drawn = Counter(number for number, _ in shares(weights, 0, count))
    for number, weight in enumerate(weights):
        # Draws come in order of their times: no source is ahead of or behind its share by a whole round.
        assert abs(drawn[number] - count * weight / sum(weights)) < len(weights)


def test_shares_by_hand():
    # due times: (j + 1/2) / 2 = .25, .75, 1.25, …; (j + 1/2) / 1 = .5, 1.5, …
    assert [number for number, _ in shares([2, 1], 0, 6)] == [0, 1, 0, 0, 1, 0]
    assert [number for number, _ in shares([1, 1], 0, 4)] == [0, 1, 0, 1]


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 30), st.booleans())
def test_each_source_of_a_mixture_is_cycled_by_its_own_shuffle(
    position: int, first: int, second: int, shuffle: bool
):
    mixture = Mixture((2, 9, 5), (1.0, 3.0, 0.5))
    at_once = mixture.draw(position, first + second, 3, shuffle)
    parts = mixture.draw(position, first, 3, shuffle) + mixture.draw(position + first, second, 3, shuffle)
    assert parts == at_once
    everything = mixture.draw(0, position + first + second, 3, shuffle)
    for start, size in ((0, 2), (2, 9), (11, 5)):
        mine = [item - start for item in everything if start <= item < start + size]
        epochs = [mine[at : at + size] for at in range(0, len(mine) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)


def test_without_weights_a_mixture_is_one_file_and_an_empty_source_is_none():
    mixed = Mixture.of([None, None], [0, 0, 0, 1, 1])
    assert mixed.draw(2, 7, seed=5) == draw(5, 2, 7, seed=5)
    assert Mixture.of([1.0, 2.0, 4.0], [0, 0, 2, 2, 2]) == Mixture((2, 3), (1.0, 4.0))
    assert Mixture.of([1.0, 2.0], [1, 1]).draw(0, 4, seed=5) == draw(2, 0, 4, seed=5)
    orders = [tuple(Mixture((9, 9), (1.0, 1.0)).draw(0, 18, seed)) for seed in range(4)]
    assert len(set(orders)) == 4
    assert all(a != b for a, b in pairwise(orders))
