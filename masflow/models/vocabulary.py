"""Log-probs over a large vocabulary within a bound of memory: what is beyond it is computed in parts.

Shapes: U predictions, N reply tokens, V vocabulary, D hidden. Three float32 numbers a logit are alive at once
(its log-softmax, and two that entropy or the way back make; five where entropy is trained): a bound of 2^26
logits is 0.75 GiB (1.25). Knows no rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from masflow.models.backbone import Backbone
from masflow.models.packs import MicroBatch

__all__ = ["token_scores"]

Entropy = Literal["none", "measured", "trained"]


def token_scores(
    backbone: Backbone, hidden_UD: Tensor, batch: MicroBatch, entropy: Entropy, max_logits: int
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the reply tokens, of the softmax of logits divided by their row's temperature.

    Where U · V exceeds `max_logits`, predictions are taken in parts whose logits are not kept but computed
    again on the way back (Chen et al., arXiv 1604.06174): a third more work in the head, the same values up
    to float order. A head that FSDP2 shards on its own is called once: each call is an exchange, of which all
    ranks must make equally many.

    Args:
        hidden_UD: hidden states of the batch's predictions.
        entropy: whether entropies are computed, and whether gradients flow through them.
        max_logits: logits that may be alive at once.
    Returns:
        (N,) log-probs, nats, and (U,) entropies, nats, or None.
    """
    num, size = len(batch.source_U), max(1, max_logits // backbone.vocab_size)
    is_sharded = hasattr(backbone.head, "unshard")
    if num <= size or is_sharded:
        return _part(backbone, hidden_UD, batch.temperature_U, batch.prediction_N, batch.target_N, entropy)
    entropies: list[Tensor] = []
    places: list[Tensor] = []
    found: list[Tensor] = []
    for first in range(0, num, size):
        inside = (batch.prediction_N >= first) & (batch.prediction_N < first + size)
        place_n = inside.nonzero()[:, 0]
        logprobs_n, entropy_u = checkpoint(
            _part,
            backbone,
            hidden_UD[first : first + size],
            batch.temperature_U[first : first + size],
            batch.prediction_N[place_n] - first,
            batch.target_N[place_n],
            entropy,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        places.append(place_n)
        found.append(logprobs_n)
        entropies += [] if entropy_u is None else [entropy_u]
    whole_N = torch.cat(found)
    logprobs_N = torch.empty_like(whole_N).index_put((torch.cat(places),), whole_N)
    return logprobs_N, torch.cat(entropies) if entropies else None


def _part(
    backbone: Backbone,
    hidden_UD: Tensor,
    temperature_U: Tensor,
    prediction_N: Tensor,
    target_N: Tensor,
    entropy: Entropy,
) -> tuple[Tensor, Tensor | None]:
    logits_UV = backbone.logits(hidden_UD)
    if bool((temperature_U != 1).any()):
        logits_UV = logits_UV / temperature_U.to(logits_UV.dtype)[:, None]
    logprobs_UV = torch.log_softmax(logits_UV, -1)
    del logits_UV
    logprobs_N = logprobs_UV[prediction_N, target_N]
    if entropy == "none":
        return logprobs_N, None
    source_UV = logprobs_UV if entropy == "trained" else logprobs_UV.detach()
    return logprobs_N, -(source_UV.exp() * source_UV).sum(-1)
