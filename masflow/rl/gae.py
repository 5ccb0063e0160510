"""Generalised advantage estimation over tokens and over chains of turns, whitening, explained variance.

Legend: T reply tokens of a turn, N turns or tokens. float64; no torch. Knows no roles and no models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["chain_gae", "explained_variance", "token_gae", "whiten"]

Array = NDArray[np.float64]
EPS = 1e-8


def token_gae(values_T: Array, reward: float, gamma: float, lam: float) -> Array:
    """A_t = Σ_k (gλ)^k δ_{t+k}, δ_t = r_t + g V_{t+1} - V_t (arXiv 1506.02438, eq. 16), a token a step.

    The turn's reward comes with its last token, and nothing is worth anything after that, also where the
    reply was cut at its budget: what a turn is paid for is the reply as it stands.

    Args:
        values_T: (T,) float64, of the text before each reply token; T >= 1.
        reward: of the turn.
    Returns:
        (T,) float64. With λ = 1 it is g^(T-1-t) · reward - V_t; with λ = 0 it is δ_t.
    """
    rewards_T = np.zeros_like(values_T)
    rewards_T[-1] = reward
    deltas_T = rewards_T + gamma * np.append(values_T[1:], 0.0) - values_T
    advantages_T, later = np.empty_like(values_T), 0.0
    for t in range(len(values_T) - 1, -1, -1):
        later = deltas_T[t] + gamma * lam * later
        advantages_T[t] = later
    return advantages_T


def chain_gae(
    values_N: Array, rewards_N: Array, successors: Sequence[int | None], decays_N: Array, lam: float
) -> Array:
    """As `token_gae`, a turn a step: A_n = δ_n + d_n λ A_next, δ_n = r_n + d_n V_next - V_n.

    Args:
        values_N: (N,) float64, of what each turn was asked.
        rewards_N: (N,) float64, of each turn and of all that came between it and its successor.
        successors: place of the turn that follows in the chain; None: it is the last one. Several turns may
            have one successor (copies that ran at once).
        decays_N: (N,) float64, discount between a turn and its successor: g to the supersteps between them.
        lam: λ, a turn.
    Returns:
        (N,) float64.
    Raises:
        ValueError: the successors run in a circle.
    """
    found: dict[int, float] = {}
    for start in range(len(values_N)):
        path: list[int] = []
        place: int | None = start
        while place is not None and place not in found:
            if len(path) > len(values_N):
                raise ValueError("turns follow each other in a circle")
            path.append(place)
            place = successors[place]
        for n in reversed(path):
            after, later, worth = successors[n], 0.0, 0.0
            if after is not None:
                later, worth = found[after], float(values_N[after])
            delta = float(rewards_N[n]) + float(decays_N[n]) * worth - float(values_N[n])
            found[n] = delta + float(decays_N[n]) * lam * later
    return np.array([found[n] for n in range(len(values_N))], dtype=np.float64)


def whiten(advantages_N: Array) -> Array:
    """(A - mean) / (std + 1e-8), ddof 1 (arXiv 2006.05990, choice C67; here over one role's batch).

    Returns:
        (N,); zeros where all are equal; one alone stays as it is, for it has no spread.
    """
    if len(advantages_N) < 2:
        return advantages_N.copy()
    centred_N = advantages_N - advantages_N.mean()
    if np.ptp(advantages_N) <= 1e-9 * max(1.0, float(np.abs(advantages_N).max())):
        return np.zeros_like(advantages_N)
    return centred_N / (advantages_N.std(ddof=1) + EPS)


def explained_variance(values_N: Array, targets_N: Array) -> float:
    """1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that knows the mean alone.

    Returns:
        0 where all targets are equal.
    """
    spread = float(targets_N.var())
    return 1.0 - float((targets_N - values_N).var()) / spread if spread > 1e-12 else 0.0
