"""Plain classes that the tests put into processes of Ray. No torch: they start fast."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import Problem, RunError, SpecError
from masflow.models.engine import Request
from masflow.models.experience import Row
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.backend import Actor
from masflow.runtime.messages import Answer, Delivery, Part


class Echo:
    """Says what it is told, in order."""

    def __init__(self, fails: str = ""):
        self.told: list[Any] = []
        if fails:
            raise RunError(fails, "mend it")

    def say(self, value: Any) -> Any:
        self.told.append(value)
        return value

    def all(self) -> list[Any]:
        return self.told

    def zeros(self, size: int) -> np.ndarray:
        return np.zeros(size, dtype=np.uint8)

    def size_of(self, array: np.ndarray) -> int:
        return array.nbytes

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def compute(self, seconds: float) -> int:
        """Counts for so long."""
        until, count = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            count += 1
        return count

    def fail(self, kind: str) -> None:
        if kind == "run":
            raise RunError("it broke", "mend it")
        if kind == "spec":
            raise SpecError(Problem("a.yaml", 3, "x", "some-code", "wrong", "right"))
        if kind == "disk":
            raise OSError(28, "No space left on device", "/some/file")
        raise ZeroDivisionError("a bug")


class ScriptedWorker:
    """What a model group needs of a worker, speaking a script at once, without a model. A turn is a row."""

    def __init__(self, model: ModelIR, plan: Plan, run_dir: Path, store: Actor, part: Part):
        self.part, self.store = part, store
        self.engine = ScriptedEngine({"*": ["a short reply"]})
        self.versions_: dict[str, int] = {policy.name: 0 for policy in model.policies}

    def ready(self) -> None:
        """It is."""

    def pid(self) -> int:
        return os.getpid()

    def generate(self, requests: Sequence[Request]) -> Answer:
        replies = self.engine.generate(requests)
        self.engine.requests.clear()
        rows = [
            Row(r.turn_id, r.policy, (1, 2, 3), (4, 5, 6), (-0.5,) * 3, 0, "ask", "a short reply")
            for r in requests
        ]
        self.store.call("add", rows).get(self.part.timeout_s)
        return Answer(replies, len(replies), 1, 0)

    def update(self, policy: str, items: Sequence[Any], *args: Any) -> dict[str, float]:
        """Takes half a second, and says when."""
        began = time.time()
        time.sleep(0.5)
        self.versions_[policy] += 1
        return {"began": began, "ended": time.time(), "staleness": 0.0}

    def prove(self, policy: str) -> Delivery:
        return Delivery(policy, self.versions_[policy], "", 0.0)

    def versions(self) -> dict[str, int]:
        return self.versions_

    def clear_rows(self) -> None:
        """The store has them."""
