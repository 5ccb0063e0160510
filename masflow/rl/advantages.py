"""Advantages within one group of rewards, in float64.

Legend: G group. No torch: groups are small and rewards are scalars.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ADVANTAGES", "against_role", "batch_norm", "group_mean", "group_norm", "is_flat", "leave_one_out"]

Array = NDArray[np.float64]
EPS = 1e-6


def is_flat(rewards_G: Array) -> bool:
    """All equal up to rounding, so that rounding never becomes an advantage."""
    return bool(np.ptp(rewards_G) <= 1e-9 * max(1.0, float(np.abs(rewards_G).max())))


def group_norm(rewards_G: Array) -> Array:
    """(r - mean) / (std + 1e-6), ddof 1 (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards_G: (G,) float64, G >= 2.
    Returns:
        (G,), zeros where the rewards are equal.
    Raises:
        ValueError: fewer than two rewards; one sample has no baseline.
    """
    return group_mean(rewards_G) / (rewards_G.std(ddof=1) + EPS)


def group_mean(rewards_G: Array) -> Array:
    """r - mean (Dr. GRPO, arXiv 2503.20783, eq. 4), (G - 1) / G of `leave_one_out`. Else as `group_norm`."""
    if len(rewards_G) < 2:
        raise ValueError("one sample has no baseline: a group has at least two")
    return np.zeros_like(rewards_G) if is_flat(rewards_G) else rewards_G - rewards_G.mean()


def leave_one_out(rewards_G: Array) -> Array:
    """r_i - mean of the others (RLOO, arXiv 2402.14740, eq. 8): unbiased. Else as `group_norm`.

    Never divided by a standard deviation: the others' is 0 whenever they agree, and the quotient explodes.
    """
    n = len(rewards_G)
    return group_mean(rewards_G) * (n / (n - 1))


def batch_norm(rewards_G: Array, tokens_G: Array) -> Array:
    """(r - mean) / (std + 1e-8) over all tokens of a batch, each having its turn's reward (REINFORCE++, arXiv
    2501.03262, eq. 10; the standard deviation is the population's).

    Args:
        rewards_G: (G,) float64, of the turns that one role spoke in a step.
        tokens_G: (G,) float64, reply tokens of each.
    Returns:
        (G,), zeros where the rewards are equal. The mean depends on the turn itself: biased a little, by
        1 / (tokens of the batch), where a lone turn weighs little.
    """
    if is_flat(rewards_G):
        return np.zeros_like(rewards_G)
    share_G = tokens_G / tokens_G.sum()
    centred_G = rewards_G - (share_G * rewards_G).sum()
    return centred_G / (np.sqrt((share_G * centred_G**2).sum()) + 1e-8)


ADVANTAGES: dict[str, Callable[[Array], Array]] = {
    "group_norm": group_norm,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}


def against_role(reward: float, others: Array, advantage: str) -> float:
    """A lone turn's advantage, against its role in other episodes: the task's, else the step's.

    Args:
        others: one number an episode, that role's mean reward there; at least one.
        advantage: `group_norm` divides by the standard deviation (ddof 1) of these and the turn's own.
    """
    every = np.append(others, reward)
    if is_flat(every):
        return 0.0
    difference = float(reward - others.mean())
    return difference / (float(every.std(ddof=1)) + EPS) if advantage == "group_norm" else difference
