"""The runtime document: where a plan runs. Nothing in it changes what is learned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from masflow.spec.base import Spec


class Engine(Spec):
    """The rollout engine of the models."""

    use: Literal["transformers"] = "transformers"
    max_batch_tokens: int = Field(default=16384, ge=1)
    """Prompt and reply tokens of one decoding batch together, padding included."""


class Runtime(Spec):
    """A whole runtime."""

    backend: Literal["local"] = "local"
    deterministic: bool = True
    """Batches form at barriers in node order with fixed threads: a run repeats bit for bit. Turned off, as
    many threads as torch chooses compute, and sums may round otherwise."""
    threads: int | None = Field(default=None, ge=1)
    """Default: 1 where the run is deterministic, else torch's choice."""
    engine: Engine = Engine()
    pipeline: Literal["auto", "sync"] = "auto"
