"""Exact attention over trees of tokens, block by block: nothing is computed that a mask would hide.

The blocks' softmaxes are joined by their log-sum-exp (Dao et al., arXiv 2205.14135), through the flash kernel
that torch has for CPUs. Transformers' layers reach it by its name in their registry of attention functions.

Shapes: S = 1, H heads, T tokens, D numbers a head. Knows no rows; `packs` makes the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from masflow.models.tree_blocks import STRIP, Block

__all__ = ["NAME", "tree_attention", "used_by"]

NAME = "masflow_trees"
"""As transformers' registry of attention functions knows it."""

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Blocks(torch.autograd.Function):
    """The same numbers as one masked softmax, up to float order; the way back sees each block with the whole
    softmax's output and log-sum-exp, which makes its part of the gradient exact."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
        out_THD = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        out = out_THD.transpose(1, 2)
        lse = q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for block in blocks:
            flags = _flags(block, q.dtype)
            part, part_lse = _forward(
                _cut(q, block.rows, block.copies),
                _cut(k, block.keys, block.copies),
                _cut(v, block.keys, block.copies),
                0.0,
                flags[0],
                attn_mask=flags[1],
                scale=scale,
            )
            into, into_lse = _cut(out, block.rows, block.copies), _cut(lse, block.rows, block.copies)
            if block.opens:
                into.copy_(part)
                into_lse.copy_(part_lse)
                continue
            whole = torch.logaddexp(into_lse, part_lse)
            into.mul_((into_lse - whole).exp_()[..., None].to(q.dtype))
            into.addcmul_(part, (part_lse - whole).exp_()[..., None].to(q.dtype))
            into_lse.copy_(whole)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0]
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for block in ctx.blocks:
            rows, keys, copies = block.rows, block.keys, block.copies
            flags = _flags(block, q.dtype)
            parts = _backward(
                _cut(grad, rows, copies),
                _cut(q, rows, copies),
                _cut(k, keys, copies),
                _cut(v, keys, copies),
                _cut(out, rows, copies),
                _cut(lse, rows, copies),
                0.0,
                flags[0],
                attn_mask=flags[1],
                scale=ctx.scale,
            )
            for into, part, place in zip(found, parts, (rows, keys, keys), strict=True):
                _cut(into, place, copies).add_(part)
        return (*found, None, None)


def _cut(x: Tensor, place: tuple[int, int], copies: int) -> Tensor:
    """A view of (1, H, T, …) with the range alone, its copies as a batch."""
    x = x[:, :, place[0] : place[1]]
    return x if copies == 1 else x[0].unflatten(1, (copies, -1)).transpose(0, 1)


def _flags(block: Block, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
    """(the kernel's own causal mask, a mask to add)."""
    rows, keys = block.rows[1] - block.rows[0], block.keys[1] - block.keys[0]
    if not block.is_causal or rows == keys:
        return block.is_causal, None
    return False, None if rows == 1 else _late(rows, keys, dtype)


def _late(rows: int, keys: int, dtype: torch.dtype) -> Tensor:
    """(rows, keys): 0 where the i-th row from the end may look, minus infinity elsewhere."""
    size = max(1024, 1 << (keys - 1).bit_length())
    mask = _latest(size, dtype)
    return mask[len(mask) - rows :, size - keys :]


@lru_cache(maxsize=8)
def _latest(keys: int, dtype: torch.dtype) -> Tensor:
    """What all masks of so many keys at most are the lower right corner of: none is kept by itself."""
    rows = 2 * STRIP
    seen = torch.ones(rows, keys, dtype=torch.bool).tril_(keys - rows)
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_(~seen, float("-inf"))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
    """(1, H, T, D) of queries, keys and values of that shape."""
    found: Any = _Blocks.apply(q, k, v, blocks, scale)
    return found


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    scaling: float | None = None,
    tree_blocks: Sequence[Block] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; without `tree_blocks` its own function."""
    if tree_blocks is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, *args, scaling=scaling, **kwargs
        )
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        raise ValueError("attention scores are changed in a way that blocks don't know")
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(query, key, value, tree_blocks, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def used_by(model: Any) -> Iterator[None]:
    """The model's layers ask this module's function for the length of the block."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
