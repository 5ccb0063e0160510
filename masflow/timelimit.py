"""Call a user's function, plain or async, with a time limit, from any thread.

Each calling thread keeps one daemon worker (so that a connection opened in a function lives on); a call that
runs out of time gives its worker up and ends it as far as Python can: code inside C can't be interrupted.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

__all__ = ["OutOfTime", "call_limited", "prints_aside"]


@contextmanager
def prints_aside(as_json: bool) -> Iterator[None]:
    """What users' functions print goes to standard error where standard output is for machines."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


class OutOfTime(Exception):
    """The function didn't return within its limit."""


class _Stop(BaseException):
    """Raised inside a worker that is given up; no `except Exception` of a user holds it."""


_READY = frozenset((type(None), bool, int, float, str, list, dict, tuple))
"""Types of results that nobody awaits."""


class _Job:
    """One call. As a context it hands whatever is raised over to the caller, whose `boundary` types it."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]):
        self.function, self.kwargs = function, kwargs
        self.done = threading.Lock()
        """Held until the call is over: half the cost of an Event."""
        self.done.acquire()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self, runner: asyncio.Runner) -> None:
        with self:
            value = self.function(**self.kwargs)
            if type(value) not in _READY and inspect.isawaitable(value):
                value = runner.run(_awaited(value))
            self.value = value

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        self.done.release()
        return True


async def _awaited(value: Any) -> Any:
    return await value


class _Worker:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(self.jobs,), daemon=True, name="masflow-user-code")
        self.thread.start()

    def end(self) -> None:
        """Stop a running job at its next Python instruction; the thread ends by itself afterwards."""
        ident = self.thread.ident
        if ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Stop))
        self.jobs.put(None)

    def __del__(self) -> None:
        self.jobs.put(None)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    try:
        with asyncio.Runner() as runner:
            while (job := jobs.get()) is not None:
                job.run(runner)
    except _Stop:
        return


_here = threading.local()


def _forget_workers() -> None:
    """A process that was forked off has none of its parent's threads."""
    global _here
    _here = threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


def call_limited(function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float) -> Any:
    """`function(**kwargs)`, awaited if it is async.

    Args:
        timeout_s: in seconds, counted from the call.
    Raises:
        OutOfTime: nothing came back in time.
        Exception: whatever the function raised, unchanged.
    """
    worker: _Worker | None = getattr(_here, "worker", None)
    if worker is None:
        worker = _here.worker = _Worker()
    job = _Job(function, kwargs)
    worker.jobs.put(job)
    if not job.done.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
        _here.worker = None
        worker.end()
        raise OutOfTime(f"no result within {timeout_s:g} s")
    if isinstance(job.error, Exception):
        raise job.error
    if job.error is not None:  # SystemExit, KeyboardInterrupt: a user's function may not end the run
        raise RuntimeError(f"ended with {type(job.error).__name__}: {job.error}") from job.error
    return job.value
