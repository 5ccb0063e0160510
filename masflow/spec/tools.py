"""The built-in tools as declarations: settings, parameters, and where the code stands.

Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, ValidationError

from masflow.spec.base import Spec
from masflow.spec.types import STR, Type

__all__ = ["BUILTINS", "Bm25Settings", "Builtin", "CalculatorSettings", "settings_problems"]


class Bm25Settings(Spec):
    """Search over a fixed corpus of passages."""

    corpus: str
    """A `.jsonl` or `.jsonl.gz` file, one passage a line."""
    top_k: int = Field(5, ge=1)
    """Passages returned at most; those that share no term with the query never are."""
    k1: float = Field(1.5, ge=0)
    b: float = Field(0.75, ge=0, le=1)
    unique_terms: bool = False
    """A term that the query repeats counts once, so that repeating it can't be learned as a trick."""
    text_field: str = "text"
    title_field: str | None = None
    """A field that is searched together with the text, such as a page's title."""
    id_field: str = "id"


class CalculatorSettings(Spec):
    """Arithmetic; there is nothing to set."""


@dataclass(frozen=True)
class Builtin:
    """One built-in: what may be set, what may be passed, which module answers."""

    name: str
    module: str
    """Has `make(settings) -> callable(**args)`."""
    settings: type[Spec]
    parameters: dict[str, Type]
    summary: str
    data_settings: tuple[str, ...] = ()
    """Settings that name files: paths are resolved and their contents hashed."""


BUILTINS: dict[str, Builtin] = {
    "bm25": Builtin(
        "bm25",
        "masflow.tools.search",
        Bm25Settings,
        {"query": STR},
        "Search the corpus for passages that share words with the query.",
        ("corpus",),
    ),
    "calculator": Builtin(
        "calculator",
        "masflow.tools.calculator",
        CalculatorSettings,
        {"expression": STR},
        "Work out an arithmetic expression.",
    ),
}


def settings_problems(name: str, settings: dict[str, object]) -> list[str]:
    """What is wrong with a built-in's settings, one sentence each; empty when nothing is."""
    try:
        BUILTINS[name].settings.model_validate(settings)
    except ValidationError as error:
        known = ", ".join(BUILTINS[name].settings.model_fields) or "(none)"
        return [
            f"setting '{'.'.join(map(str, e['loc']))}' of {name}: {e['msg'].lower()}; known settings: {known}"
            for e in error.errors()
        ]
    return []
