"""Losses a token: clipped policy ratio, KL penalty, entropy. Knows tensors only; no rows, no models.

Legend: B rows, T reply tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from masflow.algorithms import filled
from masflow.spec.experiment import Algorithm

__all__ = ["LossSpec", "kl_penalty_BT", "ratio_BT", "token_loss_BT"]

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

    @classmethod
    def from_algorithm(cls, algorithm: Algorithm) -> LossSpec:
        algorithm = filled(algorithm)
        return cls(
            algorithm.clip_low or 0.0,
            algorithm.clip_high or 0.0,
            algorithm.kl.weight,
            algorithm.kl.estimator,
            algorithm.entropy,
        )


def token_loss_BT(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    spec: LossSpec,
    reference_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) + kl_weight KL - entropy H, with r = exp(logp - old).

    PPO (arXiv 1707.06347, eq. 7) with two bounds (DAPO, arXiv 2503.14476, eq. 10); the KL term as in GRPO
    (arXiv 2402.03300, eq. 3). Minimise it.

    Args:
        logprobs_BT: (B, T) of the sampled tokens, under the weights in training, nats, with gradient.
        old_logprobs_BT: (B, T) under the policy that sampled them, of the distribution sampled from.
        advantages_B: (B,) one a turn.
        reference_BT: (B, T) under the reference; required when `spec.kl_weight` is above 0.
        entropy_BT: (B, T) with gradient; required when `spec.entropy` isn't 0.
    Returns:
        (B, T) loss, padding not masked, and detached (B, T) measurements to average over the mask:
        `ratio`, `clip_frac` (the clip decided), `kl_old` (k3 against the sampling policy), `kl_ref`,
        `entropy`.
    Raises:
        ValueError: a term is switched on and its input is missing.
    """
    advantages_B1 = advantages_B[:, None]
    ratios_BT = ratio_BT(logprobs_BT, old_logprobs_BT)
    plain_BT = ratios_BT * advantages_B1
    clipped_BT = ratios_BT.clamp(1 - spec.clip_low, 1 + spec.clip_high) * advantages_B1
    loss_BT = -torch.minimum(plain_BT, clipped_BT)
    metrics = {
        "ratio": ratios_BT.detach(),
        "clip_frac": (clipped_BT < plain_BT).to(ratios_BT.dtype),
        "kl_old": kl_penalty_BT(logprobs_BT.detach(), old_logprobs_BT, "k3"),
    }
    if spec.kl_weight:
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


def ratio_BT(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """exp(logp - old), finite: the difference is held within ±20 (no gradient beyond)."""
    return (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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
