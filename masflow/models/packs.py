"""Packs rows into trees of tokens: what several rows begin with is computed once, and nothing is cut or lost.

Shapes: S trees of a micro-batch, T tokens of a tree (padded), U predictions, N reply tokens, B rows. A tree
is a trie of its rows' ids: the samples of one prompt, and the turns of one conversation, share their
beginning. A token looks at its ancestors alone, and its position is its depth, so that each row sees what
it saw when it was sampled. Where attention can be taken in blocks, the trees of a micro-batch stand one
behind the other instead (S = 1), without padding and without a mask. Knows no losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masflow.models.experience import Row
from masflow.models.tree_blocks import Block, blocks_of

__all__ = ["Budget", "MicroBatch", "budget_of", "pack", "trees_of"]


_FULL = 0.75
"""A tree shorter than this share of its micro-batch's longest opens the next one, …"""
_SMALL_TOKENS = 512
"""… unless the micro-batch is still this small: then a further pass costs more than the padding."""


_WORTH = 16
"""Tokens whose sharing pays for the blocks that it adds."""


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
    width: int = 0
    """Hidden units of a model whose attention takes blocks; 0: it doesn't."""
    shares: bool = True
    """Whether rows share their beginnings; else each is a tree of its own."""


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
    """(S, 1, T, T) bool; None: plain causal, or in blocks."""
    blocks: tuple[Block, ...] | None
    """Which tokens look at which, where S = 1 and several trees stand in it; None: as the mask says."""
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
    """A trie in depth-first order; a segment is (first new node, one past the last, ancestors before it)."""

    ids: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    segments: list[tuple[int, int, list[int]]] = field(default_factory=list)
    rows: list[tuple[int, list[int]]] = field(default_factory=list)
    """(row number, its path of nodes)."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return blocks_of(self.parents)

    def add(self, number: int, tokens: Sequence[int], shared: Sequence[int]) -> list[int]:
        """Append a row whose first tokens are the nodes `shared`; returns its path."""
        first, end = len(self.ids), len(self.ids) + len(tokens) - len(shared)
        self.ids.extend(tokens[len(shared) :])
        self.depth.extend(range(len(shared), len(tokens)))
        path = [*shared, *range(first, end)]
        if first < end:
            self.parents.extend([shared[-1] if shared else -1, *range(first, end - 1)])
            self.segments.append((first, end, list(shared)))
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
    _, stacks = _batches(rows, vocab_size, replace(budget, width=0))
    is_flat = False
    if budget.width:
        flat_trees, flat = _batches(rows, vocab_size, budget)
        is_flat = _cost_in_blocks(flat_trees, budget.width) < _cost_stacked(stacks, budget.width)
        stacks = flat if is_flat else stacks
    place = device or torch.device("cpu")
    return [_micro_batch(stack, rows, temperatures, place, is_flat) for stack in stacks]


def _batches(rows: Sequence[Row], vocab_size: int, budget: Budget) -> tuple[list[_Tree], list[list[_Tree]]]:
    """Trees, the largest first, and by micro-batch."""
    trees = sorted(_trees(rows, budget), key=lambda tree: -len(tree.ids))
    fits = _fits_flat if budget.width else _fits
    batches: list[list[_Tree]] = []
    predictions = 0
    for tree in trees:
        count = sum(len(rows[number].reply_ids) for number, _ in tree.rows)
        predictions += count
        if batches and predictions * vocab_size <= budget.logits and fits(batches[-1], tree, budget):
            batches[-1].append(tree)
        else:
            batches.append([tree])
            predictions = count
    return trees, batches


def trees_of(rows: Sequence[Row]) -> list[tuple[list[int], int]]:
    """(row numbers, ascending; tokens of the tree) of each tree that `pack` makes of these rows."""
    return [(sorted(number for number, _ in tree.rows), len(tree.ids)) for tree in _trees(rows, Budget())]


_CALL, _TOKEN = 768_000, 4.6
"""What a call of the attention kernel costs, and a token in the other layers: as much as this number divided
by, and times, the hidden units of products of a query and a key. Measured on CPU at 1M to 20M parameters."""


def _cost_in_blocks(trees: Sequence[_Tree], width: int) -> float:
    pairs = sum(block.num_pairs for tree in trees for block in tree.blocks)
    calls, tokens = sum(len(tree.blocks) for tree in trees), sum(len(tree.ids) for tree in trees)
    return pairs + calls * _CALL / width + tokens * _TOKEN * width


def _cost_stacked(stacks: Sequence[Sequence[_Tree]], width: int) -> float:
    sizes = [(len(stack), len(stack[0].ids)) for stack in stacks]
    return sum(s * t**2 + _CALL / width + s * t * _TOKEN * width for s, t in sizes)


def _fits_flat(batch: list[_Tree], tree: _Tree, budget: Budget) -> bool:
    return sum(len(t.ids) for t in (*batch, tree)) <= budget.tokens


def _fits(batch: list[_Tree], tree: _Tree, budget: Budget) -> bool:
    size, longest = len(batch) + 1, len(batch[0].ids)
    if len(tree.ids) < _FULL * longest and len(batch) * longest >= _SMALL_TOKENS:
        return False
    needs_mask = any(len(t.segments) > 1 for t in (*batch, tree))
    return size * longest <= budget.tokens and (not needs_mask or size * longest**2 <= budget.mask)


def _trees(rows: Sequence[Row], budget: Budget) -> list[_Tree]:
    """Rows in lexicographic order, so that each shares its longest beginning with the one before it."""
    # The last reply token is only ever predicted, never looked at.
    tokens = [row.prompt_ids + row.reply_ids[:-1] for row in rows]
    trees: list[_Tree] = []
    path: list[int] = []
    before: Sequence[int] = ()
    for number in sorted(range(len(rows)), key=lambda i: (tokens[i], i)):
        shared = _common(before, tokens[number]) if budget.shares else 0
        if not trees or not _worth_sharing(shared, len(tokens[number]), len(trees[-1].ids), budget):
            trees.append(_Tree())
            shared, path = 0, []
        path = trees[-1].add(number, tokens[number], path[:shared])
        before = tokens[number]
    return trees


def _worth_sharing(shared: int, length: int, size: int, budget: Budget) -> bool:
    """Under a mask attention costs the square of a tree's size, so a row joins only if it brings little that
    is new; in blocks it costs a further one or two."""
    grown = size + length - shared
    if budget.width:
        return shared >= _WORTH and grown <= budget.tokens
    return shared > 0 and shared >= length // 2 and grown <= max(256, 2 * length)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning, halved to: slices are compared faster than their items."""
    first, end = 0, min(len(a), len(b))
    while first < end:
        middle = (first + end + 1) // 2
        if a[first:middle] == b[first:middle]:
            first = middle
        else:
            end = middle - 1
    return first


def _micro_batch(
    trees: list[_Tree],
    rows: Sequence[Row],
    temperatures: Sequence[float],
    device: torch.device,
    is_flat: bool,
) -> MicroBatch:
    longest = max(len(tree.ids) for tree in trees)
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + (len(tree.ids) if is_flat else longest))
    ids_T, positions_T = np.zeros(starts[-1], dtype=np.int64), np.zeros(starts[-1], dtype=np.int64)
    numbers: list[int] = []
    sources: list[np.ndarray] = []
    for start, tree in zip(starts, trees, strict=False):
        ids_T[start : start + len(tree.ids)] = tree.ids
        positions_T[start : start + len(tree.ids)] = tree.depth
        for number, path in tree.rows:
            numbers.append(number)
            sources.append(np.array(path[len(rows[number].prompt_ids) - 1 :], dtype=np.int64) + start)
    lengths = [len(rows[number].reply_ids) for number in numbers]
    # A prediction is a place and a temperature; one that several rows share is made once.
    known, which = np.unique([temperatures[number] for number in numbers], return_inverse=True)
    made = np.concatenate(sources) * len(known) + np.repeat(which, lengths)
    predictions, prediction_N = np.unique(made, return_inverse=True)
    targets = [token for number in numbers for token in rows[number].reply_ids]
    offset_N = np.concatenate([np.arange(length) for length in lengths])

    def put(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values), dtype=dtype, device=device)

    size = 1 if is_flat else len(trees)
    moved = (b.moved(start) for start, tree in zip(starts, trees, strict=False) for b in tree.blocks)
    return MicroBatch(
        rows=tuple(numbers),
        ids_ST=put(ids_T).view(size, -1),
        mask=None if is_flat else _mask(trees, longest, device),
        blocks=tuple(moved) if is_flat else None,
        positions_ST=put(positions_T).view(size, -1),
        source_U=put(predictions // len(known)),
        temperature_U=put(known[predictions % len(known)], torch.float64),
        prediction_N=put(prediction_N),
        target_N=put(targets),
        row_N=put(np.repeat(np.arange(len(numbers)), lengths)),
        offset_N=put(offset_N),
        lengths_B=put(lengths),
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
