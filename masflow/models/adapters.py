"""LoRA adapters on one backbone (PEFT): attach, choose, switch off. Knows no optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from masflow.errors import RunError, closest
from masflow.spec.mapping import Lora

__all__ = ["activate", "adapter_parameters", "attach", "base_parameters", "switched_off"]


def attach(model: Any, names: Sequence[str], lora: Lora, seed: int) -> None:
    """Inject one fresh adapter a name. The backbone stays frozen, the global random state as it was.

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


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, LoraLayer)]
