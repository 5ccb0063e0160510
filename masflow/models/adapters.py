"""LoRA adapters on one backbone (PEFT): attach, choose, switch off. Knows no optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from masflow.errors import RunError, closest
from masflow.spec.mapping import Lora

__all__ = ["activate", "adapter_parameters", "add_up", "attach", "base_parameters", "switched_off"]


def attach(model: Any, names: Sequence[str], lora: Lora, seed: int) -> None:
    """Inject one fresh adapter a name, in float32 (or float64) whatever the backbone's type: updates are too
    small for less. The backbone stays frozen, the global random state as it was.

    Raises:
        RunError: a target that no layer of the model is called.
    """
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and n != "lm_head"]
    for target in [] if isinstance(targets, str) else targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            near = closest(target, known)
            message = f"lora.targets: no linear layer is called '{target}'; known: {', '.join(known)}"
            raise RunError(message, f"write '{near}'" if near else "name a layer, or write all-linear")
    has_conv1d = any(isinstance(m, Conv1D) for m in model.modules())
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=has_conv1d,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT warns of a second adapter, which is what we are here for.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        torch.manual_seed(seed)
        for name in names:
            inject_adapter_in_model(config, model, adapter_name=name)
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    model.eval()
    activate(model, names[0])


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


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer)]
