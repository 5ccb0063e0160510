"""Losses a token: clipped policy ratio, KL penalty, entropy. Knows tensors only; no rows, no models.

Legend: B rows, T reply tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from masflow.algorithms import filled
from masflow.spec.experiment import Algorithm

__all__ = ["LossSpec", "kl_penalty_BT", "ratio_BT", "row_means_N", "token_loss_BT"]

MAX_LOG_RATIO = 20.0
"""exp(20) is about 5e8: still finite in float32, and far beyond every clip range."""


@dataclass(frozen=True)
class LossSpec:
    """The knobs of the token loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    """Weight of the entropy bonus, a nat."""
    ratio: Literal["token", "sequence"] = "token"
    clip: Literal["ppo", "cispo", "none"] = "ppo"
    dual_clip: float | None = None
    importance_cap: float | None = None
    """Of truncated importance sampling; None: log-probs are the engine's, and nothing is corrected."""
    epochs: int = 1
    """Passes over the batch."""
    pays_kl: bool = False
    """`kl_weight` is paid out of the reward, not added to the loss."""

    @classmethod
    def from_algorithm(cls, algorithm: Algorithm) -> LossSpec:
        algorithm = filled(algorithm)
        return cls(
            clip_low=algorithm.clip_low or 0.0,
            clip_high=algorithm.clip_high or 0.0,
            ratio=algorithm.ratio or "token",
            clip=algorithm.clip or "ppo",
            dual_clip=algorithm.dual_clip,
            importance_cap=algorithm.importance.cap if algorithm.importance else None,
            epochs=algorithm.epochs or 1,
            pays_kl=algorithm.kl.place == "reward",
            kl_weight=algorithm.kl.weight,
            kl_estimator=algorithm.kl.estimator,
            entropy=algorithm.entropy,
        )


def token_loss_BT(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    spec: LossSpec,
    reference_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    log_ratio_BT: Tensor | None = None,
    weight_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """weight · policy loss + kl_weight KL - entropy H. Minimise it.

    With r = exp(logp - old), the policy loss is by `spec.clip`

    - `ppo`: -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7; two bounds: DAPO, arXiv
      2503.14476, eq. 10), with `dual_clip` c at most c |A| where A < 0 (arXiv 1912.09729, eq. 5);
    - `cispo`: -sg(clip(r, 1 - low, 1 + high)) A logp, sg being a constant (arXiv 2506.13585, eq. 4, 5);
    - `none`: -r A.

    The KL term is GRPO's (arXiv 2402.03300, eq. 3).

    Args:
        logprobs_BT: (B, T) of the sampled tokens, under the weights in training, nats, with gradient.
        old_logprobs_BT: (B, T) under the policy that sampled them, of the distribution sampled from.
        advantages_B: (B,) one a turn.
        reference_BT: (B, T) under the reference; required when `spec.kl_weight` is above 0.
        entropy_BT: (B, T) with gradient; required when `spec.entropy` isn't 0.
        log_ratio_BT: in place of logp - old, with gradient: a turn's mean, where one ratio stands for all of
            its tokens.
        weight_BT: constants, of truncated importance sampling; default 1.
    Returns:
        (B, T) loss, padding not masked, and detached (B, T) measurements to average over the mask:
        `ratio`, `clip_frac` (the clip decided), `kl_old` (k3 against the sampling policy), `kl_ref`,
        `entropy`.
    Raises:
        ValueError: a term is switched on and its input is missing.
    """
    advantages_B1 = advantages_B[:, None]
    ratios_BT = _exp(logprobs_BT - old_logprobs_BT if log_ratio_BT is None else log_ratio_BT)
    loss_BT, clipped_BT = _policy_loss_BT(ratios_BT, logprobs_BT, advantages_B1, spec)
    loss_BT = loss_BT if weight_BT is None else loss_BT * weight_BT
    metrics = {
        "ratio": ratios_BT.detach(),
        "clip_frac": clipped_BT.to(ratios_BT.dtype),
        "kl_old": kl_penalty_BT(logprobs_BT.detach(), old_logprobs_BT, "k3"),
    }
    if spec.kl_weight and not spec.pays_kl:
        if reference_BT is None:
            raise ValueError("kl_weight is above 0, but there are no log-probabilities of a reference")
        penalty_BT = kl_penalty_BT(logprobs_BT, reference_BT, spec.kl_estimator)
        loss_BT = loss_BT + spec.kl_weight * penalty_BT
        metrics["kl_ref"] = penalty_BT.detach()
    if spec.entropy:
        if entropy_BT is None:
            raise ValueError("entropy isn't 0, but there are no entropies")
        loss_BT = loss_BT - spec.entropy * entropy_BT
    if entropy_BT is not None:
        metrics["entropy"] = entropy_BT.detach()
    return loss_BT, metrics


def _policy_loss_BT(
    ratios_BT: Tensor, logprobs_BT: Tensor, advantages_B1: Tensor, spec: LossSpec
) -> tuple[Tensor, Tensor]:
    """(loss, bool: where the clip decided)."""
    plain_BT = ratios_BT * advantages_B1
    if spec.clip == "none":
        return -plain_BT, torch.zeros_like(plain_BT, dtype=torch.bool)
    held_BT = ratios_BT.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    if spec.clip == "cispo":
        return -held_BT.detach() * advantages_B1 * logprobs_BT, held_BT != ratios_BT
    gain_BT = torch.minimum(plain_BT, held_BT * advantages_B1)
    clipped_BT = gain_BT < plain_BT
    if spec.dual_clip is not None:
        floor_BT = torch.where(advantages_B1 < 0, spec.dual_clip * advantages_B1, -math.inf)
        clipped_BT = clipped_BT | (gain_BT < floor_BT)
        gain_BT = torch.maximum(gain_BT, floor_BT)
    return -gain_BT, clipped_BT


def row_means_N(values_N: Tensor, row_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Each token's value replaced by its row's mean: the exponential of log-ratios' means is the geometric
    mean of the ratios (GSPO, arXiv 2507.18071, eq. 7).

    Args:
        values_N: (N,) of all tokens of B rows, with gradient.
        row_N: (N,) from 0 to B - 1.
        lengths_B: (B,) tokens of each row, at least 1.
    """
    sums_B = values_N.new_zeros(len(lengths_B)).index_add(0, row_N, values_N)
    return (sums_B / lengths_B.to(values_N.dtype))[row_N]


def ratio_BT(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """exp(logp - old), finite: the difference is held within ±20 (no gradient beyond)."""
    return _exp(logprobs_BT - old_logprobs_BT)


def _exp(log_ratio_BT: Tensor) -> Tensor:
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_penalty_BT(logprobs_BT: Tensor, reference_BT: Tensor, estimator: str) -> Tensor:
    """One sample's estimate of KL(policy ‖ reference), nats (Schulman, "Approximating KL divergence", 2020).

    With d = logp_ref - logp:

    - `k1` = -d. Unbiased; its own gradient has expectation 0, so the gradient of `k2` takes its place:
      that is the gradient of k1 used as a reward, and on-policy the true gradient of the KL.
    - `k2` = d²/2. Biased a little; its gradient -d ∇logp is on-policy the true gradient of the KL.
    - `k3` = exp(d) - d - 1. Unbiased, never negative; its gradient (1 - exp(d)) ∇logp is on-policy the
      gradient of KL(reference ‖ policy), equal to `k2`'s to first order (GRPO's choice).

    Args:
        logprobs_BT: (B, T), under the weights in training.
        reference_BT: (B, T), no gradient.
    """
    d_BT = (reference_BT.detach() - logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k3":
        return d_BT.exp() - d_BT - 1
    k2_BT = d_BT**2 / 2
    if estimator == "k2":
        return k2_BT
    assert estimator == "k1", estimator
    return k2_BT + (-d_BT - k2_BT).detach()
