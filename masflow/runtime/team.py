"""The model groups of a plan behind one engine: each request goes to the model that plays its role.

Knows the groups' interface only; token tensors stay in them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from masflow.compiler.plan import Plan, PolicyIR
from masflow.models.engine import Reply, Request
from masflow.rl.batch import TrainRow
from masflow.rl.chains import Link
from masflow.rl.losses import LossSpec
from masflow.runtime.backend import Backend
from masflow.runtime.endpoint_group import EndpointGroup
from masflow.runtime.local import LocalBackend
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.placement import asks_of
from masflow.runtime.rundir import StopFlag
from masflow.runtime.stream import Stream
from masflow.runtime.vllm_worker import worker_of
from masflow.spec.runtime import Runtime


@dataclass(frozen=True)
class Traffic:
    """What went between the hub and its model groups, counted since the team was made."""

    replies: int = 0
    batches: int = 0
    """Decoding batches."""
    forked_rows: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    hub_bytes: int = 0
    """Size of all requests, replies and training rows as messages; token tensors are not among them."""

    worker_restarts: int = 0

    def since(self, before: Traffic) -> dict[str, float]:
        """`concurrency`: replies that were decoded together, on average; `forked_rows`; `hub_bytes`; and
        `cached_tokens` and `worker_restarts` where there are any."""
        batches = self.batches - before.batches
        restarts = self.worker_restarts - before.worker_restarts
        cached = self.cached_tokens - before.cached_tokens
        return {
            "concurrency": round((self.replies - before.replies) / batches, 3) if batches else 0.0,
            "forked_rows": self.forked_rows - before.forked_rows,
            "hub_bytes": self.hub_bytes - before.hub_bytes,
            **({"cached_tokens": cached} if cached else {}),
            **({"worker_restarts": restarts} if restarts else {}),
        }


class Team:
    """All physical models of a plan. A RolloutEngine: `generate` routes by policy and keeps the order."""

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        stop: StopFlag | None = None,
        backend: Backend | None = None,
        worker: type | None = None,
    ):
        """Load every model.

        Args:
            backend: where the processes run; default: what the plan's runtime says.
            worker: what a process of a model is; default: what its engine needs.
        """
        self._backend = backend or backend_of(plan.runtime)
        self.groups: dict[str, ModelGroup | EndpointGroup] = {}
        own = [model for model in plan.models if model.endpoint is None]
        with ExitStack() as stack:
            stack.callback(self.close)
            self._backend.reserve({n: ask for m in own for n, ask in asks_of(m, plan.runtime)})
            # Servers come first: they are asked while the models here speak.
            for model in (m for m in plan.models if m.endpoint is not None):
                self.groups[model.name] = EndpointGroup(model, stop.check if stop else _go_on)
            for model in own:
                process = worker or worker_of(model, plan)
                self.groups[model.name] = ModelGroup(model, plan, run_dir, self._backend, process)
            for group in self.groups.values():
                group.ready()
            stack.pop_all()
        self.repeats = all(group.repeats for group in self.groups.values())
        self.policies: tuple[PolicyIR, ...] = plan.policies
        self._group_of = {p.name: self.groups[p.model] for p in plan.policies}
        self._hosts = {critic.name: self._host(critic.model) for critic in plan.critics}
        self._stop = stop
        self._hub_bytes = 0
        check = stop.check if stop else _go_on
        self.stream = (
            None if plan.runtime.deterministic else Counted(self, plan.runtime.call_timeout_s, check)
        )
        """Answers requests as they come, where the run need not repeat."""

    def _host(self, model: str) -> ModelGroup:
        group = self.groups[model]
        assert isinstance(group, ModelGroup), "a critic beside a server"
        return group

    def group_of(self, policy: str) -> ModelGroup | EndpointGroup:
        return self._group_of[policy]

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order. Raises Interrupted when a stop was asked for."""
        if self._stop is not None:
            self._stop.check()
        replies: dict[int, Reply] = {}
        asked: list[tuple[Any, list[int], list[Any]]] = []
        for group in self.groups.values():
            mine = [i for i, request in enumerate(requests) if self._group_of[request.policy] is group]
            if mine:
                asked.append((group, mine, group.submit([requests[i] for i in mine])))
        for group, mine, calls in asked:
            found = group.gather(calls)
            answered = [found[requests[i].turn_id] for i in mine]
            self._hub_bytes += _size([requests[i] for i in mine]) + _size(answered)
            replies.update(zip(mine, answered, strict=True))
        return [replies[i] for i in range(len(requests))]

    def update(
        self, rows: Mapping[str, Sequence[TrainRow]], loss: LossSpec, step: int, num_steps: int
    ) -> dict[str, dict[str, float]]:
        """As `ModelGroup.update`, for every policy that has rows; different models learn at once.

        Returns:
            Policy → its metrics, in the order of the policies.
        """
        moving = [policy.name for policy in self.trained() if rows.get(policy.name)]
        begun: list[tuple[str, Any]] = []
        for policy in moving:
            self._hub_bytes += _size(rows[policy])
            begun.append(
                (policy, self._group_of[policy].begin_update(policy, rows[policy], loss, step, num_steps))
            )
        return {policy: self._group_of[policy].finish_update(policy, calls) for policy, calls in begun}

    def estimate(self, links: Mapping[str, Sequence[Link]]) -> dict[str, float]:
        """Turn id → advantage by its critic; the critics of different models are asked at once.

        Args:
            links: critic's name → its turns.
        """
        begun = []
        for group in dict.fromkeys(self._hosts.values()):
            mine = {name: asked for name, asked in links.items() if self._hosts[name] is group and asked}
            if mine:
                self._hub_bytes += sum(map(_size, mine.values()))
                begun.append((group, group.begin_estimate(mine)))
        return {turn: found for group, call in begun for turn, found in group.finish(call).items()}

    def update_all(
        self, rows: Mapping[str, Sequence[TrainRow]], loss: LossSpec, step: int, num_steps: int
    ) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Critics learn from what they estimated, policies as `update`; metrics of both."""
        hosts = dict.fromkeys(self._hosts.values())
        begun = [(group, group.begin_critics(step, num_steps)) for group in hosts]
        policies = self.update(rows, loss, step, num_steps)
        found = {name: metrics for group, call in begun for name, metrics in group.finish(call).items()}
        return policies, {name: found[name] for name in self._hosts if name in found}

    def start_critics(self) -> None:
        """At the start of RL: critics begin from their models' weights as they are now."""
        for group in dict.fromkeys(self._hosts.values()):
            group.start_critics()

    def incidents(self) -> list[str]:
        """What happened to workers since this was last asked."""
        found = [text for group in self.groups.values() for text in group.incidents]
        for group in self.groups.values():
            group.incidents.clear()
        return found

    def traffic(self) -> Traffic:
        """Counted so far; a step's part is the difference."""
        counts = [group.traffic() for group in self.groups.values()]
        columns = (sum(column) for column in zip(*counts, strict=True))
        own = [group for group in self.groups.values() if isinstance(group, ModelGroup)]
        restarts, cached = sum(g.num_restarts for g in own), sum(g.num_cached for g in own)
        return Traffic(*columns, cached_tokens=cached, hub_bytes=self._hub_bytes, worker_restarts=restarts)

    def usage(self, before: Mapping[str, Mapping[str, int]] | None = None) -> dict[str, dict[str, int]]:
        """Of each model behind an endpoint: replies, errors, tries and tokens; since `before`, or in all."""
        served = {n: g.usage() for n, g in self.groups.items() if isinstance(g, EndpointGroup)}
        old = before or {}
        return {n: {k: v - old.get(n, {}).get(k, 0) for k, v in now.items()} for n, now in served.items()}

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
        """Close every group and end their processes."""
        for group in self.groups.values():
            group.close()
        self._backend.close()


class Counted(Stream):
    """A stream whose messages are counted."""

    def __init__(self, team: Team, timeout_s: float, check: Callable[[], None]):
        super().__init__(team._group_of, team._backend, timeout_s, check)
        self._team = team

    def submit(self, requests: Sequence[Request]) -> None:
        self._team._hub_bytes += _size(requests)
        super().submit(requests)

    def collect(self) -> list[Reply]:
        replies = super().collect()
        self._team._hub_bytes += _size(replies)
        return replies


def _go_on() -> None:
    """Nobody asks for a stop."""


def backend_of(runtime: Runtime) -> Backend:
    """What a runtime document asks for. Raises RunError when a cluster doesn't answer."""
    if runtime.backend == "local":
        return LocalBackend()
    from masflow.runtime.cluster import RayBackend

    return RayBackend(runtime)


def _size(messages: Sequence[object]) -> int:
    """Bytes of messages as they would be sent. Each stands for itself: which texts happen to be one object
    in memory differs between runs."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.fast = True
    pickler.dump(list(messages))
    return stream.tell()
