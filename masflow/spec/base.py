"""The base of every spec: closed, frozen, attribute docstrings are the reference; how it says what is wrong.

Knows no files and no lines: `masflow.spec.problems` gives a fault its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from masflow.errors import closest

JsonValue = object
"""Anything that JSON can hold; strings may be templates."""

STORED = {"stored": True}
"""Validation context of data that a spec wrote: it names every field, so its keys say nothing."""

REALS = (float, float | None)
NUMBERS = (int, int | None, *REALS)
LARGEST = 1e30
"""Of real numbers: what is computed with them stays within float32."""
NAME = re.compile(r"[A-Za-z_]\w*\Z")


class Fault(ValueError):
    """What a validator finds wrong: text, stable code, fix, and the place below the validated value."""

    def __init__(self, message: str, *, code: str = "bad-value", fix: str = "", path: tuple[Any, ...] = ()):
        super().__init__(message)
        self.message = message
        self.code = code
        self.fix = fix
        self.path = path

    def below(self, *path: Any) -> Fault:
        return Fault(self.message, code=self.code, fix=self.fix, path=(*path, *self.path))


class Faults(ValueError):
    """Several faults of one value, raised together."""

    def __init__(self, faults: Iterable[Fault]):
        self.faults = tuple(faults)
        super().__init__("\n".join(f.message for f in self.faults))


def unknown_word(
    kind: str, value: object, known: Iterable[str], *, code: str = "", path: tuple[Any, ...] = ()
) -> Fault:
    """The fault of a word that isn't one of the known ones, with the nearest as the fix."""
    words = list(known)
    near = closest(str(value), words)
    listed = ", ".join(words) or "(none)"
    fix = f"write '{near}'" if near else f"use one of {listed}" if words else "remove it"
    message = f"unknown {kind} '{value}'; known: {listed}"
    return Fault(message, code=code or f"unknown-{kind.replace(' ', '-')}", fix=fix, path=path)


class Spec(BaseModel):
    """A part of a user's document. Unknown keys are refused; objects are immutable and comparable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )
    hints: ClassVar[dict[str, str]] = {}
    """Keys that people write here by mistake → the key that they mean."""

    @classmethod
    def known_keys(cls) -> tuple[str, ...]:
        return tuple(f.alias or name for name, f in cls.model_fields.items() if not f.exclude)

    @classmethod
    def says(cls, data: dict[str, Any], key: str) -> bool:
        """Whether the data gives a key another value than its default: a dump says nothing new."""
        default = cls.model_fields[key].get_default(call_default_factory=True)
        plain = default.model_dump() if isinstance(default, BaseModel) else default
        return key in data and data[key] is not None and data[key] != default and data[key] != plain

    @classmethod
    def longhand(cls, data: Any) -> Any:
        """Turn a shorthand into the mapping form; raises `Fault` when it can't."""
        return data

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        """What is wrong with the mapping form beyond single keys."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        """With `context=STORED` the data came out of a spec: every field is there, defaults too."""
        if isinstance(data, BaseModel) or info.context == STORED:
            return handler(data)
        data = cls.longhand(data)
        if not isinstance(data, dict):
            return handler(data)
        found = [*cls._unknown_keys(data), *cls._odd_numbers(data), *cls.faults(data)]
        if not found:
            return handler(data)
        known = {k: v for k, v in data.items() if k in cls.model_fields or k in cls.known_keys()}
        raise with_faults(found, known, handler)

    @classmethod
    def _odd_numbers(cls, data: dict[str, Any]) -> Iterator[Fault]:
        """Text and truth values where a number belongs (pydantic turns `true` into 1 and `"7"` into 7), and
        numbers that float32 can't hold."""
        for name, field in cls.model_fields.items():
            key = field.alias or name
            value = data.get(key)
            if isinstance(value, (bool, str)) and field.annotation in NUMBERS:
                number = "a whole number" if field.annotation in (int, int | None) else "a number"
                shown = repr(value) if isinstance(value, str) else str(value).lower()
                fix = (
                    f"write {value} without quotes"
                    if isinstance(value, str) and value.isdigit()
                    else f"write {number}"
                )
                yield Fault(f"'{key}' must be {number}; got {shown}", code="wrong-type", fix=fix, path=(key,))
            elif isinstance(value, (int, float)) and field.annotation in REALS and abs(value) > LARGEST:
                message = f"'{key}' is {value:g}; numbers here reach to {LARGEST:g}"
                fix = f"write at most {LARGEST:g}"
                yield Fault(message, code="out-of-bounds", fix=fix, path=(key,))

    @classmethod
    def _unknown_keys(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if cls.model_config.get("extra") == "allow":
            return
        known = cls.known_keys()
        for key in data:
            if key not in known and key not in cls.model_fields:
                fault = unknown_word("key", key, known, path=(key,))
                meant = cls.hints.get(key)
                yield (
                    Fault(fault.message, code=fault.code, fix=f"write '{meant}'", path=(key,))
                    if meant
                    else fault
                )


def with_faults(found: Iterable[Fault], value: Any, handler: Callable[[Any], Any]) -> ValidationError:
    """The error that holds both what was found by hand and what validating the rest finds."""
    found = list(found)
    details = [_detail(fault) for fault in found]
    try:
        handler(value)
    except ValidationError as error:
        seen = {fault.path for fault in found}
        details += [_again(e) for e in error.errors(include_url=False) if e["loc"] not in seen]
    return ValidationError.from_exception_data("document", details)


def _detail(fault: Fault) -> InitErrorDetails:
    error = PydanticCustomError("fault", "{text}", {"text": fault.message, "fault": fault})
    return InitErrorDetails(type=error, loc=(), input=None)


def _again(error: Any) -> InitErrorDetails:
    kind: Any = error["type"]
    if kind in ("fault", "value_error"):
        kind = PydanticCustomError("fault", "{text}", {"text": error["msg"], "fault": fault_of(error)})
        return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"])
    return InitErrorDetails(type=kind, loc=error["loc"], input=error["input"], ctx=error.get("ctx", {}))


def fault_of(error: Any) -> Fault | Faults | None:
    """The `Fault` or `Faults` behind one entry of `ValidationError.errors()`, if there is one."""
    context = error.get("ctx", {})
    found = context.get("fault") or context.get("error")
    return found if isinstance(found, (Fault, Faults)) else None


def by_shape(mapping: str, other: str, sequence: str = "") -> Callable[[Any], str]:
    """A discriminator by the shape of the value, so that only one branch of a union reports errors.

    Args:
        mapping: tag of mappings and specs.
        other: tag of everything else.
        sequence: tag of lists; default: `other`.
    """

    def tag(value: Any) -> str:
        if isinstance(value, (dict, BaseModel)):
            return mapping
        return (sequence or other) if isinstance(value, (list, tuple)) else other

    return tag
