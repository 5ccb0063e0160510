"""The model groups of a plan behind one engine: each request goes to the model that plays its role.

Knows the groups' interface only; token tensors stay in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from masflow.compiler.plan import Plan, PolicyIR
from masflow.models.engine import Reply, Request
from masflow.runtime.rundir import StopFlag

if TYPE_CHECKING:
    from masflow.runtime.model_group import ModelGroup


class Team:
    """All physical models of a plan. A RolloutEngine: `generate` routes by policy and keeps the order."""

    repeats = True

    def __init__(self, plan: Plan, run_dir: Path, stop: StopFlag | None = None):
        from masflow.runtime.model_group import ModelGroup

        self.groups: dict[str, ModelGroup] = {m.name: ModelGroup(m, plan, run_dir) for m in plan.models}
        self.policies: tuple[PolicyIR, ...] = plan.policies
        self._group_of = {p.name: self.groups[p.model] for p in plan.policies}
        self._stop = stop

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
                answered = group.generate([requests[i] for i in mine])
                replies.update(zip(mine, answered, strict=True))
        return [replies[i] for i in range(len(requests))]

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
