"""A causal language model as two functions, `hidden` and `logits`: logits only where they are needed.

Shapes: B rows, T tokens, L tokens in the cache, D hidden, V vocabulary. Knows neither text nor policies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Backbone"]


class Backbone:
    """A Hugging Face causal model, split into the stack that makes hidden states and the head on top."""

    def __init__(self, model: Any):
        self.model = model.eval()
        self.head: nn.Module = model.get_output_embeddings()
        self.cap, self.scale = _logit_transform(model.config)
        self._is_split = self._head_agrees()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def hidden(
        self,
        ids_BT: Tensor,
        mask: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Hidden states after the last layer and its norm.

        Args:
            ids_BT: (B, T) int64.
            mask: None (causal), or (B, 1, T, L) bool, True where a query may look.
            positions_BT: (B, T) int64; None counts from 0.
            cache: a Hugging Face cache, which grows by T; None keeps nothing.
        Returns:
            (B, T, D); (B, T, V) logits for the rare model whose head can't be told apart.
        """
        arguments: dict[str, Any] = {"input_ids": ids_BT, "use_cache": cache is not None}
        if mask is not None:
            arguments["attention_mask"] = mask
        if positions_BT is not None:
            arguments["position_ids"] = positions_BT
        if cache is not None:
            arguments["cache"] = cache
        if not self._is_split:
            return self.model(**arguments).logits
        return self.model.base_model(**arguments).last_hidden_state

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 (or float64) logits (N, V) of hidden states (N, D)."""
        return self._transform(self.head(hidden_ND)) if self._is_split else _widen(hidden_ND)

    def _transform(self, logits: Tensor) -> Tensor:
        logits = _widen(logits)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def _head_agrees(self) -> bool:
        """Whether head(base(x)) is what the whole model computes; told by trying it on three tokens."""
        if self.head is None or self.model.base_model is self.model:
            return False
        ids = torch.arange(3, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            whole = self.model(input_ids=ids, use_cache=False).logits
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            parts = self._transform(self.head(hidden))
        return parts.shape == whole.shape and bool(torch.allclose(parts, _widen(whole), rtol=1e-3, atol=1e-3))


def _widen(values: Tensor) -> Tensor:
    """At least float32; float64 stays."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _logit_transform(config: Any) -> tuple[float | None, float]:
    """(soft cap, factor) that some families apply to the head's output (Gemma 2; Cohere; Granite)."""
    cap = getattr(config, "final_logit_softcapping", None)
    factor = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if isinstance(factor, int | float):
        return cap, float(factor)
    return cap, 1.0 / float(divisor) if isinstance(divisor, int | float) and divisor else 1.0
