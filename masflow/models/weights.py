"""Weights as values: in one piece or spread over processes, their bytes and checksums. Knows no models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["checksum", "checksum_of", "digest_of", "gathered", "put", "spread_like"]


def gathered(weight: Tensor) -> Tensor:
    """A weight in one piece, where it is spread over several processes: all of them must ask."""
    gather = getattr(weight, "full_tensor", None)
    return gather() if gather is not None else weight


def put(weight: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a weight, of which this process may hold a part."""
    with torch.no_grad():
        weight.copy_(spread_like(weight, value))


def spread_like(weight: Any, value: Tensor) -> Tensor:
    """A whole tensor, or this process's part of it where `weight` is spread over several."""
    if not hasattr(weight, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    moved = value.to(weight.device)
    return distribute_tensor(moved, weight.device_mesh, weight.placements, src_data_rank=None)


def checksum(weights: Mapping[str, Tensor]) -> str:
    """16 hex digits over names and bytes; equal exactly where every bit is."""
    return checksum_of(digest_of(name, as_bytes(weight)) for name, weight in weights.items())


def as_bytes(weight: Tensor) -> np.ndarray:
    return gathered(weight).detach().cpu().contiguous().view(torch.uint8).numpy()


def digest_of(name: str, array: np.ndarray) -> str:
    """SHA-256 over one tensor's name and bytes, 16 hex digits."""
    digest = sha256(name.encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def checksum_of(digests: Iterable[str]) -> str:
    """One digest over those of all tensors, in order, 16 hex digits."""
    return sha256(" ".join(digests).encode()).hexdigest()[:16]
