"""When Python looks for garbage: hardly while a command starts, and never again among what came to stay.

A start makes a million objects, nearly all of them for good; looking through them again and again is a sixth
of its time, and later of every full collection.
"""

from __future__ import annotations

import gc

STARTING = 200_000
"""New objects between two looks while a command starts."""

_usual: list[tuple[int, int, int]] = []


def starting() -> None:
    """Look seldom from now on. For a program's own process only: a library leaves its user's alone."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(STARTING, *_usual[0][1:])


def started() -> None:
    """Everything is loaded: what is there stays, and garbage is looked for as usual among what comes."""
    if _usual:
        gc.freeze()
        gc.set_threshold(*_usual.pop())
