"""The last layer for those tokens alone whose hidden state is asked for: of others it needs keys and values.

In training only places that predict a reply token are asked for, a third of a tree with a long prompt. Known
are the layers of Llama and its kin; whoever uses this proves it first.

Shapes: T tokens of the trees, U of them asked for, H heads, D numbers a head. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from masflow.models.tree_attention import tree_attention
from masflow.models.tree_blocks import Block, restricted

__all__ = ["known_last_layer", "only"]

KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def known_last_layer(model: Any) -> Any:
    """The model's last layer, or None where it is of a kind that isn't known here."""
    layers = getattr(model.base_model, "layers", None)
    if not layers or len(layers) != model.config.num_hidden_layers or type(layers[-1]).__name__ not in KNOWN:
        return None
    return layers[-1]


@contextmanager
def only(layer: Any, place_U: Sequence[int], blocks: Sequence[Block]) -> Iterator[None]:
    """Inside the block the layer answers for these places alone.

    Args:
        place_U: ascending, all different.
    """
    layer.forward = _forward(layer, torch.tensor(place_U), restricted(blocks, place_U))
    try:
        yield
    finally:
        del layer.forward


def _forward(layer: Any, place_U: Tensor, blocks: Sequence[Block]) -> Callable[..., Tensor]:
    attention = layer.self_attn

    def heads(x: Tensor, projection: Any, norm: str | None) -> Tensor:
        x = projection(x).unflatten(-1, (-1, attention.head_dim))
        x = getattr(attention, norm)(x) if norm and hasattr(attention, norm) else x
        return x.transpose(1, 2)

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any, **__: Any) -> Tensor:
        place = place_U.to(hidden_states.device)
        cos, sin = (x[:, None] for x in position_embeddings)
        residual = hidden_states.index_select(1, place)
        normed = layer.input_layernorm(hidden_states)
        q = heads(normed.index_select(1, place), attention.q_proj, "q_norm")
        k, v = heads(normed, attention.k_proj, "k_norm"), heads(normed, attention.v_proj, None)
        q = _rotated(q, cos.index_select(2, place), sin.index_select(2, place))
        k = _rotated(k, cos, sin)
        groups = q.shape[1] // k.shape[1]
        found = tree_attention(q, repeat_kv(k, groups), repeat_kv(v, groups), blocks, attention.scaling)
        hidden = residual + attention.o_proj(found.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    return forward


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions as rotations of the first half of each head against its second (arXiv 2104.09864)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
