"""The built-in tools as declarations: settings, parameters, and where the code stands.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from masflow.spec.base import Fault, Faults, Spec, fault_of
from masflow.spec.problems import translated
from masflow.spec.retrieval import DenseSettings, HttpSettings
from masflow.spec.types import STR, Type, parse_type

__all__ = [
    "BUILTINS",
    "Bm25Settings",
    "Builtin",
    "CalculatorSettings",
    "DenseSettings",
    "HttpSettings",
    "PythonSettings",
    "settings_faults",
    "settings_problems",
    "usual_at_once",
]


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


class PythonSettings(Spec):
    """Limits of one untrusted program, and of the tests that judge it."""

    wall_s: float = Field(default=25.0, gt=0)
    """Of the whole call."""
    test_s: float = Field(default=5.0, gt=0)
    """Of loading the program, and of each test."""
    cpu_s: int = Field(default=10, ge=1)
    """Of each process."""
    memory_mb: int = Field(default=512, ge=64)
    """Of each process, and of all together."""
    processes: int = Field(default=16, ge=2)
    """At once, threads included."""
    tmpfs_mb: int = Field(default=16, ge=1)
    """Of files, which live in memory."""
    file_mb: int = Field(default=8, ge=1)
    """Of one file."""
    output_kb: int = Field(default=64, ge=1)
    """Of standard output and error each, what is kept; sixteen times as much ends the program."""


@dataclass(frozen=True)
class Builtin:
    """One built-in: what may be set, what may be passed, which module answers."""

    name: str
    module: str
    """Has `make(settings) -> callable(**args)`."""
    settings: type[Spec]
    parameters: dict[str, Type]
    summary: str
    optional: dict[str, Type] = field(default_factory=dict)
    """What nodes and programs may pass besides; roles aren't offered it."""
    data_settings: tuple[str, ...] = ()
    """Settings that name files: paths are resolved and their contents hashed."""
    model_settings: tuple[str, ...] = ()
    """Settings that name models: folders are resolved and hashed, ids stay."""
    placing: tuple[str, ...] = ()
    """Settings that say where and how fast it runs, and nothing of what it answers."""
    only_computes: bool = False
    """It waits for nothing: calls beside each other gain no time."""


TEXTS = parse_type(["str"])
BUILTINS: dict[str, Builtin] = {
    "bm25": Builtin(
        "bm25",
        "masflow.tools.search",
        Bm25Settings,
        {"query": STR},
        "Search the corpus for passages that share words with the query.",
        data_settings=("corpus",),
        only_computes=True,
    ),
    "dense": Builtin(
        "dense",
        "masflow.tools.dense",
        DenseSettings,
        {"query": STR},
        "Search the corpus for passages that mean something near to the query.",
        data_settings=("corpus",),
        model_settings=("model",),
        placing=("device",),
        only_computes=True,
    ),
    "http": Builtin(
        "http",
        "masflow.tools.http",
        HttpSettings,
        {"query": STR},
        "Search for passages that fit the query.",
        placing=(
            "urls",
            "try_s",
            "retries",
            "rest_s",
            "max_concurrent",
            "per_minute",
            "max_bytes",
            "key_env",
        ),
    ),
    "calculator": Builtin(
        "calculator",
        "masflow.tools.calculator",
        CalculatorSettings,
        {"expression": STR},
        "Work out an arithmetic expression.",
        only_computes=True,
    ),
    "python": Builtin(
        "python",
        "masflow.tools.sandbox",
        PythonSettings,
        {"code": STR},
        "Run a Python program and give what it prints.",
        {"tests": TEXTS, "imports": TEXTS, "stdin": STR},
    ),
}


USUAL_AT_ONCE = 8
PROGRAMS_AT_ONCE = 4


def usual_at_once(use: str, settings: Mapping[str, Any]) -> int:
    """Calls of a tool that may run beside each other where its user says nothing of it."""
    if use in BUILTINS and BUILTINS[use].only_computes:
        return 1
    if use == "python":
        return PROGRAMS_AT_ONCE
    wanted = settings.get("max_concurrent") if use == "http" else None
    return wanted if isinstance(wanted, int) and wanted > 0 else USUAL_AT_ONCE


MAY_HOLD_A_KEY = (("urls",), ("headers",), ("params",), ("body",), ("key_env",))
"""Settings whose values are never repeated."""


def settings_faults(name: str, settings: dict[str, object]) -> list[Fault]:
    """What is wrong with a built-in's settings, each with its code and fix; empty when nothing is."""
    found: list[Fault] = []
    try:
        BUILTINS[name].settings.model_validate(settings)
    except ValidationError as error:
        known = ", ".join(BUILTINS[name].settings.model_fields) or "(none)"
        for entry in error.errors():
            own = fault_of(entry)
            if own is not None:
                faults = own.faults if isinstance(own, Faults) else (own,)
                found += [fault.below(*entry["loc"]) for fault in faults]
                continue
            if entry["type"] != "missing" and entry["loc"][:1] in MAY_HOLD_A_KEY:
                found.append(Fault(entry["msg"].lower(), code="tool-setting", path=entry["loc"]))
                continue
            found.append(translated(entry, entry["loc"]).below(*entry["loc"]))
        for i, fault in enumerate(found):
            place = ".".join(map(str, fault.path))
            whose = f"setting '{place}' of {name}" if place else f"settings of {name}"
            message = f"{whose}: {fault.message}"
            if "known:" not in message:
                message += f"; known settings: {known}"
            fix = fault.fix or "correct the setting"
            found[i] = Fault(message, code="tool-setting", fix=fix, path=fault.path)
    return found


def settings_problems(name: str, settings: dict[str, object]) -> list[str]:
    """What is wrong with a built-in's settings, one sentence each; empty when nothing is."""
    return [fault.message for fault in settings_faults(name, settings)]
