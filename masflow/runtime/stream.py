"""Requests that are answered as they come, without barriers: a worker that is free takes what is queued.

For runs that need not repeat; replies come back in the order in which they are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from masflow.models.engine import Reply, Request
from masflow.runtime.backend import Backend, stuck
from masflow.runtime.endpoint_group import EndpointGroup, Sent
from masflow.runtime.model_group import Call, ModelGroup

__all__ = ["Group", "Stream"]

Group = ModelGroup | EndpointGroup
_LOOK_EVERY_S = 0.02
"""While servers are waited for, or somebody may ask for a stop."""


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

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those that a free worker can take are on their way."""
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
                continue
            busy = {call.worker for g, call in self._calls if g is group and isinstance(call, Call)}
            free = [worker for worker in range(len(group.speakers)) if worker not in busy]
            if free:
                # A free worker leaves their share to those that are about to be free.
                share = -(-len(queue) * len(free) // len(group.speakers))
                self._calls += [(group, call) for call in group.submit(queue[:share], free)]
                del queue[:share]

    def collect(self) -> list[Reply]:
        """Replies that are there, at least one; [] when nothing is under way.

        Raises:
            RunError: none came in `runtime.call_timeout_s`; or what a worker raised.
        """
        began = time.monotonic()
        while self._calls:
            self._check()
            done = [pair for pair in self._calls if pair[1].done()]
            if done:
                self._calls = [pair for pair in self._calls if not any(pair is one for one in done)]
                replies = [r for group, call in done for r in group.gather([call]).values()]  # type: ignore[list-item]
                self._dispatch()
                return replies
            if time.monotonic() - began > self._timeout_s:
                raise stuck(self._calls[0][0].model.name, "generate", self._timeout_s)
            pendings = [call.pending for _, call in self._calls if isinstance(call, Call)]
            if len(pendings) < len(self._calls):
                time.sleep(_LOOK_EVERY_S)
            else:
                self._backend.wait(pendings, 10 * _LOOK_EVERY_S)
        return []

    def clear(self) -> None:
        """Forget what is queued and under way, after an error."""
        self._queued.clear()
        self._calls.clear()
