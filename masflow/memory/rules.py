"""The numbers that a store evolves by."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """How a store evolves."""

    capacity: int = 512
    """Records a store."""
    window: int = 512
    """Rewards that the bounds come from."""
    upper: float = 97.5
    """Percentile; at or above it a turn is remembered."""
    lower: float = 2.5
    """Percentile; below it what was recalled is penalised."""
    merge: float = 0.9
    """Similarity from which on two records are one."""
    floor: float = 0.0
    """Records whose score falls below it are deleted."""
    alpha: float = 1.0
    """Score per unit of reward."""
    beta: float = 1.0
    """Speed of decay."""
    decay_steps: float = 100.0
    """Steps in which, with `beta` 1, a score falls to 1/e."""
