"""The forward pass of training as one module, so that wrappers for several processes see every call.

Shapes: as in `packs`. Knows no losses and no processes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from masflow.models.backbone import Backbone
from masflow.models.fused import TokenLoss, can_fuse, fused_loss
from masflow.models.packs import Budget, MicroBatch
from masflow.models.vocabulary import token_scores

__all__ = ["Scorer"]


class Scorer(nn.Module):
    """Micro-batch in, log-probs out. Its parameters are the model's; DDP and FSDP2 wrap it."""

    base_model_prefix = "base_model"
    """Where accelerate looks for the stack under the head."""

    def __init__(self, backbone: Backbone, max_logits: int = Budget.logits):
        """`max_logits` are alive at once."""
        super().__init__()
        self.model = backbone.model
        self.backbone, self.max_logits = backbone, max_logits
        present = {type(module).__name__ for module in backbone.model.modules()}
        listed = getattr(backbone.model, "_no_split_modules", None) or ()
        self._no_split_modules = [name for name in listed if name in present]
        """Layers that FSDP2 shards one by one; a family's list may name some that this model lacks."""

    @property
    def base_model(self) -> Any:
        return self.model.base_model

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self,
        batch: MicroBatch,
        entropy: Literal["none", "measured", "trained"] = "none",
        loss_of: TokenLoss | None = None,
        whole: bool = False,
    ) -> Any:
        """Log-probs of the reply tokens, of the softmax of logits divided by the row's temperature.

        Args:
            entropy: whether entropies are computed, and whether gradients flow through them.
            loss_of: what to make of them.
            whole: give it all reply tokens in one call, which keeps their logits alive or makes them twice.
        Returns:
            (B, T) log-probs, (B, T) entropies, (B, T) bool: which places are reply tokens; 0 elsewhere. With
            `loss_of` the sum of the tokens' losses instead.
        """
        is_plain = batch.mask is None and batch.blocks is None
        positions_ST = None if is_plain else batch.positions_ST
        hidden_UD = self._hidden(batch, positions_ST)
        if loss_of is not None:
            return self._loss(hidden_UD, batch, entropy, loss_of, whole)
        logprobs_N, entropy_U = token_scores(self.backbone, hidden_UD, batch, entropy, self.max_logits)
        shape = (len(batch.rows), int(batch.lengths_B.max()))
        place = (batch.row_N, batch.offset_N)
        empty = logprobs_N.new_zeros(shape)
        mask_BT = torch.zeros(shape, dtype=torch.bool, device=empty.device).index_put(
            place, torch.tensor(True, device=empty.device)
        )
        entropy_BT = empty if entropy_U is None else empty.index_put(place, entropy_U[batch.prediction_N])
        return empty.index_put(place, logprobs_N), entropy_BT, mask_BT

    def _hidden(self, batch: MicroBatch, positions_ST: Tensor | None) -> Tensor:
        """Hidden states of the predictions; where it can be, the last layer computes no others."""
        known = {"mask": batch.mask, "positions_BT": positions_ST, "blocks": batch.blocks}
        if batch.blocks is None or not self.backbone.takes_places or hasattr(self, "unshard"):
            return self.backbone.hidden(batch.ids_ST, **known).flatten(0, 1)[batch.source_U]
        place, which_U = torch.unique(batch.source_U, return_inverse=True)
        hidden = self.backbone.hidden(batch.ids_ST, places=place.tolist(), **known)
        return hidden[0] if len(place) == len(which_U) else hidden[0][which_U]

    def _loss(
        self,
        hidden_UD: Tensor,
        batch: MicroBatch,
        entropy: Literal["none", "measured", "trained"],
        loss_of: TokenLoss,
        whole: bool,
    ) -> Tensor:
        head, is_sharded = self.backbone.linear_head, hasattr(self, "unshard")
        if not whole and head is not None and can_fuse(head) and not is_sharded:
            return fused_loss(head, self.backbone.scale, hidden_UD, batch, loss_of)
        logprobs_N, entropy_U = token_scores(self.backbone, hidden_UD, batch, entropy, self.max_logits)
        entropy_N = torch.zeros_like(logprobs_N) if entropy_U is None else entropy_U[batch.prediction_N]
        return loss_of(logprobs_N, entropy_N, torch.arange(len(logprobs_N), device=logprobs_N.device)).sum()
