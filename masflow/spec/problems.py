"""From pydantic's errors to problems of the user's file: known choices, a fix, the right line."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Any

from pydantic import ValidationError

from masflow.errors import Problem, Where, closest
from masflow.spec.base import Fault, Faults, fault_of

EXPRESSION_KEYS = ("when", "foreach", "switch", "speaker", "key")
EXPECTED = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "mapping": "a mapping",
}
UNIONS = {"<name>": "a name, or a mapping"}
"""What a value may be where a document is named or written in place."""
BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
LONG_NAMES = {"fields": "json", "json_schema": "json", "type": "", "format": "", "use": "", "path": ""}
"""Fields that a shorthand writes under another key, or (empty) without a key."""


def problems_of(
    error: ValidationError, data: object, where: Callable[..., Where], lines: Container[tuple[Any, ...]]
) -> list[Problem]:
    """Every problem behind a validation error, each at the nearest value that stands in the document."""
    found: list[Problem] = []
    for entry in error.errors(include_url=False):
        path = _path(entry["loc"], lines, keep=entry["type"] == "missing")
        own = fault_of(entry)
        if own is None:
            faults: tuple[Fault, ...] = (translated(entry, path),)
        else:
            faults = own.faults if isinstance(own, Faults) else (own,)
        for fault in faults:
            full = (*path, *_path(fault.path, (), keep=True))
            found.append(
                Problem.at(where(*full), fault.code, fault.message, fault.fix or "see the language reference")
            )
    return found


def _path(
    loc: tuple[Any, ...], lines: Container[tuple[Any, ...]], keep: bool = False
) -> tuple[str | int, ...]:
    """The path in the document: without the tags of unions (`<role>`), long names as they are written."""
    path: tuple[str | int, ...] = ()
    for part in loc:
        if isinstance(part, str) and re.match(r"<.*>\Z", part):
            continue
        if not keep and part in LONG_NAMES and path in lines and (*path, part) not in lines:
            part = LONG_NAMES[part]
        if part != "":
            path = (*path, part)
    return path


def _shown(value: object) -> str:
    text = (
        {True: "true", False: "false", None: "null"}.get(value)
        if isinstance(value, (bool, type(None)))
        else None
    )
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def translated(entry: Any, path: tuple[str | int, ...]) -> Fault:
    """One entry of `ValidationError.errors()` in our words."""
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    key = str(path[-1]) if path else "the document"
    name = f"entry {key} of '{path[-2]}'" if len(path) > 1 and isinstance(path[-1], int) else f"'{key}'"
    if kind == "missing":
        return Fault(f"missing key '{key}'", code="missing-key", fix=f"add '{key}: …'")
    if kind in ("literal_error", "enum"):
        chosen = f"choice for '{key}':" if len(path) > 1 and path[-2] in ("pay", "outcomes") else key
        return _choice(chosen, value, context)
    if kind == "finite_number":
        return Fault(
            f"{name} must be a finite number; got {_shown(value)}", code="not-finite", fix="write one"
        )
    if kind in BOUNDS:
        bound = next(iter(context.values()))
        message = f"{name} is {_shown(value)}; it must be {BOUNDS[kind]} {bound}"
        return Fault(message, code="out-of-bounds", fix=f"write a number that is {BOUNDS[kind]} {bound}")
    if key in EXPRESSION_KEYS and kind.startswith("string"):
        message = f"'{key}' is a bare expression, but YAML reads {_shown(value)} here"
        return Fault(message, code="unquoted-expression", fix=f'write the expression in quotes: {key}: "…"')
    base = kind.split("_")[0]
    expected = UNIONS.get(str(entry["loc"][-1]) if entry["loc"] else "", EXPECTED.get(base, ""))
    if base in EXPECTED and value is None:
        fix = (
            "write text, or remove it" if base == "string" else f"write something below '{key}', or remove it"
        )
        return Fault(f"{name} is empty (null); it must be {expected}", code="wrong-type", fix=fix)
    if base in EXPECTED:
        fix = (
            f"write [{value}]"
            if base in ("tuple", "list") and isinstance(value, str)
            else f"write {expected}"
        )
        return Fault(f"{name} must be {expected}; got {_shown(value)}", code="wrong-type", fix=fix)
    message = entry["msg"].removeprefix("Value error, ")
    return Fault(f"{name}: {message}; got {_shown(value)}", code="bad-value", fix=f"correct {name}")


def _choice(key: str, value: object, context: dict[str, Any]) -> Fault:
    known = re.findall(r"'([^']*)'", str(context.get("expected", ""))) or [str(context.get("expected"))]
    near = closest(str(value), known)
    fix = f"write '{near}'" if near else f"use one of {', '.join(known)}"
    return Fault(f"unknown {key} {_shown(value)}; known: {', '.join(known)}", code="unknown-choice", fix=fix)
