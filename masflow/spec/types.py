"""The small type language of task fields, state and replies: parse it, print it, check a value against it.

`str int float bool any`, `[str]` (a list), `[a, b]` (a choice), `{name: str}` (a record), `str?` (or null).
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from masflow.errors import closest
from masflow.spec.base import NAME, Fault, Faults

MAX_LEVELS = 64
"""Of lists and records inside one value."""
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


KNOWN = f"{', '.join(SCALARS)}, [TYPE], [word, word], {{name: TYPE}}, TYPE?"


def parse_type(raw: object) -> Type:
    """Read a type as YAML gives it.

    Raises:
        Fault: not a type, with the known ones; `Faults` when a record has several.
    """
    if isinstance(raw, Type):
        return raw
    if isinstance(raw, str):
        return _parse_word(raw)
    if isinstance(raw, (list, tuple)) and raw:
        return _parse_list(raw)
    if isinstance(raw, dict) and raw:
        return _parse_record(raw)
    shown = "null" if raw is None else repr(raw)
    raise Fault(
        f"not a type: {shown}; known: {KNOWN}", code="unknown-type", fix="write a type such as str or [str]"
    )


def _parse_word(raw: str) -> Type:
    name, nullable = (raw[:-1], True) if raw.endswith("?") else (raw, False)
    if name in SCALARS:
        return Type(name, nullable or name == "any")
    usual = {
        "string": "str",
        "text": "str",
        "integer": "int",
        "number": "float",
        "boolean": "bool",
        "list": "[str]",
    }
    near = usual.get(name.lower()) or closest(name, SCALARS)
    fix = f"write '{near}{'?' if nullable else ''}'" if near else "use a known type"
    raise Fault(f"unknown type '{raw}'; known: {KNOWN}", code="unknown-type", fix=fix)


def _parse_list(raw: list[Any] | tuple[Any, ...]) -> Type:
    if len(raw) == 1 and (not isinstance(raw[0], str) or raw[0].rstrip("?") in SCALARS):
        return Type("list", item=_below(raw[0], 0))
    if len(raw) > 1 and all(isinstance(word, str) and word.rstrip("?") in SCALARS for word in raw):
        message = f"[{', '.join(raw)}] holds several types; a list has one, and a choice has words"
        raise Fault(message, code="unknown-type", fix=f"write [{raw[0]}], or a record {{a: {raw[0]}, …}}")
    if not all(isinstance(word, (str, int, float)) for word in raw):
        message = "a list type has one type, [str], or is a choice of words, [yes, no]"
        raise Fault(message, code="unknown-type", fix="write [TYPE] or [word, word]")
    words = tuple(word_text(word) for word in raw)
    if len(set(words)) < len(words):
        twice = next(word for word in words if words.count(word) > 1)
        raise Fault(f"the choice has '{twice}' twice", code="duplicate-choice", fix=f"write '{twice}' once")
    return Type("choice", choices=words)


def _parse_record(raw: dict[Any, Any]) -> Type:
    faults: list[Fault] = []
    fields: list[tuple[str, Type]] = []
    for key, inner in raw.items():
        name = str(key)
        if not NAME.match(name):
            fix = "use letters, digits and _ only"
            faults.append(
                Fault(f"field '{name}' isn't an identifier", code="bad-name", fix=fix, path=(name,))
            )
            continue
        try:
            fields.append((name, _below(inner, name)))
        except Fault as fault:
            faults.append(fault)
        except Faults as several:
            faults.extend(several.faults)
    if faults:
        raise Faults(faults)
    return Type("record", fields=tuple(fields))


def _below(raw: object, *path: str | int) -> Type:
    try:
        return parse_type(raw)
    except Fault as fault:
        raise fault.below(*path) from None
    except Faults as several:
        raise Faults(fault.below(*path) for fault in several.faults) from None


def word_text(word: object) -> str:
    """A word of a choice as text, the way YAML writes it (`true`, not `True`)."""
    return word if isinstance(word, str) else str(word).lower() if isinstance(word, bool) else str(word)


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


_EXACT = {"str": str, "int": int, "float": float, "bool": bool}
TypeField = Annotated[Type, BeforeValidator(parse_type), PlainSerializer(dump_type)]


def mismatch(value: object, type_: Type, path: str = "") -> str | None:
    """Why `value` isn't of `type_`, e.g. `steps[0].answer: expected str, got 3 (int)`; None when it is."""
    if value is None:
        return None if type_.nullable else f"{path or 'value'}: expected {type_}, got null"
    kind = type_.kind
    if kind == "any" or _EXACT.get(kind) is type(value):
        return None
    here = path or "value"
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
        return (
            f"{here}: unknown field '{extra[0]}'; known: {', '.join(n for n, _ in type_.fields)}"
            if extra
            else None
        )
    if kind == "choice":
        return (
            None
            if value in type_.choices
            else f"{here}: expected one of {', '.join(type_.choices)}, got {shown(value)}"
        )
    accepted = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}[kind]
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and kind != "bool")
    return _expected(here, type_, value) if wrong else None


def _expected(here: str, type_: Type, value: object) -> str:
    return f"{here}: expected {type_}, got {shown(value)} ({type(value).__name__})"


def shown(value: object, length: int = 80) -> str:
    """A value in a message, cut where it would fill the screen."""
    text = f"a {type(value).__name__} that can't be shown"
    with suppress(Exception):  # a user's __repr__ may fail, an integer may have too many digits
        text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


LARGE = 1 << 63
_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def unwritable(value: object) -> str | None:
    """Why JSON can't hold a value (in UTF-8): a number that isn't finite, half a character, another type, or
    more levels than whatever reads it may follow."""
    if is_easy(value, MAX_LEVELS):
        return None
    if _is_deeper(value, MAX_LEVELS):
        return f"is nested more than {MAX_LEVELS} levels deep"
    try:
        _encoded(value).encode()
    except UnicodeEncodeError:
        return "holds half a character (a lone surrogate)"
    except ValueError as error:
        text = str(error)
        if "float" in text:
            return "holds a number that isn't finite"
        return "holds itself" if "ircular" in text else "holds a number with too many digits"
    except TypeError as error:
        return f"isn't plain data: {error}"
    return None


def is_easy(value: Any, levels: int = 0) -> bool:
    """Whether JSON surely holds a value, seen at a glance: ASCII text, small numbers, lists and dicts of
    them."""
    kind = type(value)
    if kind is str:
        return value.isascii()
    if value is None or kind is bool:
        return True
    if kind is int or kind is float:
        return -LARGE < value < LARGE
    if not levels or (kind is not dict and kind is not list):
        return False
    if kind is dict:
        for key in value:
            if type(key) is not str or not key.isascii():
                return False
        value = value.values()
    for item in value:  # written out: rows by the ten thousand come through here
        if type(item) is str:
            if not item.isascii():
                return False
        elif not is_easy(item, levels - 1):
            return False
    return True


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inside)
