"""Packs rows into trees of tokens: what several rows begin with is computed once, and nothing is cut or lost.

Shapes: S trees of a micro-batch, T tokens of a tree (padded), U predictions, N reply tokens, B rows. A tree
is a trie of its rows' ids: the samples of one prompt, and the turns of one conversation, share their
beginning. A token looks at its ancestors alone, and its position is its depth, so that each row sees what
it saw when it was sampled. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masflow.models.experience import Row

__all__ = ["Budget", "MicroBatch", "budget_of", "pack", "trees_of"]


_FULL = 0.75
"""A tree shorter than this share of its micro-batch's longest opens the next one, …"""
_SMALL_TOKENS = 512
"""… unless the micro-batch is still this small: then a further pass costs more than the padding."""


@dataclass(frozen=True)
class Budget:
    """Bounds of one micro-batch. A single row always fits, however long."""

    tokens: int = 8192
    """Tokens, padding included."""
    logits: int = 1 << 26
    """Predictions times vocabulary entries; a single tree that has more is scored in parts of this size
    (`masflow.models.vocabulary`, where its memory is told)."""
    mask: int = 1 << 26
    """Entries of the attention mask."""


def budget_of(config: Any) -> Budget:
    """A budget whose activations stay near 2 GB, told roughly: 40 numbers a hidden unit, layer and token."""
    layers, width = int(config.num_hidden_layers), int(config.hidden_size)
    return Budget(tokens=max(512, min(8192, 2_000_000_000 // (160 * layers * width))))


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass needs. Index tensors are int64."""

    rows: tuple[int, ...]
    """Numbers of the rows in the order of the call to `pack`; B = len(rows)."""
    ids_ST: Tensor
    mask: Tensor | None
    """(S, 1, T, T) bool; None: plain causal."""
    positions_ST: Tensor
    source_U: Tensor
    """Flat place (s · T + t) of the hidden state that makes each prediction."""
    temperature_U: Tensor
    prediction_N: Tensor
    """Which of the U predictions a reply token is scored by."""
    target_N: Tensor
    row_N: Tensor
    """Place in `rows`."""
    offset_N: Tensor
    """Place in the row's reply."""
    lengths_B: Tensor
    """Reply tokens of each row."""


@dataclass
class _Tree:
    """A trie in order of insertion; a segment is (first new node, one past the last, ancestors before it)."""

    ids: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    segments: list[tuple[int, int, list[int]]] = field(default_factory=list)
    rows: list[tuple[int, list[int]]] = field(default_factory=list)
    """(row number, its path of nodes)."""

    @property
    def num_predictions(self) -> int:
        return sum(len(path) for _, path in self.rows)

    def add(self, number: int, tokens: Sequence[int], shared: Sequence[int]) -> list[int]:
        """Append a row whose first tokens are the nodes `shared`; returns its path."""
        first = len(self.ids)
        self.ids.extend(tokens[len(shared) :])
        self.depth.extend(range(len(shared), len(tokens)))
        path = [*shared, *range(first, len(self.ids))]
        if first < len(self.ids):
            self.segments.append((first, len(self.ids), list(shared)))
        self.rows.append((number, path))
        return path


def pack(
    rows: Sequence[Row],
    temperatures: Sequence[float],
    *,
    vocab_size: int,
    budget: Budget | None = None,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Micro-batches that hold every reply token of every row exactly once.

    Args:
        temperatures: what each row's logits are divided by; equal lengths.
    """
    budget = budget or Budget()
    trees = sorted(_trees(rows), key=lambda tree: -len(tree.ids))
    batches: list[list[_Tree]] = []
    predictions = 0
    for tree in trees:
        count = sum(len(rows[number].reply_ids) for number, _ in tree.rows)
        if batches and _fits(batches[-1], tree, predictions + count, vocab_size, budget):
            batches[-1].append(tree)
            predictions += count
        else:
            batches.append([tree])
            predictions = count
    return [_micro_batch(batch, rows, temperatures, device or torch.device("cpu")) for batch in batches]


def trees_of(rows: Sequence[Row]) -> list[tuple[list[int], int]]:
    """(row numbers, ascending; tokens of the tree) of each tree that `pack` makes of these rows."""
    return [(sorted(number for number, _ in tree.rows), len(tree.ids)) for tree in _trees(rows)]


def _fits(batch: list[_Tree], tree: _Tree, predictions: int, vocab_size: int, budget: Budget) -> bool:
    size, longest = len(batch) + 1, len(batch[0].ids)
    if len(tree.ids) < _FULL * longest and len(batch) * longest >= _SMALL_TOKENS:
        return False
    needs_mask = any(len(t.segments) > 1 for t in (*batch, tree))
    return (
        size * longest <= budget.tokens
        and predictions * vocab_size <= budget.logits
        and (not needs_mask or size * longest**2 <= budget.mask)
    )


def _trees(rows: Sequence[Row]) -> list[_Tree]:
    """Rows in lexicographic order, so that each shares its longest beginning with the one before it."""
    # The last reply token is only ever predicted, never looked at.
    tokens = [row.prompt_ids + row.reply_ids[:-1] for row in rows]
    trees: list[_Tree] = []
    path: list[int] = []
    before: Sequence[int] = ()
    for number in sorted(range(len(rows)), key=lambda i: (tokens[i], i)):
        shared = _common(before, tokens[number])
        if not trees or not _worth_sharing(shared, len(tokens[number]), len(trees[-1].ids)):
            trees.append(_Tree())
            shared, path = 0, []
        path = trees[-1].add(number, tokens[number], path[:shared])
        before = tokens[number]
    return trees


def _worth_sharing(shared: int, length: int, size: int) -> bool:
    """Attention costs the square of a tree's size, so a row joins only if it brings little that is new."""
    return shared >= length // 2 and size + length - shared <= max(256, 2 * length)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def _micro_batch(
    trees: list[_Tree], rows: Sequence[Row], temperatures: Sequence[float], device: torch.device
) -> MicroBatch:
    longest = max(len(tree.ids) for tree in trees)
    ids_ST = np.zeros((len(trees), longest), dtype=np.int64)
    positions_ST = np.zeros((len(trees), longest), dtype=np.int64)
    for s, tree in enumerate(trees):
        ids_ST[s, : len(tree.ids)] = tree.ids
        positions_ST[s, : len(tree.ids)] = tree.depth
    numbers: list[int] = []
    predictions: dict[tuple[int, float], int] = {}
    entries: list[tuple[int, int, int, int]] = []
    for s, tree in enumerate(trees):
        for number, path in tree.rows:
            row, temperature = rows[number], temperatures[number]
            for offset, target in enumerate(row.reply_ids):
                source = s * longest + path[len(row.prompt_ids) - 1 + offset]
                u = predictions.setdefault((source, temperature), len(predictions))
                entries.append((u, target, len(numbers), offset))
            numbers.append(number)
    prediction_N, target_N, row_N, offset_N = (
        torch.tensor(entries, dtype=torch.int64, device=device).reshape(-1, 4).unbind(1)
    )
    return MicroBatch(
        rows=tuple(numbers),
        ids_ST=torch.from_numpy(ids_ST).to(device),
        mask=_mask(trees, longest, device),
        positions_ST=torch.from_numpy(positions_ST).to(device),
        source_U=torch.tensor([source for source, _ in predictions], dtype=torch.int64, device=device),
        temperature_U=torch.tensor([t for _, t in predictions], dtype=torch.float64, device=device),
        prediction_N=prediction_N,
        target_N=target_N,
        row_N=row_N,
        offset_N=offset_N,
        lengths_B=torch.tensor([len(rows[n].reply_ids) for n in numbers], device=device),
    )


def _mask(trees: list[_Tree], longest: int, device: torch.device) -> Tensor | None:
    if all(len(tree.segments) == 1 for tree in trees):
        return None
    mask_STT = np.zeros((len(trees), longest, longest), dtype=bool)
    for s, tree in enumerate(trees):
        for first, last, ancestors in tree.segments:
            mask_STT[s, first:last, ancestors] = True
            mask_STT[s, first:last, first:last] = np.tri(last - first, dtype=bool)
        for pad in range(len(tree.ids), longest):
            mask_STT[s, pad, pad] = True
    return torch.from_numpy(mask_STT).to(device)[:, None]
