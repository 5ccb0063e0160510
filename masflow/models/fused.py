"""Head, log-softmax, loss and their gradients in one pass over parts whose logits are made, used and dropped.

The loss is a sum over tokens, so its derivative is known as soon as a part's log-probs are: nothing is kept
of the logits, and nothing is computed again (Hsu et al., arXiv 2410.10989, section 3.2).

Shapes: U predictions, N reply tokens, V vocabulary, D hidden; small letters are those of a part. With
z = f · (W h + b), p = softmax(z), H its entropy: d log p_y / d z = 1_y - p and d H / d z = -p (log p + H).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from masflow.models.packs import MicroBatch

__all__ = ["TokenLoss", "can_fuse", "fused_loss"]

TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log-probs, entropies, places among the micro-batch's reply tokens) → loss of each token, with the gradient
of the first two. All are (n,); called once a part."""

_ROWS, _LOGITS = 256, 1 << 25
"""Predictions of a part at most, and their logits. Two float32 copies of these are alive: 256 MiB. Fewer rows
read the head's weights too often; more leave the cache where the vocabulary is small."""


def can_fuse(head: nn.Linear | None) -> bool:
    """Whether the head's gradient is exact when it is summed up part by part."""
    if head is None or hasattr(head.weight, "full_tensor"):
        return False
    return head.weight.dtype in (torch.float32, torch.float64) or not head.weight.requires_grad


def fused_loss(
    head: nn.Linear, factor: float, hidden_UD: Tensor, batch: MicroBatch, loss_of: TokenLoss
) -> Tensor:
    """The sum of the tokens' losses, with gradient.

    Args:
        factor: of the head's output, beside the rows' temperatures.
    """
    loss: Any = _Fused.apply(hidden_UD, head.weight, head.bias, factor, batch, loss_of)
    return loss


class _Fused(torch.autograd.Function):
    """Gradients are made on the way forth, and handed over on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        factor: float,
        batch: MicroBatch,
        loss_of: TokenLoss,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        ctx.grads = grads = [
            torch.zeros_like(x) if is_wanted and x is not None else None
            for x, is_wanted in zip((hidden_UD, weight_VD, bias_V), wanted, strict=True)
        ]
        total = 0.0
        for first, end, place_n in _parts(batch, len(weight_VD)):
            hidden_uD = hidden_UD[first:end]
            factor_u = factor / batch.temperature_U[first:end]
            logits_uV = nn.functional.linear(hidden_uD, weight_VD, bias_V)
            logits_uV = logits_uV.to(torch.promote_types(logits_uV.dtype, torch.float32))
            loss, slope_uV = _slope(logits_uV, factor_u, batch, place_n, first, loss_of)
            total = total + loss
            slope_uV = slope_uV.to(hidden_UD.dtype)
            if grads[0] is not None:
                torch.mm(slope_uV, weight_VD, out=grads[0][first:end])
            if grads[1] is not None:
                grads[1].addmm_(slope_uV.T, hidden_uD)
            if grads[2] is not None:
                grads[2] += slope_uV.sum(0)
            del logits_uV, slope_uV
        return torch.as_tensor(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        made, ctx.grads = ctx.grads, None  # so that autograd may keep them as the weights' gradients
        if float(grads[0]) != 1.0:
            made = [grad if grad is None else grad.mul_(grads[0]) for grad in made]
        return (*made, None, None, None)


def _parts(batch: MicroBatch, vocab_size: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first prediction, one past the last, places of the reply tokens that they score)."""
    num, size = len(batch.source_U), max(1, min(_ROWS, _LOGITS // vocab_size))
    for first in range(0, num, size):
        end = min(num, first + size)
        inside_N = (batch.prediction_N >= first) & (batch.prediction_N < end)
        yield first, end, inside_N.nonzero()[:, 0]


def _slope(
    logits_uV: Tensor,
    factor_u: Tensor,
    batch: MicroBatch,
    place_n: Tensor,
    first: int,
    loss_of: TokenLoss,
) -> tuple[Tensor, Tensor]:
    """(loss of a part, its derivative with respect to W h + b); uses up the logits."""
    if bool((factor_u != 1).any()):
        logits_uV.mul_(factor_u.to(logits_uV.dtype)[:, None])
    prediction_n, target_n = batch.prediction_N[place_n] - first, batch.target_N[place_n]
    logprobs_uV = torch.log_softmax(logits_uV, -1)
    logprobs_n = logprobs_uV[prediction_n, target_n]
    probs_uV = torch.exp(logprobs_uV, out=logits_uV)
    terms_uV = logprobs_uV.mul_(probs_uV)
    entropy_u = -terms_uV.sum(-1)
    with torch.enable_grad():
        logprobs_n, entropy_n = logprobs_n.requires_grad_(), entropy_u[prediction_n].requires_grad_()
        loss = loss_of(logprobs_n, entropy_n, place_n).sum()
        slope_n, entropy_slope_n = torch.autograd.grad(loss, (logprobs_n, entropy_n), allow_unused=True)
    slope_u = torch.zeros_like(entropy_u).index_add_(0, prediction_n, slope_n)
    if entropy_slope_n is None:
        probs_uV.mul_(-slope_u[:, None])
    else:
        trained_u = torch.zeros_like(entropy_u).index_add_(0, prediction_n, entropy_slope_n)
        probs_uV.mul_(-(slope_u + trained_u * entropy_u)[:, None])
        probs_uV.sub_(terms_uV.mul_(trained_u[:, None]))
    probs_uV.index_put_((prediction_n, target_n), slope_n, accumulate=True)
    if bool((factor_u != 1).any()):
        probs_uV.mul_(factor_u.to(probs_uV.dtype)[:, None])
    return loss.detach(), probs_uV
