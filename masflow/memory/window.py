"""From which reward on a turn is remembered, and below which one what it recalled is blamed.

The percentiles are those of JoyAgents-R1 (arXiv 2506.19846); what few or binary rewards do to them is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

__all__ = ["FEW", "Bounds", "Z", "bounds", "percentile"]

FEW = 40
"""Below so many rewards the bounds are mean ± `Z` sigma: 2.5 % of fewer is less than one of them."""
Z = 1.96


@dataclass(frozen=True)
class Bounds:
    """`is_good` and `is_bad` of rewards seen lately."""

    upper: float
    lower: float
    mean: float
    is_strict: bool = False
    """Above: most of several values are one, both bounds stand on it, and it is what usually happens."""

    def is_good(self, reward: float) -> bool:
        """At or above the upper bound; above it where that `is_strict`."""
        return reward > self.upper or (reward == self.upper and not self.is_strict)

    def is_bad(self, reward: float) -> bool:
        """Below the lower bound, strictly: with binary rewards it is mostly the lower of the two, and then
        failing as usual is no reason to blame anything."""
        return reward < self.lower


def bounds(rewards: Sequence[float], upper: float = 97.5, lower: float = 2.5) -> Bounds | None:
    """Bounds of a window of rewards; None where they are all the same and tell nothing apart.

    From `FEW` rewards on percentiles; below, mean ± 1.96 sigma (with N - 1). With two values only (binary
    rewards) the upper bound is the higher value, however many there are: mean + 1.96 sigma lies above it
    unless success is rare, and the percentile lies on the lower one when success is very rare.

    Args:
        rewards: (N,) no unit, in any order.
        upper, lower: in percent.
    """
    values = sorted(set(rewards))
    if len(values) < 2:
        return None
    mean = fmean(rewards)
    if len(rewards) >= FEW:
        high, low = percentile(rewards, upper), percentile(rewards, lower)
    else:
        sigma = math.sqrt(sum((one - mean) ** 2 for one in rewards) / (len(rewards) - 1))
        high, low = mean + Z * sigma, mean - Z * sigma
    if len(values) == 2:
        return Bounds(values[1], low, mean)
    return Bounds(high, low, mean, is_strict=high == low)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values, at place (N - 1)·percent / 100.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
