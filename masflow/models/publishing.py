"""What a trainer process hands to the processes that speak: a policy's weights, with proof of themselves.

Arrays, not tensors: they pass between processes by reference. NumPy has no bfloat16, so such a tensor goes as
its bits in uint16, and `dtypes` says so. Knows no models and no engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from masflow.errors import RunError
from masflow.models.weights import checksum_of, digest_of, gathered

__all__ = ["PROBE_TOKENS", "Payload", "Probe", "as_tensor", "make_payload"]

PROBE_TOKENS = 8
"""Tokens on which engine and trainer are compared: a mean over fewer is rounding's in half precision."""


@dataclass(frozen=True)
class Probe:
    """A short text and the trainer's log-probs of its end; an engine with the same weights agrees."""

    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each reply id, nats, at temperature 1."""

    def gap(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference from an engine's log-probs of the same ids, nats; NaN where one is."""
        gaps = [abs(a - b) for a, b in zip(self.logprobs, logprobs, strict=True)]
        return sum(gaps) / len(gaps)


@dataclass(frozen=True)
class Payload:
    """One publication of one policy. Made by its trainer; eaten by every rollout worker of the model."""

    policy: str
    version: int
    tensors: dict[str, np.ndarray]
    """The policy's own weights by name: of an adapter, the adapter alone."""
    base: dict[str, np.ndarray]
    """Weights under an adapter, or that the base's config freezes, where they aren't the base's own and were
    not delivered before; mostly empty."""
    dtypes: dict[str, str]
    """torch's name of each tensor's type, `base` included."""
    checksums: dict[str, str]
    """Of each tensor, `base` included."""
    checksum: str
    """Of the policy's own weights, as `Delivery` reports it."""
    probe: Probe | None = field(default=None)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.tensors.values(), *self.base.values()))

    def verify(self) -> None:
        """Raises RunError naming the first tensor that isn't what the trainer sent."""
        received = {**self.base, **self.tensors}
        for name, wanted in self.checksums.items():
            found = digest_of(name, received[name]) if name in received else "nothing"
            if found != wanted:
                raise RunError(
                    f"policy '{self.policy}' version {self.version}: tensor '{name}' was sent with checksum"
                    f" {wanted}, and {found} arrived",
                    "look at the network and the memory of that worker, then go on with --resume",
                )


def make_payload(
    policy: str, version: int, own: Mapping[str, Tensor], base: Mapping[str, Tensor], probe: Probe | None
) -> Payload:
    """Copies of the weights, so that training can go on while they travel."""
    tensors = {name: _as_array(weight) for name, weight in own.items()}
    under = {name: _as_array(weight) for name, weight in base.items() if name not in tensors}
    both = {**under, **tensors}
    dtypes = {name: str(({**base, **own})[name].dtype).removeprefix("torch.") for name in both}
    checksums = {name: digest_of(name, array) for name, array in both.items()}
    total = checksum_of(checksums[name] for name in tensors)
    return Payload(policy, version, tensors, under, dtypes, checksums, total, probe)


def as_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """The tensor that an array of a payload stands for; memory is shared, so treat it as read-only."""
    kind = getattr(torch, dtype)
    # A received array may be read-only, of which torch warns although nothing writes to it.
    shared = torch.from_numpy(array if array.flags.writeable else array.copy())
    return shared.view(torch.bfloat16) if kind == torch.bfloat16 else shared


def _as_array(weight: Tensor) -> np.ndarray:
    copied = gathered(weight.detach()).cpu().contiguous().clone()
    return (copied.view(torch.uint16) if copied.dtype == torch.bfloat16 else copied).numpy()
