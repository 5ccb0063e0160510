"""Python values, types and functions as the language writes them: what the builder and `@workflow` hand on.

Light on purpose: a user's file imports it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from masflow.errors import Problem, SpecError, Where

__all__ = ["DOCUMENTS", "plain_data", "type_data"]

SCALARS = {str: "str", int: "int", float: "float", bool: "bool", Any: "any", object: "any"}
DOCUMENTS: dict[type, Callable[[Any], Any]] = {}
"""Classes of whole documents → what stands for one inside another."""


def plain_data(value: Any, problems: list[Problem] | None = None, here: Where | None = None) -> Any:
    """Data as YAML would give it: names as strings, functions as references, documents as mappings."""
    if type(value) in DOCUMENTS:
        return DOCUMENTS[type(value)](value)
    if isinstance(value, dict):
        return {_word(key): plain_data(inner, problems, here) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain_data(inner, problems, here) for inner in value]
    if isinstance(value, str):
        return str(value)
    if callable(value) and not isinstance(value, type):
        return _reference(value, problems if problems is not None else [], here or Where())
    return value


def _word(key: Any) -> Any:
    return key.rstrip("_") if key in ("with_", "as_", "from_", "set_") else key


def _reference(function: Callable[..., Any], problems: list[Problem], here: Where) -> str:
    """`file.py:name` of a function that stands at the top of a file."""
    name = getattr(function, "__qualname__", "")
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or not name.isidentifier() or not Path(file).exists():
        message = (
            f"the function '{name or function!r}' can't be found again: it isn't at the top level of a file"
        )
        problems.append(
            Problem.at(here, "local-function", message, "move it to the top level of a file, with 'def'")
        )
        return "?:unknown"
    return f"{Path(file).resolve()}:{name}"


def type_data(value: Any, here: Where | None = None) -> Any:
    """A Python type as a type of the language; anything else as it is.

    Raises:
        SpecError: at `here`, a type that the language has no word for.
    """
    origin, args = typing.get_origin(value), typing.get_args(value)
    if origin is list:
        return [type_data(args[0], here)]
    if origin is Literal:
        return [plain_data(arg) for arg in args]
    if origin in (typing.Union, types.UnionType) and type(None) in args and len(args) == 2:
        inner = type_data(next(arg for arg in args if arg is not type(None)), here)
        if not isinstance(inner, str):
            message = f"{value} can't be null: only str, int, float and bool can in a document"
            raise SpecError(Problem.at(here or Where(), "unknown-type", message, "leave out '| None'"))
        return f"{inner}?"
    if is_dataclass(value) and isinstance(value, type):
        hints = typing.get_type_hints(value)
        return {f.name: type_data(hints[f.name], here) for f in fields(value)}
    if isinstance(value, dict):
        return {_word(key): type_data(inner, here) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [type_data(inner, here) for inner in value]
    if isinstance(value, type) or value is Any:
        return SCALARS.get(value, f"{getattr(value, '__name__', value)}")
    return plain_data(value)
