"""Estimates of a model's parameters and memory from its config, or from the header of its weights. No
torch.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from masflow.compiler.plan import ModelIR
from masflow.spec.mapping import ConfigBase

__all__ = ["Size", "estimate", "window_of"]

TRAINED_BYTES = 16
"""Of a trained parameter in single precision: weight, gradient, and Adam's two moments."""
FROZEN_BYTES = 4
HALF_BYTES = 2
FOUR_BIT_BYTES = 0.516
"""NormalFloat with double quantisation: 4.127 bits a weight."""
SMALL = 5_000_000
"""Parameters below which `dtype: auto` stays in single precision."""


@dataclass(frozen=True)
class Size:
    """All numbers are estimates."""

    num_parameters: int
    num_trained: int
    """Over all policies of the model."""
    memory_bytes: int
    """Weights, gradients and optimizer states; activations and caches come on top."""


def estimate(model: ModelIR) -> Size | None:
    """None when the base's config isn't at hand (a hub id)."""
    config, vocabulary = _config(model.base)
    if config is None:
        return None
    linears = _linears(config)
    counted = _from_header(model.base) if isinstance(model.base, str) else None
    embedding = vocabulary * _int(config, "hidden_size")
    heads = 1 if config.get("tie_word_embeddings", False) else 2
    norms = _int(config, "hidden_size") * (2 * _int(config, "num_hidden_layers") + 1)
    total = counted or embedding * heads + sum(a * b for a, b in linears) + norms
    if model.train == "full":
        frozen = embedding if isinstance(model.base, ConfigBase) and "embeddings" in model.base.freeze else 0
        trained, kept = total - frozen, frozen
    elif model.train == "lora":
        ranks = sum(model.lora_of(policy).rank for policy in model.policies)
        trained = ranks * sum(a + b for a, b in linears)
        kept = total
    else:
        trained, kept = 0, total
    half = model.dtype == "bfloat16" or (model.dtype == "auto" and total >= SMALL)
    kept_bytes = HALF_BYTES if half else FROZEN_BYTES
    kept_size = kept * kept_bytes
    if model.quantize is not None:
        inner = sum(a * b for a, b in linears)
        kept_size = int(inner * FOUR_BIT_BYTES) + max(0, kept - inner) * HALF_BYTES
    extra = trained if model.train == "lora" else 0
    return Size(total + extra, trained, trained * TRAINED_BYTES + kept_size)


def window_of(model: ModelIR) -> int | None:
    """Tokens that the narrowest layer looks back at, as far as the config says so; None: all of them."""
    config, _ = _config(model.base)
    if config is None or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types")
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    return _int(config, "sliding_window") or _int(config, "attention_chunk_size") or None


def _int(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = config.get(key, default)
    return value if isinstance(value, int) else default


def _linears(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(in, out) of every linear layer of a decoder with gated feed-forward layers."""
    hidden, heads = _int(config, "hidden_size"), max(1, _int(config, "num_attention_heads", 1))
    size = _int(config, "head_dim") or hidden // heads
    keys = (_int(config, "num_key_value_heads") or heads) * size
    inner = _int(config, "intermediate_size") or 4 * hidden
    layer = [(hidden, heads * size), (hidden, keys), (hidden, keys), (heads * size, hidden)]
    layer += [(hidden, inner), (hidden, inner), (inner, hidden)]
    return layer * _int(config, "num_hidden_layers")


def _config(base: str | ConfigBase | None) -> tuple[Mapping[str, Any] | None, int]:
    """(config, number of vocabulary entries)."""
    if isinstance(base, ConfigBase):
        tokenizer = base.tokenizer
        if _int(base.config, "vocab_size"):
            return base.config, _int(base.config, "vocab_size")
        if isinstance(tokenizer, str):
            return base.config, _folder_vocabulary(Path(tokenizer))
        return base.config, _words(tokenizer.wordpiece.files, tokenizer.wordpiece.size)
    path = Path(base or "") / "config.json"
    if base is None or not path.is_file():
        return None, 0
    config = json.loads(path.read_text(encoding="utf-8"))
    return config, _int(config, "vocab_size")


def _folder_vocabulary(folder: Path) -> int:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return 0
    vocabulary = json.loads(path.read_text(encoding="utf-8")).get("model", {}).get("vocab", [])
    return len(vocabulary)


def _words(files: tuple[str, ...], limit: int | None) -> int:
    """Whole words, and each character at a word's beginning and inside it."""
    words: Counter[str] = Counter()
    for name in files:
        for line in Path(name).read_text(encoding="utf-8").splitlines():
            if line.strip():
                words.update(str(json.loads(line).get("text", "")).split())
    letters = {letter for word in words for letter in word}
    found = len([w for w in words if len(w) > 1]) + 2 * len(letters) + 3
    return min(found, limit) if limit else found


def _from_header(folder: str) -> int | None:
    """Parameters by the headers of a folder's safetensors files; None without such a file."""
    total = 0
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None
