"""What the analysis of expressions hands about: issues, references, what a scope knows of a name.

The line of an issue counts within its text; whoever asked knows where the text stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from masflow.compiler.guards import At, Facts, Path
from masflow.compiler.inference import UNKNOWN
from masflow.spec.types import Type

__all__ = ["Env", "Finding", "Found", "Issue", "Reference", "Scope", "article", "dotted"]


@dataclass(frozen=True)
class Issue:
    """One thing wrong in a text; `line` counts from 1 within it."""

    code: str
    message: str
    fix: str
    line: int = 1


@dataclass(frozen=True)
class Found:
    """What a scope knows of a name."""

    type: Type
    note: str = ""
    """Why it may be null."""
    fault: tuple[str, str, str] | None = None
    """(code, message, fix): why it can't be named here."""
    guards: Facts = frozenset()
    """Facts any of which says that it isn't null."""


class Scope(Protocol):
    """The names that a text sees."""

    def find(self, name: str, entry: str | None = None) -> Found | None:
        """A bare name, or an entry of a container (`state.x`); None: there is none."""
        ...

    def container(self, name: str) -> str:
        """What the entries of a container are called (`state field`); "" when it is none."""
        ...

    def known(self, container: str = "") -> Iterable[str]: ...


@dataclass(frozen=True)
class Reference:
    """One use of a name with its fields."""

    path: Path
    guarded: bool
    """Whether what stands before the last field is known not to be null there, or null is allowed there."""
    printed: bool
    line: int


@dataclass
class Finding:
    """What the analysis of one text gives."""

    type: Type = UNKNOWN
    issues: list[Issue] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    note: str = ""
    """Why the value may be null, when it may."""


def article(type_: Type) -> str:
    """A type in words."""
    if type_.kind in ("choice", "str"):
        return "text"
    if type_.kind in ("list", "record"):
        return f"a {type_.kind}"
    return {"int": "a number", "float": "a number", "bool": "a bool", "null": "null"}.get(
        type_.kind, "unknown"
    )


def dotted(path: Path) -> str:
    return "".join(_step(key, i == 0) for i, key in enumerate(path))


def _step(key: str | int | At, is_first: bool) -> str:
    if isinstance(key, str):
        return key if is_first else f".{key}"
    return f"[{key}]" if isinstance(key, int) else f"[{dotted(key.path)}]"


@dataclass(frozen=True)
class Env:
    """Local names with their types, and the paths known not to be null."""

    local: Mapping[str, Type]
    facts: Facts

    def knowing(self, facts: Facts) -> Env:
        return self if facts <= self.facts else replace(self, facts=self.facts | facts)

    def binding(self, names: Mapping[str, Type]) -> Env:
        kept = frozenset(path for path in self.facts if path[0] not in names)
        return Env({**self.local, **names}, kept)
