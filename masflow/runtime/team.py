"""The model groups of a plan behind one engine: each request goes to the model that plays its role.

Knows the groups' interface only; token tensors stay in them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from masflow.compiler.plan import Plan, PolicyIR
from masflow.models.engine import Reply, Request
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime.rundir import StopFlag

if TYPE_CHECKING:
    from masflow.runtime.model_group import ModelGroup


@dataclass(frozen=True)
class Traffic:
    """What went between the hub and its model groups, counted since the team was made."""

    replies: int = 0
    batches: int = 0
    """Decoding batches."""
    forked_rows: int = 0
    hub_bytes: int = 0
    """Size of all requests, replies and training rows as messages; token tensors are not among them."""

    def since(self, before: Traffic) -> dict[str, float]:
        """`concurrency`: replies that were decoded together, on average; `forked_rows`; `hub_bytes`."""
        batches = self.batches - before.batches
        return {
            "concurrency": round((self.replies - before.replies) / batches, 3) if batches else 0.0,
            "forked_rows": self.forked_rows - before.forked_rows,
            "hub_bytes": self.hub_bytes - before.hub_bytes,
        }


class Team:
    """All physical models of a plan. A RolloutEngine: `generate` routes by policy and keeps the order."""

    repeats = True

    def __init__(self, plan: Plan, run_dir: Path, stop: StopFlag | None = None):
        from masflow.runtime.model_group import ModelGroup

        self.groups: dict[str, ModelGroup] = {m.name: ModelGroup(m, plan, run_dir) for m in plan.models}
        self.policies: tuple[PolicyIR, ...] = plan.policies
        self._group_of = {p.name: self.groups[p.model] for p in plan.policies}
        self._stop = stop
        self._hub_bytes = 0

    def group_of(self, policy: str) -> ModelGroup:
        return self._group_of[policy]

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order. Raises Interrupted when a stop was asked for."""
        if self._stop is not None:
            self._stop.check()
        replies: dict[int, Reply] = {}
        for group in self.groups.values():
            mine = [i for i, request in enumerate(requests) if self._group_of[request.policy] is group]
            if mine:
                asked = [requests[i] for i in mine]
                answered = group.generate(asked)
                self._hub_bytes += _size(asked) + _size(answered)
                replies.update(zip(mine, answered, strict=True))
        return [replies[i] for i in range(len(requests))]

    def update(
        self, policy: str, rows: Sequence[TrainRow], loss: LossSpec, step: int, num_steps: int
    ) -> dict[str, float]:
        """As `ModelGroup.update`, in the policy's group."""
        self._hub_bytes += _size(rows)
        return self._group_of[policy].update(policy, rows, loss, step, num_steps)

    def traffic(self) -> Traffic:
        """Counted so far; a step's part is the difference."""
        counts = [group.traffic() for group in self.groups.values()]
        return Traffic(*(sum(column) for column in zip(*counts, strict=True)), hub_bytes=self._hub_bytes)

    def trained(self) -> list[PolicyIR]:
        return [policy for policy in self.policies if policy.train]

    def clear_rows(self) -> None:
        for group in self.groups.values():
            group.clear_rows()

    def reset_optimizers(self) -> None:
        for group in self.groups.values():
            group.reset_optimizers()

    def snapshot_reference(self) -> None:
        """Today's weights are what a KL penalty compares with."""
        for group in self.groups.values():
            group.snapshot_reference()

    def close(self) -> None:
        for group in self.groups.values():
            group.close()


def _size(messages: Sequence[object]) -> int:
    """Bytes of messages as they would be sent. Each stands for itself: which texts happen to be one object
    in memory differs between runs."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.fast = True
    pickler.dump(list(messages))
    return stream.tell()
