"""In which numbers a model's weights are held: single precision, bfloat16, or 4 bits under adapters.

Knows neither files nor policies.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from masflow.errors import RunError

__all__ = ["SMALL", "dtype_of", "four_bits", "hold_in", "slow_halves"]

HALVES = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")
"""Flags of CPUs that multiply bfloat16."""
SMALL = 5_000_000
"""Parameters below which half precision loses more than it gains (measured)."""


def dtype_of(asked: str, train: str, num_parameters: int, device_type: str) -> torch.dtype:
    """The type of a base's weights.

    What is asked for is done. Otherwise (`auto`) bfloat16 is for weights that stay as they are (frozen, or
    under adapters), of a model of at least 5M parameters, on an accelerator. Everything else is float32: what
    is trained (an update of a thousandth of a weight is lost in bfloat16, whose steps are 1/256), small
    models, and the CPU. Adapters are float32 on a base of any type.

    Args:
        asked: `float32`, `bfloat16` or `auto`.
        train: `full`, `lora` or `frozen`.
        device_type: as `torch.device.type`.
    """
    if asked != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[asked]
    is_kept = train != "full" and num_parameters >= SMALL and device_type != "cpu"
    return torch.bfloat16 if is_kept else torch.float32


def slow_halves(dtype: torch.dtype, device_type: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """A note where weights are bfloat16 on a CPU that has no instructions for it, and works each product out
    in float32 piece by piece: a warm-start step of SmolLM2-135M took minutes there, and 50 s in float32
    (seen once on a busy machine, not measured in pairs)."""
    if dtype != torch.bfloat16 or device_type != "cpu" or not cpuinfo.is_file():
        return []
    if HALVES.search(cpuinfo.read_text(encoding="utf-8", errors="replace")):
        return []
    return ["bfloat16 is slow on this CPU, which has no instructions for it; 'dtype: auto' takes float32"]


def hold_in(model: Any, dtype: torch.dtype) -> Any:
    """The model, its weights in another type. Its buffers keep theirs: with rounded rotary frequencies it
    would be another model than the one that other programs load from the same files."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def four_bits(model: str, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that hold a base's linear layers in 4 bits.

    NormalFloat with double quantisation, computing in bfloat16 (QLoRA, Dettmers et al., arXiv 2305.14314,
    sections 3 and 4); embeddings, norms and the head stay in bfloat16, adapters on top in float32. On a CPU
    the library packs weights in a way through which gradients don't flow, so it isn't used there.

    Args:
        model: its name, for messages.
    Raises:
        RunError: bitsandbytes or a GPU is missing.
    """
    missing = []
    if device.type != "cuda":
        missing.append("a GPU (CUDA), and there is none")
    if find_spec("bitsandbytes") is None:
        missing.append("bitsandbytes, which isn't installed")
    if missing:
        install = "" if find_spec("bitsandbytes") else "pip install bitsandbytes, and "
        raise RunError(
            f"model '{model}': 4 bits need {', and '.join(missing)}",
            f"{install}run it on a GPU; or remove 'quantize'",
        )
    return _normal_float(device)


def _normal_float(device: torch.device) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, "device_map": {"": device}, "dtype": torch.bfloat16}
