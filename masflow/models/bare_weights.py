"""A decoder's weights without its modules: matrices that read the same input are one product, adapters aside.

Parameters are read where they are. For the steps of few rows in float32, where a product reads a matrix much
faster by columns, there are copies that hold only while rows do. Shapes: N tokens, R ranks of all adapters
together. Knows no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from masflow.models.adapters import mask_of

__all__ = ["Joint", "Layer", "Norm", "Unknown", "Voices", "layer_of"]


class Unknown(Exception):
    """A layer that isn't known here."""


class Voices:
    """Which adapter speaks at each token of a call; None is the bare backbone."""

    def __init__(self, names: Sequence[str | None]):
        spoken = set(names)
        self.names = tuple(names)
        self.only = next(iter(spoken)) if len(spoken) == 1 else None
        self.is_bare = spoken <= {None}
        self._masks: dict[Any, Tensor] = {}

    def mask(self, sizes: tuple[tuple[str, tuple[int, float]], ...], parts: int, like: Tensor) -> Tensor:
        """(N, parts · R): each token's own columns, the same for every part of a joint matrix."""
        key = (sizes, parts)
        if key not in self._masks:
            self._masks[key] = mask_of(self.names, dict(sizes)).repeat(1, parts).to(like)
        return self._masks[key]


class Joint:
    """Linear layers with one input, as one product; each may carry adapters."""

    def __init__(self, *layers: Any, names: Sequence[str] = ()):
        """
        Raises:
            Unknown: not plain linear layers, or adapters that aren't plain LoRA.
        """
        self.bases: list[Any] = [getattr(layer, "base_layer", layer) for layer in layers]
        if any(type(base) is not nn.Linear or type(base.weight) is not nn.Parameter for base in self.bases):
            raise Unknown("not a plain linear layer")
        if len({base.bias is None for base in self.bases}) > 1:
            raise Unknown("a bias in a part of the layers alone")
        self.sizes = [base.out_features for base in self.bases]
        self.size = sum(self.sizes)
        self.change = _Change(layers, self.sizes, names) if _adapted(layers) else None
        self._copy: Tensor | None = None
        self._room: Tensor | None = None
        """Where the copy stood last."""
        self._bias: Tensor | None = None
        self._merged: str | None = None
        """The adapter that is added up in the copy."""

    @property
    def num_bytes(self) -> int:
        """Of a copy."""
        return sum(base.weight.numel() * base.weight.element_size() for base in self.bases)

    def forget(self) -> None:
        """Let go of all copies: weights may be others when they are next needed."""
        self._copy = self._bias = self._merged = None
        if self.change is not None:
            self.change.stacks.clear()

    def copy(self, adapter: str | None) -> None:
        """Make the copy: (in, out), by columns where that is what makes it fast. There the one adapter that
        speaks, if it is one, is added up in it (LoRA, arXiv 2106.09685, section 4.1)."""
        weights = [base.weight for base in self.bases]
        if weights[0].dtype == torch.float32 and weights[0].device.type == "cpu":
            copy = self._room
            if copy is None:
                copy = self._room = weights[0].new_empty(weights[0].shape[1], self.size)
            copy.copy_((weights[0] if len(weights) == 1 else torch.cat(weights)).t())
            if self.change is not None and adapter in self.change.names:
                self.change.merge(copy, adapter)
                self._merged = adapter
            self._copy = copy
        else:
            self._copy = (weights[0] if len(weights) == 1 else torch.cat(weights)).t()
        if self.bases[0].bias is not None:
            self._bias = torch.cat([base.bias for base in self.bases])

    def __call__(self, x_NI: Tensor, voices: Voices) -> Tensor:
        """(N, out) of all layers, side by side."""
        copy = self._copy_for(voices)
        if copy is None:
            out = self._live(x_NI)
        elif self._bias is None:
            out = torch.mm(x_NI, copy)
        else:
            out = torch.addmm(self._bias, x_NI, copy)
        self._change(out, x_NI, voices)
        return out

    def _copy_for(self, voices: Voices) -> Tensor | None:
        return self._copy if self._merged is None or self._merged == voices.only else None

    def _change(self, out: Tensor, x_NI: Tensor, voices: Voices) -> None:
        if (
            self.change is not None
            and not voices.is_bare
            and (self._merged is None or self._merged != voices.only)
        ):
            self.change.add(out, x_NI, voices)

    def _live(self, x_NI: Tensor) -> Tensor:
        if len(self.bases) == 1:
            return nn.functional.linear(x_NI, self.bases[0].weight, self.bases[0].bias)
        out = x_NI.new_empty(len(x_NI), self.size)
        for part, base in zip(out.split(self.sizes, 1), self.bases, strict=True):
            torch.mm(x_NI, base.weight.t(), out=part)
            if base.bias is not None:
                part.add_(base.bias)
        return out

    def add_to(self, sum_ND: Tensor, x_NI: Tensor, voices: Voices) -> None:
        """Add the product to `sum_ND`, in place."""
        copy = self._copy_for(voices)
        if copy is None:
            sum_ND.add_(self._live(x_NI))
        elif self._bias is None:
            sum_ND.addmm_(x_NI, copy)
        else:
            sum_ND.add_(torch.addmm(self._bias, x_NI, copy))
        self._change(sum_ND, x_NI, voices)


class _Change:
    """What adapters add to a joint matrix's product."""

    def __init__(self, layers: Sequence[Any], sizes: Sequence[int], names: Sequence[str]):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pairs = zip(layers, sizes, ends, strict=True)
        self.parts = [(layer, slice(end - size, end)) for layer, size, end in pairs if _adapted([layer])]
        for layer, _ in self.parts:
            if type(layer) is not LoraLinear or layer.lora_variant or any(layer.lora_bias.values()):
                raise Unknown("not a plain LoRA layer")
        self.names = [n for n in names if any(n in layer.lora_A for layer, _ in self.parts)]
        if any(n not in layer.lora_A for n in self.names for layer, _ in self.parts):
            raise Unknown("an adapter on a part of the layers of one input")
        self.stacks: dict[tuple[str, ...], _Stack] = {}

    def _stack(self, names: tuple[str, ...]) -> _Stack:
        if names not in self.stacks:
            self.stacks[names] = _Stack(self.parts, names)
        return self.stacks[names]

    def merge(self, copy: Tensor, adapter: str) -> None:
        """Add an adapter up in a copy (in, out) of the matrix."""
        stack = self._stack((adapter,))
        for (_, columns), rank, up in zip(self.parts, stack.ranks, stack.ups, strict=True):
            copy[:, columns].addmm_(stack.down[:, rank].to(copy.dtype), up.to(copy.dtype), alpha=stack.scale)

    def add(self, out: Tensor, x: Tensor, voices: Voices) -> None:
        """Add each token's change to `out`, in place."""
        if voices.only is not None and voices.only not in self.names:
            return
        stack = self._stack(tuple(self.names) if voices.only is None else (voices.only,))
        down = torch.mm(x.to(stack.down.dtype), stack.down)
        scale = stack.scale
        if voices.only is None:
            down, scale = down.mul_(voices.mask(stack.sizes, len(self.parts), down)), 1.0
        for (_, columns), rank, up in zip(self.parts, stack.ranks, stack.ups, strict=True):
            part = out if out.shape[1] == up.shape[1] else out[:, columns]
            own = down if len(self.parts) == 1 else down[:, rank]
            if out.dtype == down.dtype:
                part.addmm_(own, up, alpha=scale)
            else:
                part.add_(torch.mm(own, up), alpha=scale)


class _Stack:
    """Copies of adapters' matrices, those of the parts side by side: `down` (in, parts · R)."""

    def __init__(self, parts: Sequence[tuple[Any, slice]], names: tuple[str, ...]):
        first = parts[0][0]
        sizes = tuple((n, (len(first.lora_A[n].weight), first.scaling[n])) for n in names)
        self.sizes, self.scale = sizes, first.scaling[names[0]]
        self.down = torch.cat([layer.lora_A[n].weight for layer, _ in parts for n in names]).t().contiguous()
        width = self.down.shape[1] // len(parts)
        self.ranks = [slice(i * width, (i + 1) * width) for i in range(len(parts))]
        self.ups = [torch.cat([layer.lora_B[n].weight.t() for n in names]) for layer, _ in parts]
        for layer, _ in parts:
            if sizes != tuple((n, (len(layer.lora_A[n].weight), layer.scaling[n])) for n in names):
                raise Unknown("adapters of different ranks in layers of one input")


class Norm:
    """An RMS norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467, eq. 4)."""

    def __init__(self, module: Any):
        """
        Raises:
            Unknown: another norm.
        """
        if "RMSNorm" not in type(module).__name__ or type(module.weight) is not nn.Parameter:
            raise Unknown(type(module).__name__)
        self.module, self.eps = module, float(module.variance_epsilon)
        self.shape = module.weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        # Faster formulas (a product with ones, or of each row with itself) give a row other last bits in
        # other company.
        return torch.rms_norm(x, self.shape, self.module.weight, self.eps)


@dataclass
class Layer:
    """One decoder layer's weights."""

    norm_in: Norm
    qkv: Joint
    q_norm: Norm | None
    k_norm: Norm | None
    out: Joint
    norm_mlp: Norm
    gate_up: Joint
    down: Joint
    act: Any

    @property
    def joints(self) -> tuple[Joint, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def layer_of(layer: Any, names: Sequence[str]) -> Layer:
    """
    Args:
        layer: a decoder layer of the Llama kind.
        names: of the adapters.
    Raises:
        Unknown: its matrices aren't plain linear layers.
    """
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        norm_in=Norm(layer.input_layernorm),
        qkv=Joint(attention.q_proj, attention.k_proj, attention.v_proj, names=names),
        q_norm=Norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=Norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        out=Joint(attention.o_proj, names=names),
        norm_mlp=Norm(layer.post_attention_layernorm),
        gate_up=Joint(mlp.gate_proj, mlp.up_proj, names=names),
        down=Joint(mlp.down_proj, names=names),
        act=nn.functional.silu if type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation") else mlp.act_fn,
    )


def _adapted(layers: Sequence[Any]) -> bool:
    return any(hasattr(layer, "base_layer") for layer in layers)
