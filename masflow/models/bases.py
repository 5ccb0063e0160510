"""Loads a base model and its tokenizer, or makes a small one from a config, once, into the run's folder.

Knows no policies: adapters come in `adapters`, training in `trainer`.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from masflow.compiler.plan import ModelIR
from masflow.errors import RunError, boundary, closest
from masflow.models.cache import window_of
from masflow.models.precision import dtype_of, four_bits, hold_in
from masflow.models.wordpiece import make_wordpiece
from masflow.spec.mapping import ConfigBase

__all__ = ["Base", "load_base", "make_model", "mix_seed", "pick_device"]


@dataclass
class Base:
    """A loaded model with its tokenizer. `made`: from a config, so with random weights at first."""

    model: Any
    tokenizer: Any
    made: bool
    context: int
    """Window, tokens."""
    stop_ids: tuple[int, ...]
    """Tokens that end a reply; the first one is added to demonstrations."""


def pick_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_base(model: ModelIR, run_dir: Path, seed: int, device: torch.device | None = None) -> Base:
    """The base of a model, on its device, in evaluation mode.

    Args:
        run_dir: a base made from a config is written to and then read from `run_dir/base/<name>`.
        seed: of the run; with the model's name it seeds random weights.
    Raises:
        RunError: no base, an unreadable folder or id, or a made base that belongs to another plan.
    """
    transformers_logging.disable_progress_bar()
    spec = model.base
    if spec is None:
        raise RunError(f"model '{model.name}' has no base", "write `base:` in the experiment or the mapping")
    made = isinstance(spec, ConfigBase)
    folder = str(_made_once(model, spec, run_dir, seed)) if isinstance(spec, ConfigBase) else str(spec)
    device = device or pick_device()
    how = four_bits(model.name, device) if model.quantize == "4bit" else {"dtype": "auto"}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        fix = "remove that folder: it is made again, the same" if made else "write a folder or an id"
        raise RunError(f"model '{model.name}': can't load the base '{folder}': {error}", fix) from error
    rows = int(loaded.get_input_embeddings().weight.shape[0])
    if tokenizer.vocab_size > rows:
        message = f"model '{model.name}': the tokenizer of '{folder}' has {tokenizer.vocab_size} tokens"
        raise RunError(f"{message}, and the model {rows}", "use the tokenizer that the model was made with")
    if model.quantize is None:
        size = sum(p.numel() for p in loaded.parameters())
        loaded = hold_in(loaded.to(device), dtype_of(model.dtype, model.train, size, device.type))
    loaded.eval().requires_grad_(False)
    return Base(loaded, tokenizer, made, _context(model, loaded.config), _stop_ids(tokenizer, loaded))


def _context(model: ModelIR, config: Any) -> int:
    """The window in tokens. Layers of sliding attention bound it: within their window they are plain."""
    said = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    bounds = [int(b) for b in (said, window_of(config)) if b]
    window = min(bounds, default=2048)
    if model.context and bounds and model.context > window:
        raise RunError(
            f"model '{model.name}': context {model.context} exceeds the base's {window}",
            f"write at most {window}",
        )
    return model.context or window


def _stop_ids(tokenizer: Any, loaded: Any) -> tuple[int, ...]:
    generation = getattr(loaded, "generation_config", None)
    more = getattr(generation, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(more if isinstance(more, list | tuple) else [more])]
    found = tuple(dict.fromkeys(int(i) for i in ids if i is not None))
    if not found:
        raise RunError("the tokenizer has no end-of-sequence token", "set eos_token in the tokenizer's files")
    return found


# -- made from a config --------------------------------------------------------------------------


def _made_once(model: ModelIR, spec: ConfigBase, run_dir: Path, seed: int) -> Path:
    """Of a model's processes that start at once, the first one makes the base, and the others wait for it."""
    folder = run_dir / "base" / model.name
    if (
        folder / "masflow.json"
    ).is_file():  # it appears whole: nothing to wait for, and a reader writes nothing
        return _found_or_made(model, spec, folder, seed)
    with ExitStack() as stack:
        with boundary(str(folder)) as caught:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder.parent / f".{model.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if caught.error:
            raise RunError(f"can't write the base: {caught.error}", "make room on the disk, then start again")
        return _found_or_made(model, spec, folder, seed)


def _found_or_made(model: ModelIR, spec: ConfigBase, folder: Path, seed: int) -> Path:
    mark = {"base_hash": model.base_hash, "seed": seed}
    stamp = folder / "masflow.json"
    if stamp.is_file():
        found: Any = None
        with boundary(str(stamp)):  # torn is as good as another base's
            found = json.loads(stamp.read_text())
        if found != mark:
            raise RunError(f"{folder} was made for another base or seed", "choose a new output folder")
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = _make_tokenizer(spec)
    made = make_model(spec, tokenizer, mix_seed(seed, model.name))
    with boundary(str(folder)) as caught:
        partial.mkdir(parents=True)
        made.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "masflow.json").write_text(json.dumps(mark))
        if folder.is_dir():  # without its stamp it is nobody's
            shutil.rmtree(folder)
        partial.rename(folder)
    if caught.error:
        raise RunError(f"can't write the base: {caught.error}", "make room on the disk, then start again")
    return folder


def _make_tokenizer(spec: ConfigBase) -> Any:
    if isinstance(spec.tokenizer, str):
        try:
            return AutoTokenizer.from_pretrained(spec.tokenizer)
        except (OSError, ValueError, KeyError) as error:
            message = f"can't load the tokenizer '{spec.tokenizer}': {error}"
            raise RunError(message, "write a folder or an id, or how to make one") from error
    words = spec.tokenizer.wordpiece
    return make_wordpiece(words, [Path(f) for f in words.files])


def make_model(spec: ConfigBase, tokenizer: Any, seed: int) -> Any:
    """A float32 model of `spec.config` with random weights; the global random state is left as it was.

    Raises:
        RunError: no such type, an argument that its config class doesn't have, or sizes that don't fit.
    """
    settings = dict(spec.config)
    model_type = settings.pop("model_type", None)
    if model_type is None:
        raise RunError("base.config has no model_type", "write e.g. `model_type: qwen3`")
    ids = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
        for kind in ("pad", "eos", "bos")
        if getattr(tokenizer, f"{kind}_token_id") is not None
    }
    settings = {"vocab_size": len(tokenizer), **ids, **settings}
    made: Any = None
    odd: list[str] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), boundary("base.config") as caught:
        torch.manual_seed(seed)
        odd = _unknown(model_type, spec.config)
        config = AutoConfig.for_model(model_type, **_with_heads(model_type, settings))
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if spec.init.embedding_std is not None:
            made.get_input_embeddings().weight.normal_(0.0, spec.init.embedding_std)
    if odd:
        raise RunError(f"base.config: {odd[0]}", odd[1])
    if not caught.error:
        with torch.no_grad(), boundary("base.config: a model of these sizes can't run") as caught:
            made.eval()(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    if caught.error:
        raise RunError(caught.error, "mend the config's arguments")
    return made.train()


def _unknown(model_type: str, given: dict[str, Any]) -> list[str]:
    """[what is wrong, fix] of the first argument that the config class doesn't have: the library would keep
    it and build a model of its own default sizes. Empty when all are known."""
    plain = AutoConfig.for_model(model_type)
    known = {*inspect.signature(type(plain).__init__).parameters, *plain.to_dict(), *plain.attribute_map}
    for key in given:
        if key not in known | {"model_type", "rope_theta", "rope_scaling"}:
            near = closest(key, known)
            fix = f"write '{near}'" if near else f"use an argument of {type(plain).__name__}"
            return [f"{type(plain).__name__} has no argument '{key}'", fix]
    return []


def _with_heads(model_type: str, settings: dict[str, Any]) -> dict[str, Any]:
    """As many heads for keys and values as for queries where only those are given: the library's own number
    is that of its largest models."""
    heads = settings.get("num_attention_heads")
    takes_it = hasattr(AutoConfig.for_model(model_type), "num_key_value_heads")
    return {"num_key_value_heads": heads, **settings} if heads and takes_it else settings


def mix_seed(seed: int, name: str) -> int:
    """A seed of 56 bits for one named use of a run's seed."""
    return int.from_bytes(sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
