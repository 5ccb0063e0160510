"""Keys and values of rows that are drawn together: a prompt's once, however many rows stand on it.

Shapes: H key-value heads, R query heads a key-value head, D head size, G prompts of a block, M places of its
grid (G times the most rows of a prompt), P prompt tokens, T tokens of the rows' own. A block holds the rows
that were admitted together, or several such blocks that became one: its rows end at the same own token, and
some began later. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from masflow.models.speaking import Opening, Prefix

__all__ = ["Block", "join_blocks", "split_blocks"]

_STEP = 32
"""Own tokens of room that a full block makes at least."""
_PADDING = 4096
"""Empty places times tokens that cost less than the operations of a block of their own."""
_SMALL, _APART = 2**23, 4
"""Bytes up to which blocks are put together; how many blocks there may be before larger ones are."""


class Block:
    """Prompts of like length with like numbers of rows, and what those rows said since.

    A place of the grid is a row, or empty: an empty one computes what nobody reads.
    """

    def __init__(self, openings: Sequence[Opening], first_rows: Sequence[int], num_layers: int, like: Tensor):
        """
        Args:
            first_rows: the first row of each opening; its other copies stand behind it.
            like: (H, D), for sizes, dtype and device.
        """
        heads, size = like.shape
        self.lengths = [len(o.ids) for o in openings]
        self.width = max(o.copies for o in openings)
        longest, count = max(self.lengths), len(openings)
        make = like.new_zeros if min(self.lengths) < longest else like.new_empty
        self.keys = [make(heads, count, size, longest) for _ in range(num_layers)]
        """A layer: (H, G, D, P), so that scores are a plain product."""
        self.values = [make(heads, count, longest, size) for _ in range(num_layers)]
        self.own = [like.new_empty(2, heads, count * self.width, _STEP, size) for _ in range(num_layers)]
        """A layer: (2, H, M, room, D), keys and values."""
        self.num_own = 0
        self.starts = [0] * count
        """The first own token of each prompt's rows."""
        self.grid: list[int] = []
        for opening, first in zip(openings, first_rows, strict=True):
            self.grid += [*range(first, first + opening.copies)]
            self.grid += [-1] * (self.width - opening.copies)
        self.bias: Tensor | None = None
        self.own_bias: Tensor | None = None

    @property
    def rows(self) -> list[int]:
        return [row for row in self.grid if row >= 0]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, at most."""
        return max(self.lengths) + self.num_own

    @property
    def area(self) -> int:
        """Places times tokens: what attention has to go through."""
        return len(self.grid) * self.longest

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values, *self.own))

    @property
    def positions(self) -> list[int]:
        """Of the next token of every row, in the grid's order."""
        lengths = [
            length + self.num_own - start for length, start in zip(self.lengths, self.starts, strict=True)
        ]
        return [lengths[place // self.width] for place, row in enumerate(self.grid) if row >= 0]

    def fill(self, layer: int, group: int, keys: Tensor, values: Tensor) -> None:
        """Keep (U, H, P, D) keys and values of the prompts from `group` on."""
        groups, length = slice(group, group + len(keys)), keys.shape[2]
        self.keys[layer][:, groups, :, :length] = keys.permute(1, 0, 3, 2)
        self.values[layer][:, groups, :length] = values.transpose(0, 1)

    def begin(self, num_rows: int) -> None:
        """Make ready for steps: where rows stand, and which prompt tokens aren't there."""
        rows, device = self.rows, self.keys[0].device
        first = min(rows)
        self.span = slice(first, first + len(rows))
        self.is_dense = self.grid == list(range(first, first + len(self.grid)))
        self.is_whole = self.is_dense and len(rows) == num_rows
        self.gather = torch.tensor([row if row >= 0 else first for row in self.grid], device=device)
        places = [place for place, row in enumerate(self.grid) if row >= 0]
        self.places = torch.tensor(places, device=device)
        self.targets = torch.tensor(rows, device=device)
        self._views: list[Any] = [None] * len(self.keys)
        for layer in range(len(self.keys)):
            self._look(layer)
        self.bias = self.own_bias = None
        if min(self.lengths) < (longest := max(self.lengths)):
            places_P, lengths_G1 = torch.arange(longest), torch.tensor(self.lengths)[:, None]
            self.bias = _hidden(places_P >= lengths_G1, self.keys[0])[None, :, None]
        if any(self.starts):
            starts_M1 = torch.tensor(self.starts).repeat_interleave(self.width)[:, None]
            self.own_bias = _hidden(torch.arange(max(self.starts)) < starts_M1, self.keys[0])[None, :, None]

    def step(self) -> None:
        """Make room for one more own token of every row."""
        room = self.own[0].shape[3]
        if self.num_own == room:
            for layer, own in enumerate(self.own):
                self.own[layer] = own.new_empty(*own.shape[:3], room + max(_STEP, room // 2), own.shape[4])
                self.own[layer][:, :, :, :room] = own
                self._look(layer)
        self.num_own += 1

    def _look(self, layer: int) -> None:
        """A layer's keys and values in the shapes that products take."""
        heads, count, size, longest = self.keys[layer].shape
        own = self.own[layer]
        self._views[layer] = (
            self.keys[layer].view(heads * count, size, longest),
            self.values[layer].view(heads * count, longest, size),
            own,
            own[0].flatten(0, 1).transpose(1, 2),
            own[1].flatten(0, 1),
        )

    def attend(self, layer: int, heads_BHD: Tensor) -> Tensor:
        """Take the rows' newest keys and values, and let their queries look at everything before.

        Args:
            heads_BHD: (B, H·R + 2 H, D), scaled queries, keys, values.
        Returns:
            (M, H·R·D) in the grid's order.
        """
        if not self.is_whole:
            heads_BHD = heads_BHD[self.span] if self.is_dense else heads_BHD.index_select(0, self.gather)
        keys, values, own, own_keys, own_values = self._views[layer]
        num_own, heads, size = self.num_own, own.shape[1], own.shape[4]
        places, total, _ = heads_BHD.shape
        queries = total - 2 * heads
        repeat, longest = queries // heads, keys.shape[2]
        newest = heads_BHD[:, queries:].view(places, 2, heads, size).permute(1, 2, 0, 3)
        own.select(3, num_own - 1).copy_(newest)
        query = heads_BHD[:, :queries].view(places, heads, repeat, size).transpose(0, 1).contiguous()
        before = torch.bmm(query.view(keys.shape[0], -1, size), keys)
        if self.bias is not None:
            before.view(heads, -1, self.width * repeat, longest).add_(self.bias)
        since = torch.bmm(query.view(heads * places, repeat, size), own_keys[:, :, :num_own])
        if self.own_bias is not None:
            late = since.view(heads, places, repeat, num_own)[..., : self.own_bias.shape[-1]]
            late.add_(self.own_bias[..., :num_own])
        probs = torch.cat((before.view(heads * places, repeat, longest), since), -1).softmax(-1)
        out = torch.bmm(probs[:, :, :longest].view(keys.shape[0], -1, longest), values)
        out = out.view(heads * places, repeat, size)
        out.baddbmm_(probs[:, :, longest:], own_values[:, :num_own])
        return out.view(heads, places, repeat * size).transpose(0, 1).reshape(places, queries * size)

    def leave(self, renumbered: Sequence[int]) -> None:
        """Rows go: their places are empty, and the grid closes up where a quarter of it would be.

        Args:
            renumbered: the new number of every old row; -1 of those that go.
        """
        self.grid = [renumbered[row] if row >= 0 else -1 for row in self.grid]
        groups = [self.grid[i : i + self.width] for i in range(0, len(self.grid), self.width)]
        there = [[place for place, row in enumerate(group) if row >= 0] for group in groups]
        width = max(map(len, there))
        stay = [g for g, places in enumerate(there) if places]
        size = len(stay) * width
        if size and (size < 0.75 * len(self.grid) or size == len(self.rows)):
            self._close_up(groups, there, stay, width)

    def _close_up(self, groups: list[list[int]], there: list[list[int]], stay: list[int], width: int) -> None:
        if len(stay) * width == len(self.grid):
            return
        device = self.keys[0].device
        picked = [(there[g] + [0] * width)[:width] for g in stay]
        self.grid = [
            groups[g][place] if i < len(there[g]) else -1
            for g, places in zip(stay, picked, strict=True)
            for i, place in enumerate(places)
        ]
        index = torch.tensor(
            [g * self.width + p for g, places in zip(stay, picked, strict=True) for p in places],
            device=device,
        )
        # A room as big as what is left, not a copy of the room.
        self.own = [own.index_select(2, index) for own in self.own]
        if len(stay) < len(self.lengths):
            stay_G = torch.tensor(stay, device=device)
            self.lengths = [self.lengths[g] for g in stay]
            self.starts = [self.starts[g] for g in stay]
            longest = max(self.lengths)
            self.keys = [k.index_select(1, stay_G)[..., :longest].contiguous() for k in self.keys]
            self.values = [v.index_select(1, stay_G)[:, :, :longest].contiguous() for v in self.values]
        self.width = width

    def prefix(self, row: int) -> Prefix:
        """All tokens that a row was fed."""
        place = self.grid.index(row)
        group, own = place // self.width, self.num_own
        start = self.starts[group]
        length = self.lengths[group]
        keys = tuple(
            torch.cat((k[:, group, :, :length].transpose(1, 2), o[0, :, place, start:own]), 1)
            for k, o in zip(self.keys, self.own, strict=True)
        )
        values = tuple(
            torch.cat((v[:, group, :length], o[1, :, place, start:own]), 1)
            for v, o in zip(self.values, self.own, strict=True)
        )
        return Prefix(length + own - start, keys, values)


def join_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Blocks, like ones put together: each costs operations of its own at every step and layer."""
    out = sorted(blocks, key=lambda block: block.num_bytes, reverse=True)
    kept: list[Block] = []
    while len(out) > 1:
        one, other = out[-2:]
        prompts, width = len(one.lengths) + len(other.lengths), max(one.width, other.width)
        padded = prompts * width * max(one.longest, other.longest)
        is_near = padded - one.area - other.area <= max(_PADDING, (one.area + other.area) // 2)
        if is_near and (one.num_bytes + other.num_bytes <= _SMALL or len(out) + len(kept) > _APART):
            out[-2:] = [_joined(one, other)]
        else:
            kept.append(out.pop())
    return sorted(out + kept, key=lambda block: min(block.rows))


def _joined(one: Block, other: Block) -> Block:
    """A block of both blocks' prompts and rows."""
    if min(other.rows) < min(one.rows):
        one, other = other, one
    block = object.__new__(Block)
    block.lengths, block.width = one.lengths + other.lengths, max(one.width, other.width)
    block.num_own = max(one.num_own, other.num_own)
    block.starts = [start + block.num_own - b.num_own for b in (one, other) for start in b.starts]
    block.grid = []
    for b in (one, other):
        for start in range(0, len(b.grid), b.width):
            block.grid += b.grid[start : start + b.width] + [-1] * (block.width - b.width)
    block.bias = block.own_bias = None
    longest, room = max(block.lengths), block.num_own + _STEP
    block.keys, block.values, block.own = [], [], []
    for layer in range(len(one.keys)):
        heads, _, size, _ = one.keys[layer].shape
        keys = one.keys[layer].new_zeros(heads, len(block.lengths), size, longest)
        values = one.values[layer].new_zeros(heads, len(block.lengths), longest, size)
        own = one.own[layer].new_zeros(2, heads, len(block.lengths), block.width, room, size)
        group = 0
        for b in (one, other):
            groups, length = slice(group, group + len(b.lengths)), b.keys[layer].shape[3]
            keys[:, groups, :, :length] = b.keys[layer]
            values[:, groups, :length] = b.values[layer]
            theirs = b.own[layer].view(2, heads, len(b.lengths), b.width, -1, size)[..., : b.num_own, :]
            own[:, :, groups, : b.width, block.num_own - b.num_own : block.num_own] = theirs
            group += len(b.lengths)
        block.keys.append(keys)
        block.values.append(values)
        block.own.append(own.view(2, heads, -1, room, size))
    return block


def _hidden(is_hidden: Tensor, like: Tensor) -> Tensor:
    """Minus infinity where true."""
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf")).to(like)


def split_blocks(openings: Sequence[Opening]) -> list[list[int]]:
    """Numbers of openings in blocks whose grids are at most half as big again as what stands in them."""
    order = sorted(range(len(openings)), key=lambda u: (openings[u].copies, len(openings[u].ids)))
    blocks: list[list[int]] = []
    longest = filled = 0
    for u in order:
        copies, length = openings[u].copies, len(openings[u].ids) + _STEP
        if blocks:
            padded = (len(blocks[-1]) + 1) * copies * max(longest, length)
            if padded <= 1.5 * (filled + copies * length):
                blocks[-1].append(u)
                longest, filled = max(longest, length), filled + copies * length
                continue
        blocks.append([u])
        longest, filled = length, copies * length
    return [sorted(block) for block in blocks]
