"""Packing loses no token, and every reply token is predicted from its own row's past."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from masflow.models.experience import Row
from masflow.models.packs import Budget, MicroBatch, pack

ids = st.lists(st.integers(1, 4), min_size=1, max_size=7).map(tuple)
replies = st.lists(ids, min_size=1, max_size=4)
groups = st.lists(st.tuples(ids, replies), min_size=1, max_size=6)


def _rows(drawn: list[tuple[tuple[int, ...], list[tuple[int, ...]]]]) -> list[Row]:
    pairs = [(prompt, reply) for prompt, several in drawn for reply in several]
    return [Row(f"t{i}", "m", p, r, (0.0,) * len(r), 0, "", "") for i, (p, r) in enumerate(pairs)]


def _past(batch: MicroBatch, flat: int) -> tuple[int, ...]:
    """The tokens that the flat place sees, by position; itself included."""
    s, t = divmod(flat, batch.ids_ST.shape[1])
    seen = range(t + 1) if batch.mask is None else batch.mask[s, 0, t].nonzero()[:, 0].tolist()
    depths = [int(batch.positions_ST[s, k]) for k in seen]
    assert sorted(depths) == list(range(len(depths)))
    return tuple(int(batch.ids_ST[s, k]) for _, k in sorted(zip(depths, seen, strict=True)))


@given(groups, st.sampled_from([1, 16, 60, 4096]), st.integers(1, 400))
def test_packing_loses_no_token(drawn: list, tokens: int, logits: int) -> None:
    rows = _rows(drawn)
    batches = pack(rows, [1.0] * len(rows), vocab_size=5, budget=Budget(tokens, logits, 2000))
    found: dict[tuple[int, int], int] = {}
    for batch in batches:
        for u, target, b, offset in zip(
            batch.prediction_N.tolist(),
            batch.target_N.tolist(),
            batch.row_N.tolist(),
            batch.offset_N.tolist(),
            strict=True,
        ):
            row = rows[batch.rows[b]]
            assert (batch.rows[b], offset) not in found
            found[batch.rows[b], offset] = target
            assert _past(batch, int(batch.source_U[u])) == row.prompt_ids + row.reply_ids[:offset]
    assert found == {(n, k): t for n, row in enumerate(rows) for k, t in enumerate(row.reply_ids)}


@given(groups)
def test_a_micro_batch_keeps_to_its_budget(drawn: list) -> None:
    rows = _rows(drawn)
    for batch in pack(rows, [1.0] * len(rows), vocab_size=5, budget=Budget(tokens=40, logits=100)):
        trees = batch.ids_ST.shape[0]
        assert trees == 1 or (batch.ids_ST.numel() <= 40 and len(batch.source_U) * 5 <= 100)


def test_equal_prompts_and_replies_are_computed_once() -> None:
    prompt = tuple(range(1, 21))
    rows = _rows([(prompt, [(1, 2, 3), (1, 2, 3), (1, 4), (2,)])])
    (batch,) = pack(rows, [1.0] * 4, vocab_size=30)
    assert batch.ids_ST.shape == (1, 22)  # the prompt, then 1 and 2; a last token is never looked at
    assert len(batch.source_U) == 3 and len(batch.target_N) == 9
    (mixed,) = pack(rows, [1.0, 0.5, 1.0, 1.0], vocab_size=30)
    assert len(mixed.source_U) == 6  # a prediction under two temperatures is two


def test_a_conversation_is_one_tree() -> None:
    first, second = tuple(range(1, 9)), (3, 1, 4)
    rows = _rows([(first, [(9, 9)]), ((*first, 9, 9, *second), [(7,)])])
    (batch,) = pack(rows, [1.0, 1.0], vocab_size=30)
    assert batch.ids_ST.tolist() == [[*first, 9, 9, *second]]
    assert sorted(batch.target_N.tolist()) == [7, 9, 9]


def test_trees_are_sorted_so_that_padding_stays_small() -> None:
    rows = _rows([((k,) * (4 + 9 * k), [(1,)]) for k in range(12)] * 8)
    batches = pack(rows, [1.0] * len(rows), vocab_size=30)
    assert all(a.ids_ST.shape[1] >= b.ids_ST.shape[1] for a, b in pairwise(batches))
    assert all(isinstance(b.mask, torch.Tensor) or b.mask is None for b in batches)
