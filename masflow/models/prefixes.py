"""Keys and values of rows that are done, by the ids that they hold: a conversation goes on from them.

A prompt finds the longest beginning that any kept row of its policy shares with it: its own earlier turns, a
forked episode's, a sibling's. Bounded in bytes, the least recently used go first. Whoever moves weights
clears it. Knows no models.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

from masflow.models.speaking import Prefix

__all__ = ["PrefixCache"]

_BLOCK = 16
"""Ids of a block; rows are found by their whole blocks."""
_LEAST = 32
"""Tokens that are worth going on from."""


class PrefixCache:
    """Kept rows by policy."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._entries: OrderedDict[int, tuple[str, tuple[int, ...], Prefix]] = OrderedDict()
        self._by_block: dict[tuple[str, int], dict[int, None]] = {}
        """(policy, hash of the ids up to the end of a block) → numbers of entries that begin so."""
        self._by_end: dict[tuple[str, int], dict[int, None]] = {}
        """As above, of the last whole block alone."""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, policy: str, ids: tuple[int, ...]) -> Prefix | None:
        """Of the longest beginning of `ids` that is known, and shorter than they are."""
        best: dict[int, None] = {}
        for key in _keys(policy, ids):
            found = self._by_block.get(key)
            if not found:
                break
            best = found
        chosen, length = None, 0
        for number in best:
            shared = _common(self._entries[number][1], ids)
            if shared > length:
                chosen, length = number, shared
            if shared == len(ids) - 1:
                break
        if chosen is None or length < _LEAST:
            return None
        self._entries.move_to_end(chosen)
        return _cut(self._entries[chosen][2], length)

    def keep(self, policy: str, ids: tuple[int, ...], prefix: Prefix) -> None:
        """Keep a row's keys and values, `prefix` of all `ids`; a row that they continue goes."""
        keys = _keys(policy, ids)
        if not keys or prefix.num_bytes > self.max_bytes:
            return
        if any(self._entries[n][1][: len(ids)] == ids for n in self._by_block.get(keys[-1], ())):
            return
        ends = [number for key in keys for number in self._by_end.get(key, ())]
        for number in ends:
            if self._entries[number][1] == ids[: len(self._entries[number][1])]:
                self._drop(number)
        number = next(self._numbers)
        self._entries[number] = (policy, ids, prefix)
        self.num_bytes += prefix.num_bytes
        for key in keys:
            self._by_block.setdefault(key, {})[number] = None
        self._by_end.setdefault(keys[-1], {})[number] = None
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, number: int) -> None:
        policy, ids, prefix = self._entries.pop(number)
        self.num_bytes -= prefix.num_bytes
        keys = _keys(policy, ids)
        for table, found in ((self._by_block, keys), (self._by_end, keys[-1:])):
            for key in found:
                del table[key][number]
                if not table[key]:
                    del table[key]

    def clear(self) -> None:
        """Forget everything: weights moved, or a step is over."""
        self._entries.clear()
        self._by_block.clear()
        self._by_end.clear()
        self.num_bytes = 0


def _keys(policy: str, ids: tuple[int, ...]) -> list[tuple[str, int]]:
    keys, chain = [], 0
    for end in range(_BLOCK, len(ids) + 1, _BLOCK):
        chain = hash((chain, ids[end - _BLOCK : end]))
        keys.append((policy, chain))
    return keys


def _common(known: tuple[int, ...], ids: tuple[int, ...]) -> int:
    """Length of the beginning that both share, shorter than `ids`."""
    low, high = 0, min(len(known), len(ids) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if known[:middle] == ids[:middle] else (low, middle - 1)
    return low


def _cut(prefix: Prefix, length: int) -> Prefix:
    if length == prefix.length:
        return prefix
    keys, values = (tuple(t[:, :length] for t in both) for both in (prefix.keys, prefix.values))
    return Prefix(length, keys, values)
