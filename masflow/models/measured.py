"""What one trainer process measures while it trains, in sums that several processes can join."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Pass", "Totals"]


@dataclass
class Totals:
    """Sums of measurements over the reply tokens of several micro-batches."""

    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def add(self, metrics_n: Mapping[str, Tensor]) -> None:
        """Each (n,) over reply tokens, or (n, 1)."""
        found = torch.stack([value_n.sum() for value_n in metrics_n.values()]).tolist()
        self.tokens += len(next(iter(metrics_n.values())))
        for name, value in zip(metrics_n, found, strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + value

    def join(self, other: Totals) -> None:
        self.tokens += other.tokens
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        return {name: value / max(1, self.tokens) for name, value in self.sums.items()}


@dataclass
class Pass:
    """What one rank measured in a mini-batch: its part of the loss, likely tokens, turns not finite."""

    loss: float = 0.0
    right: float = 0.0
    bad: list[str] = field(default_factory=list)
