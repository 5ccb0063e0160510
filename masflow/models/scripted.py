"""An engine that answers from a script: deterministic, without a model, for trying workflows and for
tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from masflow.errors import RunError
from masflow.models.engine import Reply, Request

Line = str | Reply
Lines = Sequence[Line] | Callable[[Request], Line]


class ScriptedEngine:
    """A RolloutEngine that speaks lines.

    Args:
        script: by node, member or role (looked up in that order, with and without the sub-workflow's
            prefix; `*` is everyone else): a list of texts, one for each visit in turn (the last one
            repeats), or a function of the request. A line may be a Reply, whose `finish` and counts are
            kept.
    """

    repeats = True

    def __init__(self, script: Mapping[str, Lines]):
        self.script = dict(script)
        self.requests: list[Request] = []
        """Every request so far, in order of arrival."""

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """Raises RunError when the script has no line for a request."""
        self.requests += requests
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Reply:
        lines = self._lines(request)
        line = lines(request) if callable(lines) else lines[min(request.visit, len(lines)) - 1]
        if isinstance(line, Reply):
            return Reply(**{**line.__dict__, "turn_id": request.turn_id})
        return Reply(
            turn_id=request.turn_id,
            text=line,
            prompt_tokens=sum(len(message.content.split()) for message in request.messages),
            reply_tokens=len(line.split()),
        )

    def _lines(self, request: Request) -> Lines:
        full = (request.node, request.member, request.role)
        for name in (*full, *(name.rpartition("/")[2] for name in full), "*"):
            lines = self.script.get(name)
            if lines is not None and (callable(lines) or len(lines)):
                return lines
        raise RunError(
            f"the script has no line for node '{request.node}' (role '{request.role}')",
            f"add one; it knows {', '.join(sorted(self.script)) or 'nobody'}",
        )
