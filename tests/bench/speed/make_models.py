"""Makes the models that all sides load, once, with masflow's own base maker: Hugging Face folders.

No reply ends before its length, on any side and without a logits processor: the head's rows of special
tokens, single characters and line breaks point against a direction that every embedding shares and no layer
writes to, so that they are never drawn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from masflow.models.bases import make_model
from masflow.models.wordpiece import make_wordpiece
from masflow.spec.mapping import ConfigBase
from tests.bench.speed.workloads import MODELS, words

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
SHARED = 1.0
"""Of every embedding along the shared direction: the first coordinate."""
AGAINST = 40.0
NEVER_SPOKEN = "<empty_output>"
"""The token of SmolLM2's tokenizer that stands in for its end of a reply."""


def sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "1M": (sizes(128, 384, 3, 4, 2), 2048),
    "5M": (sizes(256, 704, 5, 8, 4), 2048),
    "20M": (sizes(512, 1408, 6, 8, 4), 2048),
    "v49k": (sizes(128, 384, 3, 4, 2), 49152),
    "v150k": (sizes(128, 384, 3, 4, 2), 151936),
}
"""Name → config, vocabulary."""


def made(name: str, root: Path = MODELS) -> Path:
    """The folder of a model, made if it isn't there."""
    folder = root / name
    if not (folder / "words.txt").is_file():
        partial = root / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _smollm2(partial) if name == "SmolLM2-135M" else _make(name, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def _make(name: str, folder: Path) -> None:
    config, size = CONFIGS[name]
    known = words(size)
    with tempfile.TemporaryDirectory(prefix="masflow-") as place:
        file = Path(place) / "words.jsonl"
        file.write_text("".join(json.dumps({"text": word}) + "\n" for word in known))
        spec = ConfigBase.model_validate(
            {"config": config, "tokenizer": {"wordpiece": {"files": [str(file)], "size": size}}}
        )
        assert not isinstance(spec.tokenizer, str)
        tokenizer = make_wordpiece(spec.tokenizer.wordpiece, [file])
    model = make_model(spec, tokenizer, seed=0)
    spoken = [word for word in known if len(tokenizer.tokenize(word)) == 1]
    known_ids: Any = tokenizer.convert_tokens_to_ids(spoken)
    silence(model, set(known_ids))
    _save(model, tokenizer, spoken, folder)


def silence(model: Any, spoken: set[int]) -> None:
    """Make a model that draws none but these tokens."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = SHARED
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        head_VD = model.get_output_embeddings().weight
        silent = [token for token in range(head_VD.shape[0]) if token not in spoken]
        head_VD[silent] = 0.0
        head_VD[silent, 0] = -AGAINST


def _smollm2(folder: Path) -> None:
    """The real model without a chat template, whose replies end with a token that it hardly ever draws."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.chat_template, tokenizer.eos_token = None, NEVER_SPOKEN
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
    pieces = (str(piece) for piece in tokenizer.get_vocab())
    spoken = sorted(
        piece[1:] for piece in pieces if piece[0] == "Ġ" and piece[1:].isascii() and piece[1:].islower()
    )
    _save(model, tokenizer, [word for word in spoken if word.isalpha()], folder)


def _save(model: Any, tokenizer: Any, spoken: list[str], folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    (folder / "facts.json").write_text(
        json.dumps({"parameters": parameters, "vocabulary": model.config.vocab_size})
    )
    (folder / "words.txt").write_text("\n".join(spoken) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*CONFIGS])
    for wanted in parser.parse_args().names:
        print(made(wanted), (made(wanted) / "facts.json").read_text())
