"""What goes between the hub and the processes of a model, beside requests and replies. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from masflow.models.engine import Reply

__all__ = ["Answer", "Delivery", "Part"]


@dataclass(frozen=True)
class Part:
    """Which of a model's processes a worker is. Made by the model group; eaten by the worker."""

    name: str
    speaks: bool = True
    learns: bool = True
    rank: int = 0
    """Among the processes that learn."""
    world: int = 1
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    threads: int | None = None
    timeout_s: float = 3600.0
    """Of a call to the store."""


@dataclass(frozen=True)
class Answer:
    """What a worker says to a batch of requests. Made by it; eaten by the model group."""

    replies: list[Reply]
    num_drawn: int
    """Replies that were decoded; a prompt that is too long has none."""
    num_batches: int
    """Decoding batches."""
    num_forked: int
    """Rows that forked because the chat template rewrote their history."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were at hand, each distinct prompt once."""


@dataclass(frozen=True)
class Delivery:
    """Proof that a worker speaks with the trainer's weights. Made after a publication; eaten by metrics."""

    policy: str
    version: int
    checksum: str
    """Of the policy's weights, where they speak."""
    logprob_gap: float
    """Mean difference between the engine's and the trainer's log-probs on the probe prompt, nats a token."""
