"""The group of a model behind an endpoint: the interface of a model group, without weights, tokens or rows.

Its roles are frozen; what the server does stays the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from masflow.compiler.plan import ModelIR
from masflow.errors import RunError
from masflow.models.engine import Reply, Request
from masflow.trace import Turn

__all__ = ["EndpointGroup", "Sent"]


@dataclass(frozen=True)
class Sent:
    """A request on its way to the server. Made by `submit`; eaten by `gather`."""

    turn_id: str
    future: Future[Reply]

    def done(self) -> bool:
        """Whether `gather` would not wait."""
        return self.future.done()


class EndpointGroup:
    """All that happens to one model that a server plays."""

    repeats = False

    def __init__(self, model: ModelIR, check: Callable[[], None] = lambda: None):
        """Look the key up; nothing is sent yet.

        Args:
            check: called while replies are waited for; may raise to stop waiting.
        Raises:
            RunError: a key's environment variable is named and not set.
        """
        from masflow.models.endpoint_engine import EndpointEngine  # its HTTP client is for few runs

        assert model.endpoint is not None and model.served is not None
        self.model = model
        self.incidents: list[str] = []
        """Nothing happens to workers that aren't there."""
        self.engine = EndpointEngine(model.endpoint, model.served, check=check)

    def ready(self) -> None:
        """There is nothing to load; whether the server is there shows when it is asked."""

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; they are in flight together, as far as the limits allow."""
        return self.engine.generate(requests)

    def submit(self, requests: Sequence[Request], among: Sequence[int] | None = None) -> list[Sent]:
        """Send requests; `gather` waits for the replies. Args: among: of no meaning, there are no workers."""
        return [Sent(request.turn_id, self.engine.submit(request)) for request in requests]

    def gather(self, calls: Sequence[Sent]) -> dict[str, Reply]:
        """Replies by turn id. Raises RunError when the server refuses or doesn't answer."""
        replies = self.engine.wait([call.future for call in calls])
        return {reply.turn_id: reply for reply in replies}

    def add_rows(self, turns: Sequence[Turn]) -> None:
        """Demonstrated turns of frozen roles teach nobody, and nothing continues their tokens here."""

    def supervise(self, policy: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RunError: the weights are elsewhere."""
        raise RunError(f"policy '{policy}' is behind an endpoint and can't learn", "leave it frozen")

    begin_supervise = finish_supervise = update = begin_update = finish_update = supervise

    def versions(self) -> dict[str, int]:
        """Nothing is ever published: 0."""
        return {policy.name: 0 for policy in self.model.policies}

    def traffic(self) -> tuple[int, int, int]:
        """Replies, the fewest batches that they fit in at the limit of requests in flight, and no forks."""
        replies = self.engine.counts["replies"]
        assert self.model.endpoint is not None
        return replies, -(-replies // self.model.endpoint.max_concurrent), 0

    def usage(self) -> dict[str, int]:
        """So far: `replies`, `errors`, `prompt_tokens`, `reply_tokens` as the server counts them, `tries`."""
        return {**self.engine.counts, "tries": self.engine.client.num_tries}

    def clear_rows(self) -> None:
        """There are none."""

    def reset_optimizers(self) -> None:
        """There are none."""

    def snapshot_reference(self) -> None:
        """Nothing here is compared with."""

    def save(self, folder: Path) -> None:
        """Nothing to keep: the folder only says so."""
        from masflow.models import saving

        folder.mkdir(parents=True, exist_ok=True)
        saving.write_facts(folder, saving.Facts(self.model.name, "frozen", {}, {}, (), (), (), ()))

    def load(self, folder: Path) -> None:
        """Nothing to take up."""

    def describe(self) -> dict[str, Any]:
        """Where it is and what it is called there, for progress and `explain`."""
        assert self.model.endpoint is not None
        return {"endpoint": self.model.endpoint.url, "model": self.model.served}

    def close(self) -> None:
        self.engine.close()
