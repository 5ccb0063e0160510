"""The small type language of task fields, state and replies: parse it, print it, check a value against it.

`str int float bool any`, `[str]` (a list), `[a, b]` (a choice), `{name: str}` (a record), `str?` (may be null).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

SCALARS = ("str", "int", "float", "bool", "any")


@dataclass(frozen=True)
class Type:
    """One type. `kind` is a scalar name, `list`, `record` or `choice`; the rest belongs to its kind."""

    kind: str
    nullable: bool = False
    item: Type | None = None
    fields: tuple[tuple[str, Type], ...] = ()
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "list":
            text = f"[{self.item}]"
        elif self.kind == "record":
            text = "{" + ", ".join(f"{k}: {t}" for k, t in self.fields) + "}"
        elif self.kind == "choice":
            text = "[" + ", ".join(self.choices) + "]"
        else:
            text = self.kind
        return text + ("?" if self.nullable else "")

    def field(self, name: str) -> Type | None:
        return dict(self.fields).get(name)


ANY = Type("any", nullable=True)
STR = Type("str")


def parse_type(raw: object) -> Type:
    """Read a type as YAML gives it.

    Raises:
        ValueError: not a type, with the known ones.
    """
    if isinstance(raw, Type):
        return raw
    if isinstance(raw, str):
        name, nullable = (raw[:-1], True) if raw.endswith("?") else (raw, False)
        if name in SCALARS:
            return Type(name, nullable or name == "any")
        raise ValueError(f"unknown type '{raw}'; known: {', '.join(SCALARS)}, [TYPE], [word, word], {{name: TYPE}}, TYPE?")
    if isinstance(raw, (list, tuple)) and raw:
        if len(raw) == 1 and (not isinstance(raw[0], str) or raw[0].rstrip("?") in SCALARS):
            return Type("list", item=parse_type(raw[0]))
        if all(isinstance(word, (str, int, float, bool)) for word in raw):
            return Type("choice", choices=tuple(word if isinstance(word, str) else str(word) for word in raw))
        raise ValueError("a list type has one type, [str], or is a choice of words, [yes, no]")
    if isinstance(raw, dict) and raw:
        return Type("record", fields=tuple((str(k), parse_type(v)) for k, v in raw.items()))
    raise ValueError(f"not a type: {raw!r}; known: {', '.join(SCALARS)}, [TYPE], [word, word], {{name: TYPE}}, TYPE?")


def dump_type(type_: Type) -> Any:
    """The YAML form of a type; `parse_type` reads it back to an equal one."""
    if type_.kind == "list":
        assert type_.item is not None
        return [dump_type(type_.item)]
    if type_.kind == "record":
        return {name: dump_type(t) for name, t in type_.fields}
    if type_.kind == "choice":
        return list(type_.choices)
    return type_.kind + ("?" if type_.nullable and type_.kind != "any" else "")


TypeField = Annotated[Type, BeforeValidator(parse_type), PlainSerializer(dump_type)]


def mismatch(value: object, type_: Type, path: str = "") -> str | None:
    """Why `value` isn't of `type_`, e.g. `steps[0].answer: expected str, got 3 (int)`; None when it is."""
    if value is None:
        return None if type_.nullable else f"{path or 'value'}: expected {type_}, got null"
    kind, here = type_.kind, path or "value"
    if kind == "any":
        return None
    if kind == "list":
        if not isinstance(value, (list, tuple)):
            return _expected(here, type_, value)
        assert type_.item is not None
        return next((m for i, v in enumerate(value) if (m := mismatch(v, type_.item, f"{path}[{i}]"))), None)
    if kind == "record":
        if not isinstance(value, dict):
            return _expected(here, type_, value)
        for name, inner in type_.fields:
            found = mismatch(value.get(name), inner, f"{path}.{name}" if path else name)
            if found:
                return found
        extra = sorted(set(map(str, value)) - {name for name, _ in type_.fields})
        return f"{here}: unknown field '{extra[0]}'; known: {', '.join(n for n, _ in type_.fields)}" if extra else None
    if kind == "choice":
        return None if value in type_.choices else f"{here}: expected one of {', '.join(type_.choices)}, got {value!r}"
    accepted = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}[kind]
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and kind != "bool")
    return _expected(here, type_, value) if wrong else None


def _expected(here: str, type_: Type, value: object) -> str:
    return f"{here}: expected {type_}, got {value!r} ({type(value).__name__})"
