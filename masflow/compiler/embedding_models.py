"""What an embedding model's folder must hold so that a search can work; read from its files, no weights.

Knows the settings of `dense` by name only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["embedding_faults"]

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
POSITIONS = ("max_position_embeddings", "n_positions")


def embedding_faults(folder: Path, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(message, fix) of everything that keeps `dense` from working with this folder and these settings."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield f"the model '{folder.name}' has no tokenizer", f"put {TOKENIZERS[0]} beside its config.json"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        yield f"the model '{folder.name}' has no weights", "put its .safetensors beside its config.json"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        yield f"the config.json of '{folder.name}' isn't a JSON object", "name a Hugging Face model's folder"
        return
    if config.get("is_encoder_decoder"):
        message = f"'{folder.name}' is an encoder and a decoder; which of them embeds isn't clear"
        yield message, "use an encoder, or a decoder, alone"
    architectures = [str(name) for name in config.get("architectures") or ()]
    is_causal = bool(architectures) and all(name.endswith("ForCausalLM") for name in architectures)
    if settings.get("pooling") == "cls" and is_causal:
        message = (
            f"'{folder.name}' reads from left to right: its first token is the same whatever the text says"
        )
        yield f"{message} (pooling: cls)", "write 'pooling: last' or 'pooling: mean'"
    room = next((config[name] for name in POSITIONS if isinstance(config.get(name), int)), None)
    wanted = settings.get("max_tokens")
    if isinstance(wanted, int) and room is not None and wanted > room:
        yield f"max_tokens is {wanted}; '{folder.name}' has {room} positions", f"write at most {room}"
