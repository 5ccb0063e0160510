"""What an engine is: requests in, replies out. Token ids stay with the model group that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from masflow.trace import Message


@dataclass(frozen=True)
class SamplingParams:
    """How one reply is drawn, complete. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    max_tokens: int = 256


@dataclass(frozen=True)
class Request:
    """Made by the player for one turn; eaten by an engine."""

    turn_id: str
    policy: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    seed: int
    parent: str | None = None
    """Turn id whose row this prompt continues, if any."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools offered (ReAct roles). The messages tell the model of them: in plain text,
    or by the first one's `tools`, for the chat template."""
    node: str = ""
    role: str = ""
    member: str = ""
    visit: int = 1
    item: int | str | None = None
    task: dict[str, Any] | None = None
    """Visible to the scripted engine only; a language model never sees it."""


@dataclass(frozen=True)
class Reply:
    """Made by an engine; eaten by the player. `finish`: stop, length, prompt_too_long or error."""

    turn_id: str
    text: str
    finish: str = "stop"
    prompt_tokens: int = 0
    reply_tokens: int = 0
    logprob: float = 0.0
    """Sum over reply tokens, nats, of the distribution sampled from."""
    version: int = 0
    detail: str = ""


class RolloutEngine(Protocol):
    """Draws replies. Declared property: `repeats` says whether equal requests give equal replies."""

    repeats: bool

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order. Raises RunError when the engine itself is broken."""
        ...
