"""The tree of errors, the problem record that every check returns, and the one place that catches everything.

Knows nothing of YAML, plans or models; every other module imports from here.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

__all__ = [
    "EpisodeError",
    "MasflowError",
    "Problem",
    "RunError",
    "SpecError",
    "Where",
    "boundary",
    "closest",
    "unknown",
]


@dataclass(frozen=True)
class Where:
    """A place in a user's file. `line` counts from 1; 0 means unknown (Python builder)."""

    file: str = "<python>"
    line: int = 0
    path: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place} {self.path}".rstrip()


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong in a user's file: where, what with the known choices, and the fix."""

    file: str
    line: int
    path: str
    code: str
    """Stable kebab-case name, e.g. `unknown-role`; machines may rely on it."""
    message: str
    fix: str = ""

    @classmethod
    def at(cls, where: Where, code: str, message: str, fix: str = "") -> Problem:
        return cls(where.file, where.line, where.path, code, message, fix)

    def __str__(self) -> str:
        lines = [str(Where(self.file, self.line, self.path)), f"  {self.message}"]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class MasflowError(Exception):
    """Root of everything that masflow raises on purpose."""


class SpecError(MasflowError):
    """The user's files are wrong; holds every problem found, printed without a traceback."""

    def __init__(self, problems: Problem | Iterable[Problem]):
        found = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(found)
        self.problems: tuple[Problem, ...] = tuple(sorted(set(found)))

    def __str__(self) -> str:
        return "\n".join(str(p) for p in self.problems)


class EpisodeError(MasflowError):
    """One episode failed; recorded on its trajectory with a typed outcome, training goes on."""

    def __init__(self, outcome: str, message: str):
        super().__init__(outcome, message)
        self.outcome = outcome
        self.message = message

    def __str__(self) -> str:
        return f"{self.outcome}: {self.message}"


class RunError(MasflowError):
    """The run can't go on: what happened, and what to do about it."""

    def __init__(self, message: str, fix: str = ""):
        super().__init__(message, fix)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


MAX_TEXT = 1000
"""Characters of a user's exception that a message repeats."""


class Caught:
    """What `boundary` caught: `error` is None when the block succeeded."""

    def __init__(self, whose: str):
        self.whose = whose
        self.error: str | None = None
        self.detail = ""
        self.raised: Exception | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, MasflowError):
            return False
        text = _said(error)
        if len(text) > MAX_TEXT:
            text = f"{text[:MAX_TEXT]}…"
        self.error = f"{self.whose}: {type(error).__name__}: {text}"
        self.detail = traceback.format_exc()
        self.raised = error
        return True


def _said(error: Exception) -> str:
    """First line of an exception's text; a user's `__str__` may fail too."""
    with suppress(SystemExit):
        try:
            return next(iter(str(error).strip().splitlines()), "(no message)")
        except Exception:
            pass
    return "(its message can't be read)"


def boundary(whose: str) -> Caught:
    """Run user code as this context; an ordinary exception becomes text that says whose code it was.

    The only place that catches `Exception`. masflow's own errors pass through.

    Args:
        whose: the code that runs, for the message, e.g. `rewards/qa.py:token_f1`.
    Returns:
        A record whose `error` is `"<whose>: <Type>: <text>"` after a failure.
    """
    return Caught(whose)


def closest(value: str, known: Iterable[str]) -> str | None:
    """The known word that looks most like `value`, or None when nothing is near; of equally near ones, one
    of the same letters."""
    found = difflib.get_close_matches(str(value), list(known), n=3, cutoff=0.6)
    swapped = [word for word in found if sorted(word) == sorted(str(value))]
    return (swapped or found or [None])[0]


def unknown(where: Where, kind: str, value: object, known: Iterable[str], *, code: str = "") -> Problem:
    """The problem of a name that isn't one of the known ones, with the nearest as the fix."""
    choices = sorted(set(map(str, known)))
    near = closest(str(value), choices)
    listed = ", ".join(choices[:24]) + (", …" if len(choices) > 24 else "") if choices else "(none)"
    fix = f"write '{near}'" if near else f"use a known {kind}"
    return Problem.at(
        where, code or f"unknown-{kind.replace(' ', '-')}", f"unknown {kind} '{value}'; known: {listed}", fix
    )
