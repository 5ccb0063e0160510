"""A decoder's weights without its modules: matrices that read the same input are one matrix, adapters aside.

The parameters stay the model's own: those of a joint matrix become views of it, so that whoever changes a
parameter changes the matrix. Shapes: N tokens, K adapters, R their ranks together. Knows no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from masflow.models.adapters import mask_of

__all__ = ["Joint", "Layer", "Unknown", "Voices", "layer_of"]


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
        self.weight, self.bias = Tensor(), None
        self.changes = [_Change(layers, self.sizes, names)] if _adapted(layers) else []
        self.look()

    def look(self) -> None:
        """See to it that the matrix is the parameters' own memory, wherever they have been put since."""
        self.weight = _joined([base.weight for base in self.bases], self.weight)
        if self.bases[0].bias is not None:
            self.bias = _joined([base.bias for base in self.bases], self.bias)
        self.weight_t = self.weight.t()
        for change in self.changes:
            change.look()

    def refresh(self) -> None:
        """Take the adapters' weights again."""
        for change in self.changes:
            change.stacks.clear()

    def __call__(self, x_ND: Tensor, voices: Voices) -> Tensor:
        """(N, out) of all layers, side by side."""
        out = nn.functional.linear(x_ND, self.weight, self.bias)
        if self.changes and not voices.is_bare:
            self.changes[0].add(out, x_ND, voices)
        return out

    def add_to(self, sum_ND: Tensor, x_NI: Tensor, voices: Voices) -> None:
        """Add the product to `sum_ND`, in place."""
        if self.bias is not None or sum_ND.dtype not in (torch.float32, torch.float64):
            sum_ND.add_(nn.functional.linear(x_NI, self.weight, self.bias))
        else:
            sum_ND.addmm_(x_NI, self.weight_t)
        if self.changes and not voices.is_bare:
            self.changes[0].add(sum_ND, x_NI, voices)


class _Change:
    """What adapters add to a joint matrix's product."""

    def __init__(self, layers: Sequence[Any], sizes: Sequence[int], names: Sequence[str]):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pairs = zip(layers, sizes, ends, strict=True)
        self.parts = [(layer, slice(end - size, end)) for layer, size, end in pairs if _adapted([layer])]
        for layer, _ in self.parts:
            if type(layer) is not LoraLinear or layer.lora_variant or any(layer.lora_bias.values()):
                raise Unknown("not a plain LoRA layer")
        self.names = [n for n in names if all(n in layer.lora_A for layer, _ in self.parts)]
        self.stacks: dict[tuple[str, ...], _Stack] = {}

    def look(self) -> None:
        """Forget copies of weights that have changed."""
        self.stacks = {names: stack for names, stack in self.stacks.items() if stack.seen == stack.state()}

    def add(self, out: Tensor, x: Tensor, voices: Voices) -> None:
        """Add each token's change to `out`, in place."""
        names = tuple(self.names) if voices.only is None else (voices.only,)
        stack = self.stacks.get(names)
        if stack is None:
            stack = self.stacks[names] = _Stack(self.parts, names)
        down = nn.functional.linear(x.to(stack.down.dtype), stack.down)
        scale = stack.scale
        if voices.only is None:
            down, scale = down.mul_(voices.mask(stack.sizes, len(self.parts), down)), 1.0
        for (_, columns), rank, up_t in zip(self.parts, stack.ranks, stack.ups_t, strict=True):
            part = out if out.shape[1] == up_t.shape[1] else out[:, columns]
            own = down if len(self.parts) == 1 else down[:, rank]
            if out.dtype == down.dtype:
                part.addmm_(own, up_t, alpha=scale)
            else:
                part.add_(torch.mm(own, up_t), alpha=scale)


class _Stack:
    """Copies of adapters' matrices, those of the parts side by side: `down` (parts · R, in)."""

    def __init__(self, parts: Sequence[tuple[Any, slice]], names: tuple[str, ...]):
        first = parts[0][0]
        sizes = tuple((n, (len(first.lora_A[n].weight), first.scaling[n])) for n in names)
        self.sizes, self.scale = sizes, first.scaling[names[0]]
        self.down = torch.cat([layer.lora_A[n].weight for layer, _ in parts for n in names])
        width = len(self.down) // len(parts)
        self.ranks = [slice(i * width, (i + 1) * width) for i in range(len(parts))]
        self.ups_t = [torch.cat([layer.lora_B[n].weight for n in names], 1).t() for layer, _ in parts]
        self._weights = [
            w[n].weight for layer, _ in parts for n in names for w in (layer.lora_A, layer.lora_B)
        ]
        self.seen = self.state()
        for layer, _ in parts:
            if sizes != tuple((n, (len(layer.lora_A[n].weight), layer.scaling[n])) for n in names):
                raise Unknown("adapters of different ranks in layers of one input")

    def state(self) -> list[tuple[int, int]]:
        """What tells most changes of the adapters' weights."""
        return [(weight._version, weight.data_ptr()) for weight in self._weights]


@dataclass
class Layer:
    """One decoder layer's weights."""

    norm_in: Any
    qkv: Joint
    q_norm: Any
    k_norm: Any
    out: Joint
    norm_mlp: Any
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
        norm_in=layer.input_layernorm,
        qkv=Joint(attention.q_proj, attention.k_proj, attention.v_proj, names=names),
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        out=Joint(attention.o_proj, names=names),
        norm_mlp=layer.post_attention_layernorm,
        gate_up=Joint(mlp.gate_proj, mlp.up_proj, names=names),
        down=Joint(mlp.down_proj, names=names),
        act=mlp.act_fn,
    )


def _adapted(layers: Sequence[Any]) -> bool:
    return any(hasattr(layer, "base_layer") for layer in layers)


def _joined(parameters: Sequence[Any], joint: Tensor | None) -> Tensor:
    """The memory in which these parameters stand one behind the other; moved there if need be."""
    if len(parameters) == 1:
        return parameters[0].data
    sizes = [len(p) for p in parameters]
    if joint is not None and len(joint) == sum(sizes):
        places = [part.data_ptr() for part in joint.split(sizes)]
        if places == [p.data_ptr() for p in parameters] and joint.dtype == parameters[0].dtype:
            return joint
    with torch.no_grad():
        joint = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, joint.split(sizes), strict=True):
        parameter.data = part
    return joint
