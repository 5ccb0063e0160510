"""The registry of algorithms: presets of published settings over orthogonal operators.

An algorithm is a `Preset` in a file of its own, found by name here or in the entry-point group
`masflow.algorithms`. It holds no run-time state; torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from masflow.errors import Where, boundary, closest
from masflow.spec.base import Spec
from masflow.spec.experiment import ALGORITHMS, Algorithm
from masflow.spec.problems import problems_of

__all__ = ["BUILT_IN", "GROUP", "Facts", "Preset", "Refusal", "filled", "known_algorithms", "preset_of"]

GROUP = "masflow.algorithms"


@dataclass(frozen=True)
class Facts:
    """What a preset may judge a pair by: everything is known before a plan stands."""

    algorithm: Algorithm
    """Resolved: the preset's values filled in."""
    given: frozenset[str]
    """Fields of `algorithm:` that the user wrote."""
    tasks_per_step: int = 1
    credit: str | None = None
    """The workflow's; None where the workflow has problems of its own."""
    passes: tuple[str, ...] = ()
    """Names of the experiment's passes."""
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Trained policy → the qualified members that it plays."""
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Trained model → its policies."""
    individual: tuple[str, ...] = ()
    """Rewards that count and don't pay all turns alike; `well_formed` aside."""
    steps: int = 0
    """Of the run."""


@dataclass(frozen=True)
class Refusal:
    """A pair that is known to be wrong."""

    field: str
    """The key below `algorithm:` that is at fault."""
    message: str
    """What goes wrong, and why."""
    fix: str
    code: str = "wrong-pair"


def _nothing(facts: Facts) -> Iterator[Refusal]:
    yield from ()


@dataclass(frozen=True)
class Preset:
    """A published algorithm as values of `algorithm:`'s fields, and what can't go with it."""

    name: str
    paper: str
    """Authors, year, arXiv number, equation."""
    says: str
    """What it does differently, in half a sentence."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Published defaults of `masflow.spec.experiment.Algorithm`; the user's words win."""
    passes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Passes that belong to it, with their settings; where the experiment names one, its own word wins."""
    fixed: tuple[str, ...] = ()
    """Fields that the user may not change: it would be another algorithm."""
    refuse: Callable[[Facts], Iterator[Refusal]] = _nothing
    """Wrong pairs of this algorithm; those of any algorithm stand in `algorithms/wrong_pairs.py`."""
    differs: str = ""
    """Where the default here isn't the paper's, or the paper gives none."""


BUILT_IN: dict[str, Preset] = {}
"""Presets beside those of this package, by name."""
COMMON: Mapping[str, Any] = {
    "samples": 8,
    "group": "task_role_path",
    "advantage": "group_norm",
    "ratio": "token",
    "clip": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "updates_per_step": 1,
    "epochs": 1,
    "turn_loss": "mean",
    "weight": "episode",
}
"""What holds where neither the user nor a preset says anything."""


@cache
def _own() -> Mapping[str, Preset]:
    return {name: import_module(f"masflow.algorithms.{name}").PRESET for name in ALGORITHMS}


def known_algorithms() -> Mapping[str, Preset]:
    """Built-in presets and those that installed packages offer, by name."""
    found = {**_own(), **BUILT_IN}
    for entry in entry_points(group=GROUP):
        if entry.name not in found:
            found[entry.name] = _offered(entry)
    return found


def _offered(entry: EntryPoint) -> Preset:
    """A package's preset, under the entry point's name, its values checked as if a user had written them.
    One that can't be used refuses every experiment that names it, and no other one."""
    preset = None
    with boundary(entry.value) as caught:
        preset = entry.load()
    if caught.error:
        return _unusable(entry, caught.error)
    if not isinstance(preset, Preset):
        return _unusable(
            entry, f"{entry.value} is a {type(preset).__name__}, not a masflow.algorithms.Preset"
        )
    if odd := [name for name in preset.fixed if name not in preset.fields]:
        return _unusable(entry, f"'fixed' names '{odd[0]}', and 'fields' gives it no value")
    try:
        values = Algorithm.model_validate({**preset.fields, "use": entry.name})
    except ValidationError as error:
        found = problems_of(error, dict(preset.fields), lambda *_: Where(entry.value), ())
        return _unusable(entry, found[0].message)
    fields = {name: getattr(values, name) for name in preset.fields}
    return replace(preset, name=entry.name, fields=fields, refuse=partial(_refused, entry, preset.refuse))


def _unusable(entry: EntryPoint, why: str) -> Preset:
    def refuse(facts: Facts) -> Iterator[Refusal]:
        message = f"algorithm '{entry.name}' ({entry.value}, of an installed package) can't be used: {why}"
        yield Refusal("use", message, "repair that package, or choose another 'use'", "bad-algorithm")

    return Preset(entry.name, paper="", says=f"can't be used: {why}", refuse=refuse)


def _refused(entry: EntryPoint, own: Callable[[Facts], Iterator[Refusal]], facts: Facts) -> Iterator[Refusal]:
    found: list[Refusal] = []
    with boundary(f"{entry.value}, refuse") as caught:
        found.extend(own(facts))
    yield from found
    if caught.error:
        yield from _unusable(entry, caught.error).refuse(facts)


def preset_of(name: str) -> Preset:
    """The preset of a name.

    Raises:
        KeyError: nobody offers it.
    """
    own = {**_own(), **BUILT_IN}
    known = own if name in own else known_algorithms()  # a look at installed packages takes 10 ms
    if name not in known:
        near = closest(name, known)
        raise KeyError(f"unknown algorithm '{name}'" + (f"; did you mean '{near}'?" if near else ""))
    return known[name]


def filled(algorithm: Algorithm) -> Algorithm:
    """What the user left open as the preset has it, else as `COMMON` has it; filled twice is the same."""
    values = {**COMMON, **preset_of(algorithm.use).fields}
    said = algorithm.model_fields_set
    missing = {
        name: value
        for name, value in values.items()
        if getattr(algorithm, name) is None or (name not in COMMON and name not in said)
    }
    for name, value in values.items():  # of a part with fields of its own, those that are said
        own = getattr(algorithm, name)
        if isinstance(own, Spec) and isinstance(value, Spec):
            said_there = {key: getattr(own, key) for key in own.model_fields_set}
            missing[name] = value.model_copy(update=said_there)
    return algorithm.model_copy(update=missing)
