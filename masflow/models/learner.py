"""A policy's trainable weights with their optimizer, reference and schedule. Knows no rows and no losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from masflow.spec.mapping import Optimizer

__all__ = ["Learner", "learning_rate"]


def learning_rate(optimizer: Optimizer, step: int, num_steps: int) -> float:
    """The rate of a run's step: linear warm-up, then constant, linear or cosine down to `final_lr_frac`.

    Args:
        step: from 0.
        num_steps: of the whole run; the last step's rate is the final one.
    """
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    done = (step - optimizer.warmup_steps) / max(1, num_steps - 1 - optimizer.warmup_steps)
    done = min(1.0, max(0.0, done))
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[
        optimizer.schedule
    ]
    floor = 1.0 if optimizer.schedule == "constant" else optimizer.final_lr_frac
    return optimizer.lr * (floor + (1.0 - floor) * left)


@dataclass
class Learner:
    """The trainable weights of one policy with their optimizer. `parameters` are in a fixed order."""

    name: str
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW | None = None
    reference: dict[str, Tensor] | None = None
    """Weights at the start of RL; None with `has_reference`: the disabled adapter."""
    has_reference: bool = False

    def ready(self, spec: Optimizer, rate: float) -> torch.optim.AdamW:
        """The optimizer with this step's settings; its states go on."""
        if self.optimizer is None:
            self.optimizer = self.fresh_optimizer()
        self.optimizer.param_groups[0].update(
            lr=rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
        )
        return self.optimizer

    def fresh_optimizer(self) -> torch.optim.AdamW:
        """One without moments; its rate is set by `ready`."""
        return torch.optim.AdamW(list(self.parameters.values()), lr=0.0, fused=True)

    def forget_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The reference's weights stand in for the block; afterwards the same tensors are back."""
        if self.reference is None:
            yield
            return
        if any(hasattr(p, "full_tensor") for p in self.parameters.values()):
            with self._lent(self.reference):
                yield
            return
        own = {name: p.data for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.data = self.reference[name]
        try:
            yield
        finally:
            for name, p in self.parameters.items():
                p.data = own[name]

    @contextmanager
    def _lent(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Other values in the same memory: who shards the weights knows them by it."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(values[name])
            try:
                yield
            finally:
                for name, p in self.parameters.items():
                    p.copy_(own[name])
