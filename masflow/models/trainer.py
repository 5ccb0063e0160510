"""Turns rows into optimizer steps: packed micro-batches, loss, clipping, AdamW, schedules by the run's step.

Shapes: B rows, T reply tokens, N reply tokens of all rows, U predictions, V vocabulary. Dropout is off
while training, so that the first ratio of fresh rows is 1. Knows rows and parameters; not where adapters or
checkpoints come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from masflow.errors import RunError, boundary
from masflow.models.backbone import Backbone
from masflow.models.experience import Row
from masflow.models.packs import Budget, MicroBatch, budget_of, pack
from masflow.rl.losses import LossSpec, token_loss_BT
from masflow.spec.mapping import Optimizer

__all__ = ["Learner", "Scores", "TrainItem", "Trainer", "learning_rate"]


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


class TrainItem(Protocol):
    """What the loss of a row needs (`masflow.rl.batch.TrainRow`)."""

    @property
    def turn_id(self) -> str: ...
    @property
    def advantage(self) -> float: ...
    @property
    def token_weight(self) -> float: ...
    @property
    def minibatch(self) -> int: ...
    @property
    def temperature(self) -> float: ...


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
            self.optimizer = torch.optim.AdamW(list(self.parameters.values()), lr=rate)
        self.optimizer.param_groups[0].update(
            lr=rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
        )
        return self.optimizer

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The reference's weights stand in for the block; afterwards the same tensors are back."""
        if self.reference is None:
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


@dataclass(frozen=True)
class Scores:
    """Log-probs of the rows of one micro-batch on a grid; places beyond a row's reply hold 0."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    mask_BT: Tensor
    """bool."""


@dataclass
class Totals:
    """Sums of measurements over the reply tokens of several micro-batches."""

    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    def add(self, metrics_BT: Mapping[str, Tensor], mask_BT: Tensor) -> None:
        self.tokens += int(mask_BT.sum())
        for name, value_BT in metrics_BT.items():
            self.sums[name] = self.sums.get(name, 0.0) + float((value_BT * mask_BT).sum())

    def means(self) -> dict[str, float]:
        return {name: value / max(1, self.tokens) for name, value in self.sums.items()}


class Trainer:
    """One backbone's optimizer steps, for whichever learner is on."""

    def __init__(self, backbone: Backbone, dump_dir: Path, budget: Budget | None = None):
        self.backbone, self.dump_dir = backbone, dump_dir
        self.budget = budget or budget_of(backbone.model.config)

    # -- scoring ----------------------------------------------------------------------------------

    def pack(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[MicroBatch]:
        vocab_size, device = self.backbone.vocab_size, self.backbone.device
        return pack(rows, temperatures, vocab_size=vocab_size, budget=self.budget, device=device)

    def score(self, batch: MicroBatch, entropy: Literal["none", "measured", "trained"] = "none") -> Scores:
        """Log-probs of the reply tokens, of the softmax of logits divided by the row's temperature.

        Args:
            entropy: whether entropies are computed, and whether gradients flow through them.
        """
        hidden = self.backbone.hidden(
            batch.ids_ST, batch.mask, batch.positions_ST if batch.mask is not None else None
        )
        logits_UV = self.backbone.logits(hidden.flatten(0, 1)[batch.source_U])
        if bool((batch.temperature_U != 1).any()):
            logits_UV = logits_UV / batch.temperature_U.to(logits_UV.dtype)[:, None]
        logprobs_UV = torch.log_softmax(logits_UV, -1)
        logprobs_N = logprobs_UV[batch.prediction_N, batch.target_N]
        shape = (len(batch.rows), int(batch.lengths_B.max()))
        place = (batch.row_N, batch.offset_N)
        empty = logprobs_N.new_zeros(shape)
        mask_BT = torch.zeros(shape, dtype=torch.bool, device=empty.device).index_put(
            place, torch.tensor(True, device=empty.device)
        )
        entropy_BT = empty
        if entropy != "none":
            source_UV = logprobs_UV if entropy == "trained" else logprobs_UV.detach()
            entropy_U = -(source_UV.exp() * source_UV).sum(-1)
            entropy_BT = empty.index_put(place, entropy_U[batch.prediction_N])
        return Scores(empty.index_put(place, logprobs_N), entropy_BT, mask_BT)

    def logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]]:
        """Log-probs of each row's reply tokens under the weights that are on, in order."""
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for batch in self.pack(rows, temperatures):
                scores = self.score(batch)
                for b, number in enumerate(batch.rows):
                    found[number] = scores.logprobs_BT[b, : len(rows[number].reply_ids)].tolist()
        return [found[i] for i in range(len(rows))]

    # -- supervised -------------------------------------------------------------------------------

    def supervise(
        self, learner: Learner, rows: Sequence[Row], spec: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One step on the mean negative log-likelihood (nats) of the reply tokens.

        Raises:
            RunError: a non-finite loss or gradient; no rows.
        """
        if not rows:
            raise RunError(f"policy '{learner.name}' has no demonstrations to learn from")
        num_tokens = sum(len(row.reply_ids) for row in rows)
        rate = learning_rate(spec, step, num_steps)
        optimizer = learner.ready(spec, rate)
        loss, right = 0.0, 0.0
        for batch in self.pack(rows, [1.0] * len(rows)):
            scores = self.score(batch)
            loss_B = -scores.logprobs_BT.sum(1) / num_tokens
            self._check(loss_B, batch, rows, learner, step)
            loss_B.sum().backward()
            loss += float(loss_B.detach().sum())
            right += float((scores.logprobs_BT.detach() > math.log(0.5)).logical_and(scores.mask_BT).sum())
        norm = self._apply(learner, optimizer, spec, rows, step)
        return {
            "loss": loss,
            "likely_frac": right / num_tokens,
            "grad_norm": norm,
            "lr": rate,
            "tokens": float(num_tokens),
        }

    # -- reinforcement ----------------------------------------------------------------------------

    def update(
        self,
        learner: Learner,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        loss: LossSpec,
        spec: Optimizer,
        step: int,
        num_steps: int,
        disabled: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> dict[str, float]:
        """One optimizer step a mini-batch, on the sum over rows and tokens of token_weight · token_loss.

        Args:
            disabled: switches the adapter off, for a reference that is the backbone.
        """
        totals, norms = Totals(), []
        total_loss = 0.0
        rate = learning_rate(spec, step, num_steps)
        optimizer = learner.ready(spec, rate)
        references = self._reference(learner, items, rows, disabled) if loss.kl_weight else None
        for number in sorted({item.minibatch for item in items}):
            chosen = [i for i, item in enumerate(items) if item.minibatch == number]
            mini_rows, mini_items = [rows[i] for i in chosen], [items[i] for i in chosen]
            mini_refs = [references[i] for i in chosen] if references else None
            total_loss += self._backward(learner, mini_items, mini_rows, mini_refs, loss, totals, step)
            norms.append(self._apply(learner, optimizer, spec, mini_rows, step))
        own = {"loss": total_loss / len(norms), "grad_norm": max(norms), "lr": rate}
        return (
            own
            | totals.means()
            | {
                "tokens": float(totals.tokens),
                "turns": float(len(rows)),
                "optimizer_steps": float(len(norms)),
            }
        )

    def _backward(
        self,
        learner: Learner,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        references: Sequence[Sequence[float]] | None,
        loss: LossSpec,
        totals: Totals,
        step: int,
    ) -> float:
        summed = 0.0
        for batch in self.pack(rows, [item.temperature for item in items]):
            scores = self.score(batch, "trained" if loss.entropy else "measured")
            like = scores.logprobs_BT
            advantages_B = like.new_tensor([items[i].advantage for i in batch.rows])
            weights_B = like.new_tensor([items[i].token_weight for i in batch.rows])
            old_BT = _grid([rows[i].logprobs for i in batch.rows], like)
            reference_BT = _grid([references[i] for i in batch.rows], like) if references else None
            loss_BT, metrics = token_loss_BT(
                scores.logprobs_BT,
                old_BT,
                advantages_B,
                loss,
                reference_BT=reference_BT,
                entropy_BT=scores.entropy_BT,
            )
            loss_B = (loss_BT * scores.mask_BT).sum(1) * weights_B
            self._check(loss_B, batch, rows, learner, step)
            loss_B.sum().backward()
            summed += float(loss_B.detach().sum())
            totals.add(metrics, scores.mask_BT)
        return summed

    def _reference(
        self,
        learner: Learner,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        disabled: Callable[[], AbstractContextManager[Any]] | None,
    ) -> list[list[float]]:
        if not learner.has_reference:
            raise RunError(
                f"policy '{learner.name}' has no reference for its KL",
                "call snapshot_reference() before training",
            )
        temperatures = [item.temperature for item in items]
        if learner.reference is None and disabled is not None:
            with disabled():
                return self.logprobs(rows, temperatures)
        with learner.as_reference():
            return self.logprobs(rows, temperatures)

    # -- the step itself --------------------------------------------------------------------------

    def _apply(
        self, learner: Learner, optimizer: torch.optim.AdamW, spec: Optimizer, rows: Sequence[Row], step: int
    ) -> float:
        """Clip, check, step, forget the gradients; the norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(learner.parameters.values(), spec.max_grad_norm))
        if not math.isfinite(norm):
            self._stop(f"gradient norm {norm}", list(range(len(rows))), rows, learner, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _check(
        self, loss_B: Tensor, batch: MicroBatch, rows: Sequence[Row], learner: Learner, step: int
    ) -> None:
        bad = (~torch.isfinite(loss_B.detach())).nonzero()[:, 0].tolist()
        if bad:
            self._stop("loss", sorted(batch.rows[b] for b in bad), rows, learner, step)

    def _stop(self, what: str, bad: Sequence[int], rows: Sequence[Row], learner: Learner, step: int) -> None:
        """Write the batch for a post-mortem, forget the gradients, and raise."""
        file = self.dump_dir / f"nonfinite-{learner.name.replace('/', '.')}-step{step + 1}.pt"
        with boundary(str(file)) as caught:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            torch.save({"bad": [rows[i].turn_id for i in bad], "rows": [asdict(row) for row in rows]}, file)
        for parameter in learner.parameters.values():
            parameter.grad = None
        names = ", ".join(rows[i].turn_id for i in bad[:8]) + (" …" if len(bad) > 8 else "")
        dumped = f"the batch can't be written: {caught.error}" if caught.error else f"the batch is in {file}"
        place = f"policy '{learner.name}', step {step + 1}"
        raise RunError(
            f"{place}: non-finite {what}; turns {names}; {dumped}",
            "lower the learning rate, or look at those turns' rewards",
        )


def _grid(values: Sequence[Sequence[float]], like_BT: Tensor) -> Tensor:
    """Ragged rows as a (B, T) tensor with zeros beyond their ends."""
    width = like_BT.shape[1]
    return like_BT.new_tensor([[*row, *([0.0] * (width - len(row)))] for row in values])
