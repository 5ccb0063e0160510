"""The order in which tasks are drawn: a seeded shuffle an epoch, shares of a mixture; a pure function of the
position.

Knows neither files nor models. A position counts the rows drawn: all that checkpoints keep.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor


def stable_seed(*parts: object) -> int:
    """63 bits of SHA-256 over the parts' text: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@lru_cache(maxsize=64)
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> tuple[int, ...]:
    """The rows of one epoch, each once."""
    order = list(range(num_rows))
    if shuffle:
        random.Random(stable_seed("epoch", seed, epoch)).shuffle(order)
    return tuple(order)


def draw(num_rows: int, position: int, count: int, seed: int, shuffle: bool = True) -> list[int]:
    """Row numbers at `position`, …, `position + count - 1`; a batch may reach over an epoch's end.

    Args:
        num_rows: rows of the split; at least 1.
        position: rows drawn before.
    """
    picked = []
    for place in range(position, position + count):
        epoch, offset = divmod(place, num_rows)
        picked.append(epoch_order(num_rows, seed, epoch, shuffle)[offset])
    return picked


@dataclass(frozen=True)
class Mixture:
    """Items of several sources, numbered source after source."""

    sizes: tuple[int, ...]
    """Items of each source."""
    weights: tuple[float, ...] | None = None
    """Shares, to be divided by their sum; None: every item comes once an epoch of all."""

    @classmethod
    def of(cls, weights: Sequence[float | None], source_of: Sequence[int]) -> Mixture:
        """Of items whose sources are given, in order; sources without an item give nothing.

        Args:
            weights: of each source; all or none are known.
        """
        sizes = [source_of.count(number) for number in range(len(weights))]
        filled = [number for number, size in enumerate(sizes) if size]
        known = [weight for number in filled if (weight := weights[number]) is not None]
        return cls(tuple(sizes[n] for n in filled), tuple(known) if len(known) == len(filled) > 1 else None)

    def draw(self, position: int, count: int, seed: int, shuffle: bool = True) -> list[int]:
        """Numbers of the items at `position`, …, `position + count - 1`; each source by its own shuffle.

        Args:
            position: items drawn before.
        """
        if self.weights is None:
            return draw(sum(self.sizes), position, count, seed, shuffle)
        first = [sum(self.sizes[:number]) for number in range(len(self.sizes))]
        picked = []
        for number, place in shares(self.weights, position, count):
            [offset] = draw(self.sizes[number], place, 1, stable_seed("source", seed, number), shuffle)
            picked.append(first[number] + offset)
        return picked


def shares(weights: Sequence[float], position: int, count: int) -> list[tuple[int, int]]:
    """Whose turn it is at `position`, …: (source, how often it was drawn before).

    Draw j of a source of weight w is due at the time (j + 1/2) / w. Draws come in the order of these times,
    at equal ones the earlier source's first. So each source has had its share, rounded, at any moment.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    # All draws due by this time are fewer than `position`: the sum of the roundings is at most half a source.
    time = max(Fraction(position - len(exact)), Fraction(0)) / sum(exact)
    drawn = [floor(weight * time + Fraction(1, 2)) for weight in exact]
    due = [(before + Fraction(1, 2)) / weight for before, weight in zip(drawn, exact, strict=True)]
    found = []
    for _ in range(position + count - sum(drawn)):
        number = due.index(min(due))
        found.append((number, drawn[number]))
        drawn[number] += 1
        due[number] += 1 / exact[number]
    return found[len(found) - count :] if count else []
