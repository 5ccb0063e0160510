"""What is known of each reply token before a policy's first optimizer step: whose log-probs, at what price.

Plain lists a row, by the row's number in the update. Knows no model and no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from masflow.models.experience import Row

__all__ = ["Known", "Mismatch", "Moments", "importance_weights", "paid"]

MAX_LOG_RATIO = 20.0


@dataclass
class Known:
    """Of the rows that this rank takes, beside their sampled log-probs."""

    references: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Log-probs under the reference; empty where no KL needs them."""
    weights: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Of truncated importance sampling; empty without it."""
    advantages: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Turn id → one a token, in place of the row's; empty where a row's advantage is that of its tokens."""


@dataclass
class Mismatch:
    """Sums over tokens of how far the engine that sampled is from the weights that train."""

    distance: float = 0.0
    """Absolute differences of log-probs, nats."""
    weight: float = 0.0
    capped: float = 0.0
    kl: float = 0.0
    """k3 of KL(engine ‖ trainer), nats."""


def importance_weights(
    own: Mapping[int, Sequence[float]], rows: Sequence[Row], cap: float, sums: Mismatch
) -> dict[int, list[float]]:
    """min(exp(own - engine), cap) of each token: truncated importance weights (Ionides 2008, eq. 4; between
    engine and trainer: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training").

    Args:
        own: log-probs under the trainer's weights before the update, nats, by the row's number.
        rows: with log-probs as the engine reported them.
        cap: above 0; the published one is 2.
        sums: what is measured is added here.
    """
    found: dict[int, list[float]] = {}
    for i, logprobs in own.items():
        weights = found[i] = []
        for a, b in zip(logprobs, rows[i].logprobs, strict=True):
            ratio = math.exp(min(MAX_LOG_RATIO, max(-MAX_LOG_RATIO, a - b)))
            weights.append(min(ratio, cap))
            sums.distance += abs(a - b)
            sums.weight += weights[-1]
            sums.capped += ratio > cap
            sums.kl += ratio - 1 - (a - b)
    return found


def paid(reward: float, logprobs: Sequence[float], reference: Sequence[float], weight: float) -> list[float]:
    """reward - weight · Σ of this and all later tokens' logp - logp_ref (arXiv 2501.03262, eq. 8).

    Args:
        logprobs: under the policy that the ratios are taken against, nats.
    """
    found, later = [], 0.0
    for own, other in zip(reversed(logprobs), reversed(reference), strict=True):
        later += own - other
        found.append(reward - weight * later)
    return found[::-1]


@dataclass
class Moments:
    """Of numbers that several ranks hold parts of."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Moments:
        return cls(len(values), math.fsum(values), math.fsum(v * v for v in values))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def whitened(self, values: Sequence[float]) -> list[float]:
        """(x - mean) / (std + 1e-8), std of the population; zeros where all are equal up to rounding."""
        mean = self.total / self.count
        variance = self.squares / self.count - mean * mean
        if variance <= 1e-12 * max(1.0, self.squares / self.count):
            return [0.0] * len(values)
        return [(v - mean) / (math.sqrt(variance) + 1e-8) for v in values]
