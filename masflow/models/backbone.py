"""A causal language model as two functions, `hidden` and `logits`: logits only where they are needed.

Shapes: B rows, T tokens, L tokens in the cache, D hidden, V vocabulary. Knows neither text nor policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from masflow.errors import RunError
from masflow.models.last_layer import known_last_layer, only
from masflow.models.tree_attention import used_by
from masflow.models.tree_blocks import Block, blocks_of

__all__ = ["Backbone"]


class Backbone:
    """A Hugging Face causal model, split into the stack that makes hidden states and the head on top."""

    def __init__(self, model: Any, recompute: bool = False):
        """
        Args:
            recompute: where gradients are taken, activations are computed again in the backward pass instead
                of being kept (gradient checkpointing; Chen et al., arXiv 1604.06174): the same gradients.
        Raises:
            RunError: an architecture that ignores attention masks or positions, or can't recompute.
        """
        self.model = model.eval()
        self._recomputed = _recomputing_layers(model) if recompute else []
        self.head: nn.Module = model.get_output_embeddings()
        self.cap, self.scale = _logit_transform(model.config)
        takes = signature(model.base_model.forward).parameters
        # Before transformers 5.24 it had its old name, and the new one was ignored in silence.
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._is_split = self._head_agrees()
        self._check_masks()
        self.bare: Any = None
        """What `BareSpeaker` knows of this model."""
        self.window = _window(model.config)
        """Tokens that a layer looks at, itself included; None: all. A mask of ours knows no window."""
        self.takes_blocks = self._takes_blocks()
        self._last_layer = known_last_layer(model)
        self.takes_places = self.takes_blocks and self._takes_places()

    @property
    def _takes_bool(self) -> bool:
        return self.model.config._attn_implementation != "eager"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def is_split(self) -> bool:
        """Whether `hidden` are hidden states and the head is a module of its own."""
        return self._is_split

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def linear_head(self) -> nn.Linear | None:
        """The head, where logits are its output times `scale`, and nothing else."""
        is_linear = self._is_split and not self.cap and type(self.head) is nn.Linear
        return self.head if is_linear and isinstance(self.head, nn.Linear) else None

    def hidden(
        self,
        ids_BT: Tensor,
        mask: Tensor | None = None,
        positions_BT: Tensor | None = None,
        cache: Any = None,
        blocks: Sequence[Block] | None = None,
        places: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states after the last layer and its norm.

        Args:
            ids_BT: (B, T) int64.
            mask: None (causal), or (B, 1, T, L) bool, True where a query may look.
            positions_BT: (B, T) int64; None counts from 0.
            cache: a Hugging Face cache, which grows by T; None keeps nothing.
            blocks: instead of a mask, of a model that takes them; B = 1.
            places: with blocks, of a model that `takes_places`: what is asked for alone; ascending.
        Returns:
            (B, T, D), or (1, places, D); (B, T, V) logits for the rare model whose head can't be told apart.
        """
        arguments: dict[str, Any] = {"input_ids": ids_BT, "use_cache": cache is not None}
        if mask is not None:
            arguments["attention_mask"] = mask if self._takes_bool else _additive(mask, self.model.dtype)
        if positions_BT is not None:
            arguments["position_ids"] = positions_BT
        if cache is not None:
            arguments[self._cache_name] = cache
        if blocks is not None:  # a mask of four dimensions keeps transformers from making one of its own
            arguments |= {"tree_blocks": blocks, "attention_mask": self._additive_zero(ids_BT)}
        in_blocks = used_by(self.model) if blocks is not None else nullcontext()
        in_places = nullcontext()
        if places is not None and blocks is not None:
            in_places = only(self._last_layer, places, blocks)
        with self._recomputing(cache is None), in_blocks, in_places:
            if not self._is_split:
                return self.model(**arguments).logits
            return self.model.base_model(**arguments).last_hidden_state

    @contextmanager
    def _recomputing(self, whole: bool) -> Iterator[None]:
        """Layers keep their inputs alone inside the block, where gradients are taken of a whole sequence. A
        layer looks at its own `training` flag for that; those inside it, and so dropout, stay off."""
        is_on = whole and torch.is_grad_enabled()
        for layer in self._recomputed if is_on else ():
            layer.training = True
        try:
            yield
        finally:
            for layer in self._recomputed:
                layer.training = False

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 (or float64) logits (N, V) of hidden states (N, D)."""
        return self.transform(self.head(hidden_ND)) if self._is_split else _widen(hidden_ND)

    def transform(self, logits: Tensor) -> Tensor:
        """What the head gives, in at least float32, with the family's factor and soft cap."""
        logits = _widen(logits)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits

    def _check_masks(self) -> None:
        """Three tokens must give the same around a masked one as alone; packing and padding rest on it."""
        ids_14 = torch.arange(4, device=self.device)[None] % self.vocab_size
        mask = torch.ones(4, 4, dtype=torch.bool, device=self.device).tril()
        mask[2:, 1] = False
        positions_14 = torch.tensor([[0, 1, 1, 2]], device=self.device)
        kept = torch.tensor([0, 2, 3], device=self.device)
        name = self.model.config.model_type
        fix = "use a decoder with rotary or learned positions, such as Qwen, Llama or GPT-2"
        with torch.no_grad():
            alone = self.hidden(ids_14[:, kept])
            try:
                around = self.hidden(ids_14, mask[None, None], positions_14)[:, kept]
            except (TypeError, ValueError, RuntimeError) as error:
                raise RunError(
                    f"models of type '{name}' take no mask and positions of ours: {error}", fix
                ) from error
        gap = float((alone - around).abs().max() / alone.abs().max())
        if gap > (1e-3 if alone.dtype in (torch.float32, torch.float64) else 0.1):
            raise RunError(f"models of type '{name}' ignore attention masks or positions", fix)

    def _additive_zero(self, ids_BT: Tensor) -> Tensor:
        return torch.zeros((1, 1, 1, 1), dtype=self.model.dtype, device=ids_BT.device)

    def _takes_blocks(self) -> bool:
        """Whether trees may be given in blocks: told by trying a prompt of two tokens with two replies.
        Where layers are computed twice, transformers forgets whose attention function was asked for."""
        exact = self.model.dtype in (torch.float32, torch.float64)
        is_plain = self.model.config._attn_implementation == "sdpa" and not self._recomputed
        if self.device.type != "cpu" or not exact or not is_plain:
            return False
        parents = (-1, 0, 1, 2, 1, 4)
        ids_16 = torch.arange(6, device=self.device)[None] % self.vocab_size
        positions_16 = torch.tensor([[0, 1, 2, 3, 2, 3]])
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        mask[4:, 2:4] = False
        with torch.no_grad():
            wanted = self.hidden(ids_16, mask[None, None], positions_16)
            try:
                found = self.hidden(ids_16, None, positions_16, blocks=blocks_of(parents))
            except (TypeError, ValueError, RuntimeError):
                return False
        return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())))

    def _takes_places(self) -> bool:
        """Whether the last layer may be asked for some tokens alone: told by trying it on five of eleven."""
        if self._last_layer is None or not self._is_split:
            return False
        blocks = blocks_of((-1, 0, 1, 2, 3, 4, 5, 2, 7, 2, 9))
        ids_T = torch.arange(11, device=self.device)[None] % self.vocab_size
        positions_T = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 3, 4, 3, 4]])
        places = (2, 3, 5, 7, 8)
        with torch.no_grad():
            wanted = self.hidden(ids_T, None, positions_T, blocks=blocks)[:, list(places)]
            try:
                found = self.hidden(ids_T, None, positions_T, blocks=blocks, places=places)
            except (TypeError, ValueError, RuntimeError, AttributeError):
                return False
        return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())))

    def _head_agrees(self) -> bool:
        """Whether head(base(x)) is what the whole model computes; told by trying it on three tokens."""
        if self.head is None or self.model.base_model is self.model:
            return False
        ids = torch.arange(3, device=self.device)[None] % self.vocab_size
        with torch.no_grad():
            whole = self.model(input_ids=ids, use_cache=False).logits
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            parts = self.transform(self.head(hidden))
        return parts.shape == whole.shape and bool(torch.allclose(parts, _widen(whole), rtol=1e-3, atol=1e-3))


def _recomputing_layers(model: Any) -> list[nn.Module]:
    """Switch gradient checkpointing on; the layers that do it."""
    if not model.supports_gradient_checkpointing:
        raise RunError(
            f"models of type '{model.config.model_type}' can't recompute their activations",
            "remove 'gradient_checkpointing'",
        )
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.disable_input_require_grads()  # what the reentrant way needs
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _window(config: Any) -> int | None:
    """How far the narrowest layer looks back."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    local = "local" in (getattr(config, "attention_layers", None) or ())  # GPT-Neo
    told = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    told += [config.window_size] if local else []
    return min((int(size) for size in told if size), default=None)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, the lowest number elsewhere: what eager attention adds to its scores."""
    allowed = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return allowed.masked_fill_(~mask, torch.finfo(dtype).min)


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
