"""Requests that are answered as they come, without barriers: they join those that a worker is answering.

For runs that need not repeat; replies come back in the order in which they are done. An engine that nobody
can join is given what is queued when it is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from masflow.models.engine import Reply, Request
from masflow.runtime.backend import Backend, Died, Pending, stuck
from masflow.runtime.balance import cost
from masflow.runtime.endpoint_group import EndpointGroup, Sent
from masflow.runtime.messages import Answer
from masflow.runtime.model_group import Call, ModelGroup

__all__ = ["Group", "Stream"]

Group = ModelGroup | EndpointGroup
_LOOK_EVERY_S = 0.02
"""While servers are waited for, or somebody may ask for a stop."""
_STEPS = 16
"""Tokens after which a worker in a process of its own looks for requests that came meanwhile."""


class Running:
    """What one worker is answering, of a model whose engine may be joined."""

    def __init__(self, group: ModelGroup, worker: int, max_steps: int | None):
        self.group, self.worker, self._max_steps = group, worker, max_steps
        self.requests: dict[str, Request] = {}
        """By turn id: all that have no reply yet."""
        self._new: list[Request] = []
        self.pending: Pending[Answer] | None = None

    @property
    def load(self) -> int:
        """Tokens to be done, roughly."""
        return sum(cost([0], [request]) for request in self.requests.values())

    def add(self, requests: Sequence[Request]) -> None:
        """Let requests join with the next call."""
        self.requests |= {request.turn_id: request for request in requests}
        self._new += requests

    def begin(self) -> None:
        """Set the worker to work, if it isn't, and there is something to do."""
        if self.pending is None and self.requests:
            new, self._new = self._new, []
            self.pending = self.group.speakers[self.worker].call("advance", new, self._max_steps)

    def done(self) -> bool:
        """Whether `take` would not wait."""
        return self.pending is not None and self.pending.done()

    def take(self, timeout_s: float) -> list[Reply]:
        """Replies that are done. Those of a worker that died are asked for again, of the one in its place."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        try:
            answer = pending.get(timeout_s)
        except Died as death:
            self.group.revive(self.worker, death)
            self._new = list(self.requests.values())
            return []
        self.group.count(self.worker, answer)
        for reply in answer.replies:
            del self.requests[reply.turn_id]
        return answer.replies

    def drop(self) -> None:
        """Nobody waits for these any more."""
        if self.requests:
            with suppress(Died):
                self.group.speakers[self.worker].call("drop")


class Stream:
    """The queue between the episodes of a step and the workers of all models."""

    def __init__(
        self, group_of: Mapping[str, Group], backend: Backend, timeout_s: float, check: Callable[[], None]
    ):
        """Args: group_of: by policy; timeout_s: without any reply; check: called meanwhile, may raise."""
        self._group_of, self._backend = group_of, backend
        self._timeout_s, self._check = timeout_s, check
        self._queued: dict[str, list[Request]] = {}
        self._calls: list[tuple[Group, Call | Sent]] = []
        self._running: dict[tuple[str, int], Running] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those that a worker can take are on their way."""
        for request in requests:
            self._queued.setdefault(self._group_of[request.policy].model.name, []).append(request)
        self._dispatch()

    def _dispatch(self) -> None:
        for group in dict.fromkeys(self._group_of.values()):
            queue = self._queued.get(group.model.name)
            if not queue:
                continue
            if isinstance(group, EndpointGroup):
                self._calls += [(group, call) for call in group.submit(queue)]
                queue.clear()
            elif group.joins:
                self._join(group, queue)
                queue.clear()
            else:
                self._ask_free(group, queue)
        if self._backend.apart:
            self._begin()

    def _join(self, group: ModelGroup, queue: Sequence[Request]) -> None:
        name, steps = group.model.name, _STEPS if self._backend.apart else None
        for worker in range(len(group.speakers)):
            self._running.setdefault((name, worker), Running(group, worker, steps))
        load = {w: one.load for (model, w), one in self._running.items() if model == name}
        for worker, requests in group.deal(queue, load).items():
            self._running[name, worker].add(requests)

    def _ask_free(self, group: ModelGroup, queue: list[Request]) -> None:
        busy = {call.worker for g, call in self._calls if g is group and isinstance(call, Call)}
        free = [worker for worker in range(len(group.speakers)) if worker not in busy]
        if free:
            # A free worker leaves their share to those that are about to be free.
            share = -(-len(queue) * len(free) // len(group.speakers))
            self._calls += [(group, call) for call in group.submit(queue[:share], free)]
            del queue[:share]

    def _begin(self) -> None:
        for running in self._running.values():
            running.begin()

    def collect(self) -> list[Reply]:
        """Replies that are there, at least one; [] when nothing is under way.

        Raises:
            RunError: none came in `runtime.call_timeout_s`; or what a worker raised.
        """
        began = time.monotonic()
        while self._calls or any(one.requests for one in self._running.values()):
            self._check()
            self._begin()
            if replies := self._taken():
                self._dispatch()
                return replies
            if time.monotonic() - began > self._timeout_s:
                raise stuck(self._slowest(), "advance" if not self._calls else "generate", self._timeout_s)
            self._wait()
        return []

    def _taken(self) -> list[Reply]:
        done = [pair for pair in self._calls if pair[1].done()]
        self._calls = [pair for pair in self._calls if not any(pair is one for one in done)]
        replies = [r for group, call in done for r in group.gather([call]).values()]  # type: ignore[list-item]
        for running in self._running.values():
            if running.done():
                replies += running.take(self._timeout_s)
        return replies

    def _wait(self) -> None:
        pendings = [call.pending for _, call in self._calls if isinstance(call, Call)]
        is_asked = len(pendings) < len(self._calls)
        pendings += [one.pending for one in self._running.values() if one.pending is not None]
        if is_asked:
            time.sleep(_LOOK_EVERY_S)
        elif pendings:
            self._backend.wait(pendings, 10 * _LOOK_EVERY_S)

    def _slowest(self) -> str:
        if self._calls:
            return self._calls[0][0].model.name
        return next(name for (name, _), one in self._running.items() if one.requests)

    def clear(self) -> None:
        """Forget what is queued and under way, after an error."""
        self._queued.clear()
        self._calls.clear()
        for running in self._running.values():
            running.drop()
        self._running.clear()
