"""`--set key=value` on an experiment: dotted keys into the document, values read as YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from masflow.errors import Problem, SpecError, Where, unknown
from masflow.project import Loaded, Source, load_data
from masflow.spec.experiment import Experiment

__all__ = ["FLAG", "overridden"]

FLAG = "--set"


def overridden(loaded: Loaded[Experiment], overrides: Mapping[str, str]) -> Loaded[Experiment]:
    """The experiment with the overrides put in and checked again.

    Raises:
        SpecError: an unknown key (with the known ones), a value that isn't YAML or doesn't fit; all at once.
    """
    if not overrides:
        return loaded
    data: dict[str, Any] = {name: getattr(loaded.spec, name) for name in loaded.spec.model_fields_set}
    problems: list[Problem] = []
    for key, text in overrides.items():
        try:
            _put(data, Experiment, key.split("."), _yaml(key, text), key)
        except SpecError as error:
            problems.extend(error.problems)
    if problems:
        raise SpecError(problems)
    try:
        return load_data(
            data, _flagged(loaded.source, overrides), "experiment", loaded.root, path=loaded.path
        )
    except SpecError as error:
        raise SpecError(_blamed(p, overrides) for p in error.problems) from None


def _flagged(source: Source, overrides: Mapping[str, str]) -> Source:
    """Whatever is found wrong later with an overridden value stands in the flag, too."""
    keys = [tuple(int(p) if p.isdigit() else p for p in key.split(".")) for key in overrides]
    lines = {p: line for p, line in source.lines.items() if not any(p[: len(k)] == k for k in keys)}
    return Source(source.file, lines | dict.fromkeys(keys, 0), {**source.files, **dict.fromkeys(keys, FLAG)})


def _yaml(key: str, text: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(StringIO(text))
    except YAMLError as error:
        message = f"the value {text!r} isn't YAML: {str(error).splitlines()[0]}"
        raise SpecError(
            Problem.at(Where(FLAG, 0, key), "bad-override", message, f"write --set {key}=VALUE")
        ) from None


def _put(data: dict[str, Any], spec: type[BaseModel] | None, keys: list[str], value: Any, whole: str) -> None:
    key, rest = keys[0], keys[1:]
    if spec is not None:
        known = {field.alias or name: name for name, field in spec.model_fields.items()}
        if key not in known and key not in spec.model_fields:
            raise SpecError(unknown(Where(FLAG, 0, whole), "key", key, known, code="bad-override"))
        key = known.get(key, key)
    if not rest:
        data[key] = value
        return
    inner = data.get(key)
    if key in ("workflow", "algorithm") and isinstance(inner, str):
        inner = {"use": inner}
    if isinstance(inner, str) and key in ("mapping", "runtime"):
        message = f"'{key}' is the file {inner}; its keys can't be set from here"
        raise SpecError(Problem.at(Where(FLAG, 0, whole), "bad-override", message, f"use --{key} FILE"))
    if isinstance(inner, (list, tuple)) and re.fullmatch(r"\d+", rest[0]) and int(rest[0]) < len(inner):
        items = list(inner)
        _put_item(items, int(rest[0]), rest[1:], value, whole)
        data[key] = items
        return
    if (inner is not None and not isinstance(inner, (dict, BaseModel))) or not _has_keys(spec, key):
        message = f"'{key}' is one value, which has no key '{rest[0]}'"
        raise SpecError(Problem.at(Where(FLAG, 0, whole), "bad-override", message, f"set '{key}' itself"))
    below = _spec_of(spec, key, inner)
    data[key] = (
        {n: getattr(inner, n) for n in inner.model_fields_set}
        if isinstance(inner, BaseModel)
        else dict(inner or {})
    )
    _put(data[key], below, rest, value, whole)


def _put_item(items: list[Any], index: int, rest: list[str], value: Any, whole: str) -> None:
    if not rest:
        items[index] = value
        return
    item = items[index]
    data = {n: getattr(item, n) for n in item.model_fields_set} if isinstance(item, BaseModel) else item
    if not isinstance(data, dict):
        message = f"item {index} is {item!r}, which has no keys"
        raise SpecError(Problem.at(Where(FLAG, 0, whole), "bad-override", message, "set the item itself"))
    items[index] = {**data}
    _put(items[index], type(item) if isinstance(item, BaseModel) else None, rest, value, whole)


def _spec_of(spec: type[BaseModel] | None, key: str, inner: Any) -> type[BaseModel] | None:
    """The closed spec that the value of a key has, if it has one whatever the value is."""
    if isinstance(inner, BaseModel):
        return type(inner)
    found = [a for a in _arms_of(spec, key) if isinstance(a, type) and issubclass(a, BaseModel)]
    return found[0] if len(found) == 1 and not isinstance(inner, dict) else None


def _has_keys(spec: type[BaseModel] | None, key: str) -> bool:
    arms = _arms_of(spec, key)
    plain = (str, int, float, bool, type(None))
    return not arms or any(get_origin(a) is not Literal and a not in plain for a in arms)


def _arms_of(spec: type[BaseModel] | None, key: str) -> list[Any]:
    if spec is None or key not in spec.model_fields:
        return []
    return _arms(spec.model_fields[key].annotation)


def _arms(annotation: Any) -> list[Any]:
    """The alternatives of a type."""
    if get_origin(annotation) is Annotated:
        return _arms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [arm for one in get_args(annotation) for arm in _arms(one)]
    return [annotation]


def _blamed(problem: Problem, overrides: Mapping[str, str]) -> Problem:
    """A problem of an overridden value stands in the flag, not on the file's line."""
    hit = next((k for k in overrides if problem.path == k or problem.path.startswith(k + ".")), None)
    if hit is None:
        return problem
    return Problem(FLAG, 0, problem.path, problem.code, problem.message, problem.fix)
