"""A run's folder: one run at a time, its metrics file, and how a stop is asked for.

Knows neither models nor plans.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from masflow.errors import MasflowError, RunError
from masflow.runtime import checkpoints
from masflow.runtime.checkpoints import writing


class Interrupted(MasflowError):
    """Somebody asked the run to stop; raised between model calls, never inside an update."""


class StopFlag:
    """Set by SIGINT or SIGTERM; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def check(self) -> None:
        """Raises Interrupted once a stop was asked for."""
        if self.requested:
            raise Interrupted("stopped")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Take the signals while the block runs; in other threads than the main one do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class RunDir:
    """The folder of a run. Names in it are fixed; other programs rely on them."""

    command: ClassVar[int | None] = None
    """The process to stop instead of this one, where it runs for a command elsewhere."""

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.plan = self.path / "plan.json"
        self.experiment = self.path / "experiment.yaml"

    @contextmanager
    def held(self) -> Iterator[RunDir]:
        """Hold the folder for this process; the system lets go of it however the process ends.

        Raises:
            RunError: another process holds it.
        """
        with writing("the run's folder", self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = (
                    os.pread(handle, 32, 0).decode(errors="replace").partition(" ")[0].strip() or "unknown"
                )
                message = f"{self.path} is in use by another run (process {owner})"
                raise RunError(message, "wait for it, stop it, or choose another --out") from error
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{self.command or os.getpid()} {os.getpid()}\n".encode(), 0)
            checkpoints.clean(self.checkpoints)
            yield self
        finally:
            os.close(handle)

    def begun(self) -> bool:
        """True once a run began here, even if it left nothing behind."""
        return self.plan.exists()

    def used(self) -> bool:
        """True when a run left something here that another one would mix with."""
        return self.metrics_bytes() > 0 or checkpoints.latest(self.checkpoints) is not None

    def append(self, record: dict[str, Any]) -> None:
        """One line of metrics; other processes see it when this returns."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=str)
        with writing("metrics.jsonl", self.path), self.metrics.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def metrics_bytes(self) -> int:
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def sync_metrics(self) -> int:
        """Put the metrics on the disk, so that no checkpoint outlives them; their length in bytes."""
        if self.metrics.exists():
            with self.metrics.open("rb") as file:
                os.fsync(file.fileno())
        return self.metrics_bytes()

    def cut_metrics(self, length: int) -> None:
        """Drop what was written after the checkpoint that the run goes on from: it will be written again.

        Raises:
            RunError: less is there than the checkpoint was saved with, or lines that can't be read.
        """
        found = self.metrics_bytes()
        if found < length:
            message = f"{self.metrics} has {found} bytes, and had {length} when the checkpoint was saved"
            fix = "put the file back, or remove checkpoints until one is as old as the file"
            raise RunError(message, fix)
        if self.metrics.exists():
            with writing("metrics.jsonl", self.path):
                os.truncate(self.metrics, length)
            read_metrics(self.metrics)

    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that is still being written is left out.

    Raises:
        RunError: a line that isn't a record, with its number.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "kind" not in record:
                raise ValueError("it has no 'kind'")
        except ValueError as error:
            raise RunError(f"{path}:{number} isn't a record: {error}", "mend or remove the line") from error
        records.append(record)
    return records
