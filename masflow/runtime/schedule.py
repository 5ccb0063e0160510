"""The order in which tasks are drawn: a seeded shuffle an epoch, a pure function of the position.

Knows neither files nor models. A position counts the rows drawn: all that checkpoints keep.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache


def stable_seed(*parts: object) -> int:
    """63 bits of SHA-256 over the parts' text: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@lru_cache(maxsize=8)
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
