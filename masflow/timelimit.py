"""Call a user's function, plain or async, with a time limit, from any thread.

Each calling thread keeps one daemon worker (so that a connection opened in a function lives on); a call that
runs out of time gives its worker up and ends it as far as Python can: code inside C can't be interrupted.
Handing a call over costs more than most functions take; work that makes many calls can go to the worker as a
whole (`supervised`) and make them there at once, under the same limits.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

__all__ = ["OutOfTime", "call_limited", "prints_aside", "supervised", "tell"]


@contextmanager
def prints_aside(as_json: bool) -> Iterator[None]:
    """What users' functions print goes to standard error where standard output is for machines."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield


LOOK_S = 0.05
"""How often supervised work is looked at."""
Record = Callable[[str], None]


class OutOfTime(Exception):
    """The function didn't return within its limit."""


class _Stop(BaseException):
    """Raised inside a worker that is given up; no `except Exception` of a user holds it."""


_READY = frozenset((type(None), bool, int, float, str, list, dict, tuple))
"""Types of results that nobody awaits."""


class _Outcome:
    """As a context: keeps whatever is raised in it, for the caller, whose `boundary` types it."""

    error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


class _Job(_Outcome):
    """One call handed over, or supervised work and the call that it is making."""

    supervised = False
    runner: asyncio.Runner
    record: Record | None = None
    """What a call that is made now tells if it runs out of time."""
    timeout_s = 0.0
    deadline = 0.0
    """Of the call under way; set before `open`."""
    open: threading.Lock | None = None
    """Whoever takes it ends that call: the work, or the thread that waits for it."""

    def __init__(self, function: Callable[..., Any], kwargs: dict[str, Any]):
        self.function, self.kwargs = function, kwargs
        self.done = threading.Lock()
        """Held until the job is over: half the cost of an Event."""
        self.done.acquire()
        self.value: Any = None

    def run(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        _here.job = self if self.supervised else None
        with self:
            self.value = _called(self.function, self.kwargs, runner)
        _here.job = None
        self.done.release()


def _called(function: Callable[..., Any], kwargs: dict[str, Any], runner: asyncio.Runner) -> Any:
    value = function(**kwargs)
    if type(value) not in _READY and inspect.isawaitable(value):
        return runner.run(_awaited(value))
    return value


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
    above: _Job | None = getattr(_here, "job", None)
    if above is not None and above.record is not None:
        return _at_once(above, function, kwargs, timeout_s)
    worker = _worker()
    job = _Job(function, kwargs)
    worker.jobs.put(job)
    if not job.done.acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
        _here.worker = None
        worker.end()
        raise OutOfTime(_late(timeout_s))
    _raise(job.error)
    return job.value


def _late(timeout_s: float) -> str:
    return f"no result within {timeout_s:g} s"


def _raise(error: BaseException | None) -> None:
    if isinstance(error, Exception):
        raise error
    if error is not None:  # SystemExit, KeyboardInterrupt: a user's function may not end the run
        raise RuntimeError(f"ended with {type(error).__name__}: {error}") from error


def _worker() -> _Worker:
    """This thread's."""
    worker: _Worker | None = getattr(_here, "worker", None)
    if worker is None:
        worker = _here.worker = _Worker()
    return worker


def _at_once(job: _Job, function: Callable[..., Any], kwargs: dict[str, Any], timeout_s: float) -> Any:
    job.timeout_s, job.deadline = timeout_s, time.monotonic() + timeout_s
    mine = job.open = threading.Lock()
    _here.job = None  # what the function itself calls is its own business
    value, outcome = None, _Outcome()
    with outcome:
        value = _called(function, kwargs, job.runner)
    if not mine.acquire(blocking=False):
        raise _Stop
    _here.job, job.open = job, None
    if outcome.error is not None:
        _raise(outcome.error)
    return value


def tell(record: Record | None) -> None:
    """In supervised work: what the thread that waits tells if a call that is made from now on runs out of
    time; None: calls are handed over again."""
    job: _Job | None = getattr(_here, "job", None)
    if job is not None:
        job.record = record


def supervised(work: Callable[[], None]) -> None:
    """`work()` on this thread's worker, where calls are made at once after `tell`.

    When one of them runs out of time, the work is given up where it stands, as far as Python can.

    Raises:
        OutOfTime: a call did, and its record was told; do the work again from what it has left.
        Exception: whatever the work raised, unchanged.
    """
    worker = _worker()
    job = _Job(work, {})
    job.supervised = True
    worker.jobs.put(job)
    while not job.done.acquire(timeout=LOOK_S):
        call = job.open
        if call is not None and time.monotonic() > job.deadline and call.acquire(blocking=False):
            _here.worker = None
            worker.end()
            late = _late(job.timeout_s)
            if job.record is not None:
                job.record(late)
            raise OutOfTime(late)
    _raise(job.error)
