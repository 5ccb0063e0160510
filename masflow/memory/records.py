"""What memory is made of: records, what a step saw, what happened to whom. Knows neither files nor models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Event", "Experience", "Kind", "Memory", "Record", "task_key"]

Kind = Literal["inserted", "merged", "penalised", "decayed", "deleted", "evicted"]


@dataclass(frozen=True)
class Record:
    """One thing that worked: what was asked, and what was replied."""

    id: int
    """From 1, in its store; never used again."""
    situation: str
    """The prompt without memory."""
    strategy: str
    """The reply."""
    score: float
    """At step `scored`; decays from there on."""
    scored: int
    uses: int
    """Turns that recalled it."""
    created: int
    """Training step, as every time here."""
    last_used: int
    source: str
    """The turn's id."""
    task: str
    """`task_key` of the task that it comes from."""


@dataclass(frozen=True)
class Memory:
    """One store at one step: its live records and the rewards that it has seen."""

    name: str
    records: tuple[Record, ...] = ()
    """By id."""
    rewards: tuple[float, ...] = ()
    """Of the latest turns, the latest last; at most `window` of them."""
    next_id: int = 1


@dataclass(frozen=True)
class Experience:
    """One turn of a step. Made by the evolve stage; eaten by `evolve`."""

    turn: str
    """Its id."""
    situation: str
    strategy: str
    reward: float
    task: str
    """`task_key`."""
    recalled: tuple[int, ...] = ()
    """Ids of the records in its prompt."""
    is_whole: bool = True
    """False for a reply that can't be an example (malformed, or cut): it counts, and is never inserted."""


@dataclass(frozen=True)
class Event:
    """What happened to one record."""

    step: int
    store: str
    record: int
    kind: Kind
    turn: str
    """The turn that caused it; empty where none did."""
    score: float
    """Afterwards."""
    detail: str = ""


def task_key(task: Mapping[str, Any], hidden: Iterable[str] = ()) -> str:
    """What makes two rows the same task: the fields that roles may see, letter case and spaces left aside.

    A row's id won't do: rows repeat, and differ in columns that nobody asks about.

    Args:
        hidden: names of hidden fields (an answer).
    """
    left_out = set(hidden)
    seen = {name: _plain(value) for name, value in task.items() if name not in left_out}
    text = json.dumps(seen, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.casefold().split())
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
