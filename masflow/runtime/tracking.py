"""Trackers of a run: its records as scalars for TensorBoard and Weights & Biases.

They follow the records of metrics.jsonl and change nothing: one that fails is told of once, and left out.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from masflow.compiler.plan import Plan
from masflow.errors import RunError, boundary
from masflow.runtime.checkpoints import RunState, put_text
from masflow.spec.runtime import Tracking, Wandb

__all__ = ["Trackers", "require", "scalars"]

CLOSE_TIMEOUT_S = 60.0
"""How long a tracker may take to send its last records."""


class Tracker(Protocol):
    """One place that scalars go to."""

    name: str

    def log(self, kind: str, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def require(tracking: Tracking) -> None:
    """Raises RunError when a package is missing; asked before anything is loaded."""
    for name, wanted in (("tensorboard", tracking.tensorboard), ("wandb", tracking.wandb is not None)):
        if wanted and find_spec(name) is None:
            message = f"tracking.{name} needs the package '{name}', which isn't installed"
            raise RunError(message, f"pip install 'masflow[{name}]', or leave it out of the runtime")


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by their names, as `train/rewards/f1`."""

    def walk(value: Any, name: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, part in value.items():
                yield from walk(part, f"{name}/{key}")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)

    return dict(walk({k: v for k, v in record.items() if k != "step"}, record["kind"]))


class Trackers:
    """The trackers that a plan's runtime names, in one run's folder."""

    def __init__(self, plan: Plan, folder: Path, state: RunState, resumed: bool):
        """
        Args:
            state: where the run begins; what was tracked beyond it is taken back.
        Raises:
            RunError: a tracker can't begin.
        """
        spec = plan.runtime.tracking
        self._running: list[Tracker] = []
        if spec.tensorboard:
            with _beginning("TensorBoard", "leave tracking.tensorboard out"):
                self._running.append(
                    TensorBoard(folder / "tensorboard", first_steps(state) if resumed else {})
                )
        if spec.wandb is not None:
            fix = "log in with `wandb login`, set WANDB_MODE=offline, or leave tracking.wandb out"
            with _beginning("Weights & Biases", fix):
                self._running.append(WeightsAndBiases(spec.wandb, folder, facts(plan)))

    def record(self, record: dict[str, Any]) -> list[str]:
        """Send a record to each tracker; what went wrong, of trackers that are left out from now on."""
        values = scalars(record)
        return self._each(lambda tracker: tracker.log(record["kind"], record["step"], values))

    def close(self) -> list[str]:
        """Send what is left. A tracker gets a minute for it."""
        lost = self._each(_close)
        self._running = []
        return lost

    def _each(self, act: Callable[[Tracker], None]) -> list[str]:
        lost = []
        for tracker in list(self._running):
            with boundary(tracker.name) as caught:
                act(tracker)
            if caught.error:
                self._running.remove(tracker)
                lost.append(f"{caught.error}; the run goes on without it")
        return lost


@contextmanager
def _beginning(name: str, fix: str) -> Iterator[None]:
    """Raises RunError for whatever keeps a tracker from beginning."""
    with boundary(name) as caught:
        yield
    if caught.error:
        raise RunError(f"{caught.error}; nothing was trained", fix)


def _close(tracker: Tracker) -> None:
    """Raises TimeoutError when it isn't done in time; it may go on as long as this process lives."""
    failed: list[str] = []

    def close() -> None:
        with boundary(tracker.name) as caught:
            tracker.close()
        if caught.error:
            failed.append(caught.error)

    thread = Thread(target=close, name=f"close {tracker.name}", daemon=True)
    thread.start()
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        raise TimeoutError(f"its last records are not sent after {CLOSE_TIMEOUT_S:.0f} s")
    if failed:
        raise OSError(failed[0])


def first_steps(state: RunState) -> dict[str, int]:
    """Kind of record → the first step that a resumed run will record; later ones were taken back."""
    return {
        "warm_start": state.warm_step + 1,
        "train": state.step + 1,
        "eval": state.step + (str(state.step) in state.evals),
    }


def facts(plan: Plan) -> dict[str, Any]:
    """What a tracker shows of a run beside its numbers."""
    return {
        "workflow": plan.root,
        "digest": plan.digest,
        "models": {m.name: {"train": m.train, "roles": list(m.roles)} for m in plan.models},
        "algorithm": plan.algorithm.model_dump(mode="json"),
        "train": plan.train.model_dump(mode="json"),
        "warm_start": plan.warm_start.model_dump(mode="json") if plan.warm_start else None,
    }


class TensorBoard:
    """Event files, a folder a kind of record: a resumed run takes back each kind from where it goes on."""

    name = "TensorBoard"

    def __init__(self, folder: Path, first: dict[str, int]):
        """Args: first: kind → events from this step on are hidden, whoever wrote them; none in a new run."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter
        self._folder, self._first = folder, first
        self._open: dict[str, Any] = {}

    def log(self, kind: str, step: int, values: dict[str, float]) -> None:
        if kind not in self._open:
            self._open[kind] = self._writer(str(self._folder / kind), purge_step=self._first.get(kind))
        for name, value in values.items():
            self._open[kind].add_scalar(name, value, step)
        self._open[kind].flush()

    def close(self) -> None:
        for writer in self._open.values():
            writer.close()


class WeightsAndBiases:
    """A run there that stays the same when this one is resumed: its id is kept in the run's folder.

    What was sent can't be taken back; so a step that is done again isn't sent again.
    """

    name = "Weights & Biases"

    def __init__(self, spec: Wandb, folder: Path, config: dict[str, Any]):
        wandb: Any = import_module("wandb")
        self._file = folder / "wandb.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._id: str = known.get("id") or uuid.uuid4().hex[:12]
        self._sent: dict[str, int] = known.get("sent", {})
        is_seed = re.fullmatch(r"seed_\d+", folder.name) is not None
        self._run = wandb.init(
            project=spec.project,
            entity=spec.entity,
            group=spec.group or (folder.parent.name if is_seed else None),
            name=spec.name or (f"{folder.parent.name}/{folder.name}" if is_seed else folder.name),
            tags=spec.tags,
            id=self._id,
            resume="allow",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        for kind in ("warm_start", "train", "eval"):
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        self._keep()

    def log(self, kind: str, step: int, values: dict[str, float]) -> None:
        if step <= self._sent.get(kind, -1):
            return
        self._run.log({**values, f"{kind}/step": step})
        self._sent[kind] = step
        self._keep()

    def _keep(self) -> None:
        put_text(self._file, json.dumps({"id": self._id, "sent": self._sent}))

    def close(self) -> None:
        self._run.finish()
