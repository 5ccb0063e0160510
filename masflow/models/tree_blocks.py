"""Which tokens of a tree look at which, as blocks in which nobody is masked.

In a trie whose nodes stand in depth-first order, everything that descends from a run of nodes stands right
behind it. So a tree's attention is rectangles (descendants over the run) and runs over themselves, causally.
Knows no tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["STRIP", "Block", "blocks_of", "restricted"]

STRIP = 128
"""Rows of a run that are taken together: the flash kernel for CPUs computes what a causal mask hides, so that
a run of 512 in four strips costs a quarter less (measured, torch 2.13)."""


@dataclass(frozen=True)
class Block:
    """Rows (queries) that look at keys. Both are ranges [first, end) of the T tokens."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool = False
    """The last row looks at all keys, each before it at one less."""
    opens: bool = True
    """Nothing was computed for these rows before."""
    copies: int = 1
    """So many equal blocks stand side by side; the ranges span them all."""

    def moved(self, by: int) -> Block:
        (a, b), (c, d) = self.rows, self.keys
        return replace(self, rows=(a + by, b + by), keys=(c + by, d + by))

    @property
    def num_pairs(self) -> int:
        """Products of a query and a key that are computed."""
        rows, keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        return rows * keys // self.copies


def blocks_of(parents: Sequence[int]) -> tuple[Block, ...]:
    """The blocks of one tree whose nodes are in depth-first order.

    Args:
        parents: of each node; -1 for the root.
    """
    num = len(parents)
    children: list[list[int]] = [[] for _ in range(num)]
    for node in range(1, num):
        children[parents[node]].append(node)
    ends = list(range(1, num + 1))
    for node in range(num - 1, 0, -1):
        ends[parents[node]] = max(ends[parents[node]], ends[node])
    return tuple(_joined(list(_subtree(children, ends))))


def _subtree(children: list[list[int]], ends: list[int]) -> Iterator[Block]:
    todo = [(0, True)]
    while todo:
        first, opens = todo.pop()
        last = first
        while len(children[last]) == 1:
            last = children[last][0]
        yield from _strips(first, last + 1, opens)
        if last + 1 < ends[last]:
            yield Block((last + 1, ends[last]), (first, last + 1), opens=opens)
            todo.extend((child, False) for child in reversed(children[last]))


def _strips(first: int, end: int, opens: bool) -> Iterator[Block]:
    """A run over itself; one short strip at its end joins the one before it."""
    starts = list(range(first, max(first + 1, end - STRIP // 2), STRIP))
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        yield Block((start, stop), (first, stop), True, opens)


def _joined(blocks: list[Block]) -> Iterator[Block]:
    """Equal runs side by side become one block with copies."""
    held: Block | None = None
    for block in blocks:
        size = block.rows[1] - block.rows[0]
        if held is not None and block.is_causal and block.rows == block.keys and not block.opens:
            (first, end), copies = held.rows, held.copies
            if held.rows == held.keys and end == block.rows[0] and (end - first) // copies == size:
                rows = (first, block.rows[1])
                held = replace(held, rows=rows, keys=rows, copies=copies + 1)
                continue
        if held is not None:
            yield held
            held = None
        if block.is_causal and not block.opens:
            held = block
        else:
            yield block
    if held is not None:
        yield held


def restricted(blocks: Sequence[Block], places: Sequence[int]) -> tuple[Block, ...]:
    """The blocks for some rows alone, which are counted in the order of `places` from then on.

    Args:
        places: ascending, all different.
    """
    return tuple(part for block in blocks for part in _restricted(block, places))


def _restricted(block: Block, places: Sequence[int]) -> Iterator[Block]:
    (a, b), (c, d), copies = block.rows, block.keys, block.copies
    first, end = bisect_left(places, a), bisect_left(places, b)
    if first == end:
        return
    if end - first == b - a or not block.is_causal:
        yield replace(block, rows=(first, end))
        return
    rows, keys = (b - a) // copies, (d - c) // copies
    for copy in range(copies):
        at, stop, start = a + copy * rows, a + (copy + 1) * rows, c + copy * keys
        run = bisect_left(places, at)
        while run < end and places[run] < stop:
            size = 1
            while run + size < end and places[run + size] == places[run] + size < stop:
                size += 1
            seen = keys - (stop - places[run + size - 1] - 1)
            yield Block((run, run + size), (start, start + seen), True, block.opens)
            run += size
