"""LoRA adapters on one backbone (PEFT): attach, choose, switch off. Knows no optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from masflow.errors import RunError, closest
from masflow.spec.mapping import Lora

__all__ = [
    "StackedAdapters",
    "activate",
    "adapter_parameters",
    "add_up",
    "attach",
    "base_parameters",
    "mask_of",
    "switched_off",
]


def attach(model: Any, shapes: Mapping[str, Lora], seed: int) -> None:
    """Inject one fresh adapter a name, in float32 (or float64) whatever the backbone's type: updates are too
    small for less. The backbone stays frozen, the global random state as it was.

    Raises:
        RunError: a target that no layer of the model is called.
    """
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and n != "lm_head"]
    has_conv1d = any(isinstance(m, Conv1D) for m in model.modules())
    configs = {name: _config(lora, linear, has_conv1d) for name, lora in shapes.items()}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of a second adapter, which is what we are here for.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        torch.manual_seed(seed)
        for name, config in configs.items():
            inject_adapter_in_model(config, model, adapter_name=name)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.eval()
    activate(model, next(iter(shapes)))


def _config(lora: Lora, linear: Sequence[str], has_conv1d: bool) -> LoraConfig:
    """PEFT's; `linear`: the paths of layers that can carry an adapter."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    for target in [] if isinstance(targets, str) else targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            near = closest(target, known)
            message = f"lora.targets: no linear layer is called '{target}'; known: {', '.join(known)}"
            raise RunError(message, f"write '{near}'" if near else "name a layer, or write all-linear")
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=has_conv1d,
        task_type="CAUSAL_LM",
    )


def activate(model: Any, name: str) -> None:
    """Let this adapter speak, and it alone take gradients."""
    for layer in _layers(model):
        if layer.disable_adapters:
            layer.enable_adapters(True)
        layer.set_adapter(name)


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """The bare backbone, for the length of the block."""
    layers = _layers(model)
    wants = {p: p.requires_grad for layer in layers for p in layer.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in wants.items():
            parameter.requires_grad_(flag)


def adapter_parameters(model: Any, name: str) -> dict[str, nn.Parameter]:
    """An adapter's weights by their path, without the adapter's name in it."""
    mark = f".{name}."
    return {
        path.replace(mark, "."): p for path, p in model.named_parameters() if "lora_" in path and mark in path
    }


def base_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The backbone's weights by the path that they have without adapters."""
    return {
        path.replace(".base_layer.", "."): p for path, p in model.named_parameters() if "lora_" not in path
    }


def add_up(
    model: Any, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], alpha: float, file: str
) -> None:
    """Add alpha / rank · B A of an adapter to the weights of the layers that it was trained on, in place
    (LoRA, arXiv 2106.09685, eq. 3).

    Args:
        weights: by path, of the model without adapters.
        adapter: as `adapter_parameters` names them.
        file: where it was read, for messages.
    Raises:
        RunError: it was trained on layers that this model doesn't have, or of other shapes.
    """
    for path in (name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")):
        down, up = adapter[f"{path}.lora_A.weight"], adapter[f"{path}.lora_B.weight"]
        weight = weights.get(f"{path}.weight")
        product = up.float() @ down.float() * (alpha / down.shape[0])
        if weight is not None and isinstance(model.get_submodule(path), Conv1D):
            product = product.T
        if weight is None or weight.shape != product.shape:
            raise RunError(
                f"{file} fits no layer '{path}' of this model", "use the base that it was trained on"
            )
        with torch.no_grad():
            weight.add_(product.to(weight.device, weight.dtype))


class StackedAdapters:
    """All adapters of a backbone side by side, so that rows of different adapters are one batch: a row's
    change of a layer is ((x Aᵀ) ∘ mask) Bᵀ, two products whatever their number.

    Shapes: B rows, K adapters, R = the sum of their ranks.
    """

    def __init__(self, model: Any, names: Sequence[str]):
        """
        Raises:
            ValueError: an adapted layer that isn't plain LoRA on a linear layer.
        """
        self.names = tuple(names)
        self.stacks = [_Stack(layer, self.names) for layer in _layers(model)]
        self._rows: tuple[str | None, ...] | None = None

    @classmethod
    def of(cls, model: Any, names: Sequence[str]) -> StackedAdapters | None:
        """None where these adapters can't be stacked."""
        try:
            return cls(model, names)
        except ValueError:
            return None

    def refresh(self) -> None:
        """Copy the adapters' weights again. Due after a change that leaves no trace at the parameter, as
        `AdamW(fused=True)` and `.data.add_()` leave none; others are seen by `rows`."""
        for stack in self.stacks:
            stack.seen = ()

    @contextmanager
    def rows(self, names: Sequence[str | None]) -> Iterator[None]:
        """Inside the block row b of every batch speaks with adapter `names[b]`, None with the bare backbone.

        No gradients reach the adapters. What was active before is active again behind the block.
        """
        if self._rows != (rows := tuple(names)):
            masks: dict[Any, Tensor] = {}
            for stack in self.stacks:
                stack.choose(rows, masks)
            self._rows = rows
        for stack in self.stacks:
            stack.look()
            # Past nn.Module.__setattr__: this is done for every layer and step.
            stack.layer.__dict__["forward"] = stack.forward
        try:
            yield
        finally:
            for stack in self.stacks:
                stack.layer.__dict__.pop("forward", None)


class _Stack:
    """One layer's adapters: `down` (R, in) and `up` (out, R), those of a batch's rows."""

    def __init__(self, layer: Any, names: tuple[str, ...]):
        if type(layer) is not LoraLinear or layer.lora_variant or any(layer.lora_bias.values()):
            raise ValueError(f"{type(layer).__name__} is no plain LoRA layer")
        self.layer: Any = layer
        self.names = [name for name in names if name in self.layer.lora_A]
        self.active: list[str] = []
        self.only: str | None = None
        self.seen: tuple[Any, ...] = ()

    def choose(self, rows: tuple[str | None, ...], masks: dict[Any, Tensor]) -> None:
        """The adapters that these rows speak with. `masks`: those that other layers have made for them."""
        spoken, layer = set(rows), self.layer
        self.active = [name for name in self.names if name in spoken]
        self.only = self.active[0] if len(spoken) == 1 and self.active else None
        self.seen = ()
        if self.active and self.only is None:
            sizes = {n: (len(layer.lora_A[n].weight), layer.scaling[n]) for n in self.active}
            weight = layer.lora_A[self.active[0]].weight
            key = (*sizes.items(), weight.dtype, weight.device)
            if key not in masks:
                masks[key] = mask_of(rows, sizes).to(weight)
            self.mask = masks[key]

    def look(self) -> None:
        """Take the weights as they are now; where several are stacked, copy what isn't as it was."""
        downs = [self.layer.lora_A[name].weight for name in self.active]
        ups = [self.layer.lora_B[name].weight for name in self.active]
        if self.only is not None:
            self.down, self.up = downs[0], ups[0]
        elif self.active:
            seen = tuple((w._version, w.data_ptr()) for w in (*downs, *ups))
            if seen != self.seen:
                with torch.no_grad():
                    self.down, self.up, self.seen = torch.cat(downs), torch.cat(ups, 1), seen

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(B, …, in) → (B, …, out): the layer under the adapters, and each row's own change of it."""
        result = self.layer.base_layer(x, *args, **kwargs)
        if not self.active:
            return result
        down = torch.nn.functional.linear(x.to(self.down.dtype), self.down)
        scale = 1.0
        if self.only is not None:
            scale = self.layer.scaling[self.only]
        else:
            down = down * (self.mask if x.dim() == 2 else self.mask[:, None])
        if result.dtype != down.dtype:
            return (result + torch.nn.functional.linear(down, self.up) * scale).to(result.dtype)
        out = torch.addmm(result.flatten(0, -2), down.flatten(0, -2), self.up.t(), alpha=scale)
        return out.view(result.shape)


def mask_of(rows: Sequence[str | None], sizes: Mapping[str, tuple[int, float]]) -> Tensor:
    """(B, R) float32: at a row's own columns its adapter's scaling, 0 elsewhere.

    Args:
        sizes: adapter → (rank, scaling), in the order in which they are stacked.
    """
    starts: dict[str, slice] = {}
    end = 0
    for name, (rank, _) in sizes.items():
        starts[name], end = slice(end, end + rank), end + rank
    table = torch.zeros(len(sizes) + 1, end)
    for number, (name, (_, scaling)) in enumerate(sizes.items()):
        table[number, starts[name]] = scaling
    numbers = {name: number for number, name in enumerate(sizes)}
    return table[torch.tensor([numbers.get(name, len(sizes)) if name else len(sizes) for name in rows])]


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer)]
