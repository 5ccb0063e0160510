"""The controller as an actor, and its mailbox: a run that goes on in another process and looks the same here.

Events, warnings, what user code prints, and the request to stop go through the mailbox; errors come back as
they were raised. Knows no Ray.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import Any

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.runtime.backend import Actor, Ask, Backend, Died
from masflow.runtime.controller import OnEvent
from masflow.runtime.controller import train as train_here
from masflow.runtime.resuming import found_state
from masflow.runtime.rundir import RunDir, StopFlag
from masflow.runtime.team import backend_of

__all__ = ["Here", "Hub", "Mailbox", "RemoteStop", "train"]

_LOOK_EVERY_S = 0.2
_ANSWER_S = 30.0
"""A mailbox does next to nothing."""
_FOREIGN = ("RAY_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that belong to a process and not to the person who started the run."""


class Mailbox:
    """Events on their way to whoever watches, and the wish to stop on its way to the controller."""

    def __init__(self) -> None:
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._stop = False

    def put(self, events: list[tuple[str, dict[str, Any]]]) -> bool:
        """Add events, in order; whether a stop is wanted."""
        self._events += events
        return self._stop

    def take(self, stop: bool) -> list[tuple[str, dict[str, Any]]]:
        """All events since the last call. Args: stop: ask the controller to stop."""
        self._stop = self._stop or stop
        taken, self._events = self._events, []
        return taken


@dataclass(frozen=True)
class Here:
    """Where a command runs, so that its controller finds the same files, modules and keys."""

    folder: str
    path: tuple[str, ...]
    variables: dict[str, str]
    process: int

    @classmethod
    def now(cls) -> Here:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        return cls(os.getcwd(), tuple(sys.path), variables, os.getpid())

    def enter(self) -> None:
        """Make this process stand there too."""
        os.chdir(self.folder)
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        os.environ.update(self.variables)
        RunDir.command = self.process


class RemoteStop(StopFlag):
    """A stop that somebody asks for through the mailbox; signals are theirs, not this process's."""

    def __init__(self, post: Post):
        super().__init__()
        self._post = post

    def check(self) -> None:
        self.requested = self._post.look()
        super().check()

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        yield self


class Post:
    """The controller's end of a mailbox: sends a few times a second, not once an event."""

    def __init__(self, mailbox: Actor):
        self._mailbox = mailbox
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._sent_at = 0.0
        self._stop = False

    def event(self, kind: str, facts: dict[str, Any]) -> None:
        self._events.append((kind, facts))
        self.look()

    def look(self) -> bool:
        """Send what is due; whether a stop is wanted, at most a fifth of a second late."""
        if time.monotonic() - self._sent_at > _LOOK_EVERY_S:
            self.flush()
        return self._stop

    def flush(self) -> None:
        events, self._events = self._events, []
        self._stop = self._mailbox.call("put", events).get(_ANSWER_S) or self._stop
        self._sent_at = time.monotonic()


class _Lines(TextIOBase):
    """A stream whose text becomes events."""

    def __init__(self, post: Post, kind: str):
        self._post, self._kind = post, kind

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text:
            self._post.event(self._kind, {"text": text})
        return len(text)


class Hub:
    """Runs a controller for somebody else."""

    def __init__(self, mailbox: Actor, here: Here):
        here.enter()
        self._post = Post(mailbox)

    def ready(self) -> None:
        """Answers once it is there."""

    def train(
        self, plan: Plan, out: Path, resume: bool, only_warm_start: bool, experiment_text: str
    ) -> dict[str, Any]:
        """As `controller.train`."""
        post = self._post
        with redirect_stdout(_Lines(post, "stdout")), redirect_stderr(_Lines(post, "stderr")):
            try:
                return train_here(
                    plan,
                    out,
                    resume,
                    post.event,
                    stop=RemoteStop(post),
                    only_warm_start=only_warm_start,
                    experiment_text=experiment_text,
                )
            finally:
                post.flush()


def train(
    plan: Plan,
    out: Path,
    resume: bool = False,
    on_event: OnEvent = lambda kind, facts: None,
    *,
    stop: StopFlag | None = None,
    only_warm_start: bool = False,
    experiment_text: str = "",
    backend: Backend | None = None,
) -> dict[str, Any]:
    """As `controller.train`, in an actor of the plan's backend on this machine; in one process directly.

    What user code prints there is printed here.

    Raises:
        RunError: the controller's process died; as `controller.train`.
    """
    stop = stop or StopFlag()
    options = {"only_warm_start": only_warm_start, "experiment_text": experiment_text}
    if plan.runtime.backend == "local" and backend is None:
        return train_here(plan, out, resume, on_event, stop=stop, **options)
    found_state(plan, RunDir(out), resume, only_warm_start)
    with stop.listening():
        backend = backend or backend_of(plan.runtime)
        try:
            mailbox = backend.spawn("mailbox", Mailbox, ask=Ask(here=True))
            hub = backend.spawn("controller", Hub, mailbox, Here.now(), ask=Ask(here=True, threads=1))
            for begun in (mailbox.call("take", False), hub.call("ready")):
                begun.get(plan.runtime.start_timeout_s)
            return _watch(backend, mailbox, hub, (plan, out.absolute(), resume), options, on_event, stop)
        finally:
            backend.close()


def _watch(
    backend: Backend,
    mailbox: Actor,
    hub: Actor,
    run: tuple[Plan, Path, bool],
    options: dict[str, Any],
    on_event: OnEvent,
    stop: StopFlag,
) -> dict[str, Any]:
    """Pass events on until the run ends; its result."""

    def pump() -> None:
        for kind, facts in mailbox.call("take", stop.requested).get(_ANSWER_S):
            if kind in ("stdout", "stderr"):
                print(facts["text"], end="", file=getattr(sys, kind), flush=True)
            else:
                on_event(kind, facts)

    result = hub.call("train", *run, *options.values())
    try:
        while not backend.wait([result], _LOOK_EVERY_S):
            pump()
        pump()
        return result.get(_ANSWER_S)
    except Died as death:
        raise RunError(
            f"{death}; the run has stopped", f"go on from the last checkpoint: --resume --out {run[1]}"
        ) from death
