"""Runs pieces of work beside each other, on threads of their own, a few a name.

Knows nothing of tools. Work is handed over in order and answered whenever somebody asks for it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Begun", "Lanes"]


class Begun:
    """Work that was handed over."""

    def __init__(self, work: Callable[[], Any]):
        self._work, self._over = work, threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self.is_awaited = False
        """Somebody has waited for it."""

    def run(self) -> None:
        with self:
            self._value = self._work()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Whatever the work raised, whoever asks for the result gets it."""
        self._error = error
        self._over.set()
        return True

    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self.is_awaited = True
        self._over.wait()

    def result(self) -> Any:
        """What the work gave; waits for it. Raises whatever it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


class _Lane:
    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Begun | None] = queue.SimpleQueue()
        self.threads = 0

    def __del__(self) -> None:
        for _ in range(self.threads):
            self.work.put(None)


class Lanes:
    """A queue a name, each with a few daemon threads that live as long as this object."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._pid = os.getpid()

    def begin(self, name: str, most: int, work: Callable[[], Any]) -> Begun:
        """Args: most: of this name's work that may run at the same time."""
        if self._pid != os.getpid():  # a process that was forked off has none of its parent's threads
            self.__init__()
        lane = self._lanes.setdefault(name, _Lane())
        begun = Begun(work)
        lane.work.put(begun)
        if lane.threads < most:
            lane.threads += 1
            threading.Thread(target=_serve, args=(lane.work,), daemon=True, name=f"masflow {name}").start()
        return begun


def _serve(work: queue.SimpleQueue[Begun | None]) -> None:
    while (begun := work.get()) is not None:
        begun.run()
        del begun
