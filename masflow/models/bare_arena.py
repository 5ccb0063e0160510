"""Keys and values of rows that are drawn together: a prompt's once, however many rows stand on it.

Shapes: H key-value heads, R query heads a key-value head, D head size, G prompts of a block, M places of its
grid (G times the most rows of a prompt), P prompt tokens, T tokens of the rows' own. A block holds the rows
that were admitted together. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from masflow.models.speaking import Opening, Prefix

__all__ = ["Block", "split_blocks"]

_STEP = 32
"""Own tokens of room that a full block makes at least."""


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
        self.grid: list[int] = []
        for opening, first in zip(openings, first_rows, strict=True):
            self.grid += [*range(first, first + opening.copies)]
            self.grid += [-1] * (self.width - opening.copies)
        self.bias: Tensor | None = None

    @property
    def rows(self) -> list[int]:
        return [row for row in self.grid if row >= 0]

    @property
    def positions(self) -> list[int]:
        """Of the next token of every row, in the grid's order."""
        lengths = [length + self.num_own for length in self.lengths]
        return [lengths[place // self.width] for place, row in enumerate(self.grid) if row >= 0]

    def fill(self, layer: int, group: int, keys: Tensor, values: Tensor) -> None:
        """Keep (U, H, P, D) keys and values of the prompts from `group` on."""
        groups, length = slice(group, group + len(keys)), keys.shape[2]
        self.keys[layer][:, groups, :, :length] = keys.permute(1, 0, 3, 2)
        self.values[layer][:, groups, :length] = values.transpose(0, 1)

    def begin(self, device: torch.device) -> None:
        """Make ready for steps: where rows stand, and which prompt tokens aren't there."""
        rows = self.rows
        first = min(rows)
        self.span = slice(first, first + len(rows))
        self.is_dense = self.grid == list(range(first, first + len(self.grid)))
        self.gather = torch.tensor([row if row >= 0 else first for row in self.grid], device=device)
        places = [place for place, row in enumerate(self.grid) if row >= 0]
        self.places = torch.tensor(places, device=device)
        self.targets = torch.tensor(rows, device=device)
        self.bias = None
        if min(self.lengths) < (longest := max(self.lengths)):
            is_there = torch.arange(longest)[None] < torch.tensor(self.lengths)[:, None]
            bias = torch.zeros(is_there.shape).masked_fill_(~is_there, float("-inf"))
            self.bias = bias[None, :, None].to(self.keys[0])

    def make_room(self, layer: int) -> None:
        """For one more own token."""
        own = self.own[layer]
        room = own.shape[3]
        if self.num_own == room:
            bigger = own.new_empty(*own.shape[:3], room + max(_STEP, room // 2), own.shape[4])
            bigger[:, :, :, :room] = own
            self.own[layer] = bigger

    def attend(self, layer: int, rotated: Tensor, values: Tensor) -> Tensor:
        """Take the rows' newest keys and values, and let their queries look at everything before.

        Args:
            rotated: (B, H·R + H, D), scaled queries and keys.
            values: (B, H, D).
        Returns:
            (M, H·R·D) in the grid's order.
        """
        if self.is_dense:
            rotated, values = rotated[self.span], values[self.span]
        else:
            rotated, values = rotated[self.gather], values[self.gather]
        keys, own, own_len = self.keys[layer], self.own[layer], self.num_own + 1
        heads, count, size, longest = keys.shape
        places, width = len(rotated), self.width
        queries = rotated.shape[1] - heads
        repeat = queries // heads
        own[0, :, :, self.num_own].copy_(rotated[:, queries:].transpose(0, 1))
        own[1, :, :, self.num_own].copy_(values.transpose(0, 1))
        query = rotated[:, :queries].view(places, heads, repeat, size).transpose(0, 1).contiguous()
        shared = torch.bmm(
            query.view(heads * count, width * repeat, size), keys.view(heads * count, size, longest)
        )
        if self.bias is not None:
            shared.view(heads, count, width * repeat, longest).add_(self.bias)
        own_keys, own_values = own[0].flatten(0, 1)[:, :own_len], own[1].flatten(0, 1)[:, :own_len]
        alone = torch.bmm(query.view(heads * places, repeat, size), own_keys.transpose(1, 2))
        scores = torch.cat((shared.view(heads * places, repeat, longest), alone), -1)
        probs = torch.softmax(scores, -1)
        before = probs[..., :longest].view(heads * count, width * repeat, longest)
        out = torch.bmm(before, self.values[layer].view(heads * count, longest, size))
        out = out.view(heads * places, repeat, size).baddbmm_(probs[..., longest:], own_values)
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
            longest = max(self.lengths)
            self.keys = [k.index_select(1, stay_G)[..., :longest].contiguous() for k in self.keys]
            self.values = [v.index_select(1, stay_G)[:, :, :longest].contiguous() for v in self.values]
        self.width = width

    def prefix(self, row: int) -> Prefix:
        """All tokens that a row was fed."""
        place = self.grid.index(row)
        group, own = place // self.width, self.num_own
        length = self.lengths[group]
        keys = tuple(
            torch.cat((k[:, group, :, :length].transpose(1, 2), o[0, :, place, :own]), 1)
            for k, o in zip(self.keys, self.own, strict=True)
        )
        values = tuple(
            torch.cat((v[:, group, :length], o[1, :, place, :own]), 1)
            for v, o in zip(self.values, self.own, strict=True)
        )
        return Prefix(length + own, keys, values)


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
