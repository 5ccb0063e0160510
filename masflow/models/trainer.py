"""Turns rows into optimizer steps: packed micro-batches, loss, clipping, AdamW, schedules by the run's step.

Shapes: B rows, T reply tokens. Dropout is off while training, so that the first ratio of fresh rows is 1.
Where a model has several trainer processes, each gets all rows and takes its share, and all come to the same
gradient, the same metrics and the same end. Knows rows and parameters; not where adapters or checkpoints come
from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from masflow.errors import RunError, boundary
from masflow.models.backbone import Backbone
from masflow.models.experience import Row
from masflow.models.fused import TokenLoss
from masflow.models.known import Known, Mismatch, Moments, importance_weights, paid
from masflow.models.learner import Learner, learning_rate
from masflow.models.measured import Pass, Totals
from masflow.models.packs import Budget, MicroBatch, budget_of, pack
from masflow.models.ranks import Alone, Ranks, Together
from masflow.models.scorer import Scorer
from masflow.models.weights import gathered
from masflow.rl.losses import LossSpec, row_means_N, token_loss_BT
from masflow.spec.mapping import Optimizer

__all__ = ["Learner", "Scores", "TrainItem", "Trainer", "learning_rate"]


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
    @property
    def role(self) -> str: ...
    @property
    def reward(self) -> float: ...


@dataclass(frozen=True)
class Scores:
    """Log-probs of the rows of one micro-batch on a grid; places beyond a row's reply hold 0."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    mask_BT: Tensor
    """bool."""


class Trainer:
    """One backbone's optimizer steps, for whichever learner is on."""

    def __init__(
        self, backbone: Backbone, dump_dir: Path, budget: Budget | None = None, ranks: Ranks | None = None
    ):
        """With `ranks`, call `Policies.rebind` next: sharding replaces parameters.

        Raises:
            RunError: the ranks' models differ, or one of them is gone.
        """
        self.backbone, self.dump_dir = backbone, dump_dir
        budget = budget or budget_of(backbone.model.config)
        width = budget.width or int(backbone.model.config.hidden_size)
        self.budget = replace(budget, width=width if backbone.takes_blocks else 0)
        self.scorer = Scorer(backbone, self.budget.logits)
        self.ranks: Together = ranks or Alone()
        if ranks is not None:
            ranks.take(self.scorer, dict(backbone.model.named_parameters()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is done another way than the plan says."""
        window = self.backbone.window
        if window is None or not self.budget.shares:
            return ()
        why = "its layers look no further back, which trees of rows don't know"
        return (f"rows of more than {window} tokens are trained one by one: {why}",)

    # -- scoring ----------------------------------------------------------------------------------

    def pack(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[MicroBatch]:
        """Micro-batches of the rows. Those that reach beyond a layer's window are taken one by one, without a
        mask of ours, so that the model applies its own."""
        window = self.backbone.window or math.inf
        plain = replace(self.budget, width=0, shares=False)
        far = [i for i, row in enumerate(rows) if row.num_tokens - 1 > window]
        near = [i for i, row in enumerate(rows) if row.num_tokens - 1 <= window]
        batches: list[MicroBatch] = []
        for numbers, part in ((near, self.budget), (far, plain)):
            found = pack(
                [rows[i] for i in numbers],
                [temperatures[i] for i in numbers],
                vocab_size=self.backbone.vocab_size,
                budget=part,
                device=self.backbone.device,
            )
            batches += [replace(b, rows=tuple(numbers[k] for k in b.rows)) for b in found]
        return batches

    def score(self, batch: MicroBatch, entropy: Literal["none", "measured", "trained"] = "none") -> Scores:
        """`Scorer.forward` of the weights that are on."""
        return Scores(*self.scorer(batch, entropy))

    def logprobs(self, rows: Sequence[Row], temperatures: Sequence[float]) -> list[list[float]]:
        """Log-probs of each row's reply tokens under the weights that are on, in order.

        Every rank calls this, with rows of its own.
        """
        found: dict[int, list[float]] = {}
        with torch.no_grad(), self.ranks.together("scoring rows"):
            for batch in self.ranks.even(self.pack(rows, temperatures), trains=False):
                if batch is None:
                    self.score(self._nothing())
                    continue
                scores = self.score(batch)
                for b, number in enumerate(batch.rows):
                    found[number] = scores.logprobs_BT[b, : len(rows[number].reply_ids)].tolist()
        return [found[i] for i in range(len(rows))]

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self.backbone.model.dtype, torch.float32)

    def _nothing(self) -> MicroBatch:
        """One token that says nothing: a pass that is made only because the other ranks make one."""
        return self.pack([Row("", "", (0,), (0,), (0.0,), 0, "", "")], [1.0])[0]

    # -- supervised -------------------------------------------------------------------------------

    def supervise(
        self, learner: Learner, rows: Sequence[Row], spec: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One step on the mean negative log-likelihood (nats) of the reply tokens.

        Raises:
            RunError: a non-finite loss or gradient; no rows; another rank is gone.
        """
        if not rows:
            raise RunError(f"policy '{learner.name}' has no demonstrations to learn from")
        num_tokens = sum(len(row.reply_ids) for row in rows)
        rate = learning_rate(spec, step, num_steps)
        optimizer = learner.ready(spec, rate)
        mine = [rows[i] for i in self.ranks.share(rows)]
        done = Pass()

        def loss_of(batch: MicroBatch) -> TokenLoss:
            def loss_n(logprobs_n: Tensor, entropy_n: Tensor, place_n: Tensor) -> Tensor:
                done.right += float((logprobs_n.detach() > math.log(0.5)).sum())
                return -logprobs_n / num_tokens

            return loss_n

        with self.ranks.together(f"in step {step + 1} of policy '{learner.name}'"):
            self._backward(learner, mine, [1.0] * len(mine), loss_of, "none", done, rows, step)
            found = self._agree(learner, done, rows, step)
            norm = self._apply(learner, optimizer, spec, rows, step)
        return {
            "loss": sum(part.loss for part in found),
            "likely_frac": sum(part.right for part in found) / num_tokens,
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
        rescore: bool = False,
        token_advantages: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """One optimizer step a mini-batch, on the sum over rows and tokens of token_weight · token_loss.

        Args:
            token_advantages: turn id → one a reply token, in place of the row's advantage.
            disabled: switches the adapter off, for a reference that is the backbone.
            rescore: take ratios with log-probs of the weights as they are now, not with the sampled ones;
                `old_gap` is how far these were off, nats a token. Truncated importance sampling implies it,
                and reports `tis_mean` (the weights' mean), `tis_frac` (the share that was cut) and
                `mismatch` (KL(engine ‖ trainer), nats a token).
        Raises:
            RunError: a non-finite loss or gradient; another rank is gone.
        """
        measured, norms, total_loss = Totals(), [], 0.0
        rate = learning_rate(spec, step, num_steps)
        optimizer = learner.ready(spec, rate)
        chosen = {
            number: [i for i, item in enumerate(items) if item.minibatch == number]
            for number in sorted({item.minibatch for item in items})
        }
        shares = {
            number: [mini[k] for k in self.ranks.share([rows[i] for i in mini])]
            for number, mini in chosen.items()
        }
        with self.ranks.together(f"in step {step + 1} of policy '{learner.name}'"):
            kept = sorted(i for share in shares.values() for i in share)
            known = Known(advantages=token_advantages or {})
            if rescore or loss.importance_cap is not None:
                rows = self._rescored(items, rows, kept, known, loss, measured)
            if loss.kl_weight:
                known.references = self._reference(learner, items, rows, kept, disabled)
            if loss.kl_weight and loss.pays_kl:
                known.advantages = self._paid(items, rows, kept, known, loss, measured)
            for number in [*chosen] * loss.epochs:
                mini_rows = [rows[i] for i in chosen[number]]
                found = self._minibatch(
                    learner, items, rows, known, shares[number], loss, mini_rows, measured, step
                )
                total_loss += sum(part.loss for part in found)
                norms.append(self._apply(learner, optimizer, spec, mini_rows, step))
            totals = Totals()
            for part in self.ranks.gather(measured):
                totals.join(part)
        own = {"loss": total_loss / len(norms), "grad_norm": max(norms), "lr": rate}
        return (
            own
            | totals.means()
            | {
                "tokens": float(totals.tokens // loss.epochs),
                "turns": float(len(rows)),
                "optimizer_steps": float(len(norms)),
            }
        )

    def _minibatch(
        self,
        learner: Learner,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        known: Known,
        share: Sequence[int],
        loss: LossSpec,
        mini_rows: Sequence[Row],
        measured: Totals,
        step: int,
    ) -> list[Pass]:
        """The gradient of this rank's share of a mini-batch, joined with the others'; what each measured."""
        done = Pass()

        def loss_of(batch: MicroBatch) -> TokenLoss:
            places = [share[b] for b in batch.rows]
            dtype, row_N = self._loss_dtype, batch.row_N

            def of_tokens(values: Sequence[Sequence[float]]) -> Tensor:
                flat = [value for row in values for value in row]
                return torch.tensor(flat, dtype=dtype, device=row_N.device)

            def of_rows(values: Sequence[float]) -> Tensor:
                return torch.tensor(values, dtype=dtype, device=row_N.device)[row_N]

            old_N = of_tokens([rows[i].logprobs for i in places])
            reference_N = of_tokens([known.references[i] for i in places]) if known.references else None
            importance_N = of_tokens([known.weights[i] for i in places]) if known.weights else None
            if known.advantages:
                advantages_N = of_tokens([known.advantages[items[i].turn_id] for i in places])
            else:
                advantages_N = of_rows([items[i].advantage for i in places])
            weights_N = of_rows([items[i].token_weight for i in places])

            def loss_n(logprobs_n: Tensor, entropy_n: Tensor, place_n: Tensor) -> Tensor:
                # Each token as a row of its own: the loss knows no more of a row than its advantage, and,
                # where all its tokens are here, their mean log-ratio.
                log_ratio_n1 = None
                if loss.ratio == "sequence":
                    log_ratio_n = logprobs_n - old_N[place_n]
                    log_ratio_n1 = row_means_N(log_ratio_n, row_N[place_n], batch.lengths_B)[:, None]
                loss_n1, metrics = token_loss_BT(
                    logprobs_n[:, None],
                    old_N[place_n, None],
                    advantages_N[place_n],
                    loss,
                    None if reference_N is None else reference_N[place_n, None],
                    entropy_n[:, None],
                    log_ratio_n1,
                    None if importance_N is None else importance_N[place_n, None],
                )
                measured.add(metrics)
                return loss_n1[:, 0] * weights_N[place_n]

            return loss_n

        mine, temperatures = [rows[i] for i in share], [items[i].temperature for i in share]
        entropy = "trained" if loss.entropy else "measured"
        whole = loss.ratio == "sequence"
        self._backward(learner, mine, temperatures, loss_of, entropy, done, mini_rows, step, whole)
        return self._agree(learner, done, mini_rows, step)

    def _rescored(
        self,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        kept: Sequence[int],
        known: Known,
        loss: LossSpec,
        measured: Totals,
    ) -> list[Row]:
        """The rows, those that this rank takes with the log-probs of the weights that are on; with a cap
        the importance weights of their tokens become known."""
        found = self.logprobs([rows[i] for i in kept], [items[i].temperature for i in kept])
        gap = Mismatch()
        weights = importance_weights(
            dict(zip(kept, found, strict=True)), rows, loss.importance_cap or math.inf, gap
        )
        measured.sums["old_gap"] = gap.distance * loss.epochs
        if loss.importance_cap is not None:
            known.weights = weights
            for name, value in (("tis_mean", gap.weight), ("tis_frac", gap.capped), ("mismatch", gap.kl)):
                measured.sums[name] = value * loss.epochs
        rows = list(rows)
        for i, logprobs in zip(kept, found, strict=True):
            rows[i] = replace(rows[i], logprobs=tuple(logprobs))
        return rows

    def _paid(
        self,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        kept: Sequence[int],
        known: Known,
        loss: LossSpec,
        measured: Totals,
    ) -> dict[str, list[float]]:
        """Turn id → advantages of its tokens, the KL paid and whitened over all ranks' tokens of its role."""
        raw = {i: paid(items[i].reward, rows[i].logprobs, known.references[i], loss.kl_weight) for i in kept}
        measured.sums["kl_ref"] = loss.epochs * sum(
            a - b for i in kept for a, b in zip(rows[i].logprobs, known.references[i], strict=True)
        )
        parts: dict[str, list[float]] = {}
        for i in kept:
            parts.setdefault(items[i].role, []).extend(raw[i])
        moments: dict[str, Moments] = {}
        for part in self.ranks.gather({role: Moments.of(values) for role, values in parts.items()}):
            for role, found in part.items():
                moments[role] = moments.get(role, Moments()) + found
        return {items[i].turn_id: moments[items[i].role].whitened(raw[i]) for i in kept}

    def _reference(
        self,
        learner: Learner,
        items: Sequence[TrainItem],
        rows: Sequence[Row],
        kept: Sequence[int],
        disabled: Callable[[], AbstractContextManager[Any]] | None,
    ) -> dict[int, list[float]]:
        """The reference's log-probs of the kept rows, by their number."""
        if not learner.has_reference:
            raise RunError(
                f"policy '{learner.name}' has no reference for its KL",
                "call snapshot_reference() before training",
            )
        off = disabled if learner.reference is None and disabled is not None else learner.as_reference
        with off():
            found = self.logprobs([rows[i] for i in kept], [items[i].temperature for i in kept])
        return dict(zip(kept, found, strict=True))

    # -- the step itself --------------------------------------------------------------------------

    def _backward(
        self,
        learner: Learner,
        mine: Sequence[Row],
        temperatures: Sequence[float],
        loss_of: Callable[[MicroBatch], TokenLoss],
        entropy: Literal["none", "measured", "trained"],
        done: Pass,
        rows: Sequence[Row],
        step: int,
        whole: bool = False,
    ) -> None:
        """Add the gradients of this rank's rows; with several ranks they are the sum over all afterwards.

        With `whole` the loss sees all tokens of a micro-batch's rows at once.
        """
        if self.ranks.needs_wrapper(learner.name):
            self._wrap(learner)
        batches = self.ranks.even(self.pack(mine, temperatures), trains=True)
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with self.ranks.calling(self.scorer, learner.name, is_last) as score:
                if batch is None:
                    (score(self._nothing(), entropy)[0].sum() * 0.0).backward()
                    continue
                loss_B, watched = _watched(batch, loss_of(batch), self._loss_dtype)
                loss = score(batch, entropy, watched, whole)
                wrong = (~torch.isfinite(loss_B)).nonzero()[:, 0].tolist()
                done.bad += [mine[i].turn_id for i in sorted(batch.rows[b] for b in wrong)]
                if done.bad and isinstance(self.ranks, Alone):
                    self._stop("loss", done.bad, rows, learner, step)
                loss.backward()
                done.loss += float(loss_B.sum())

    def _wrap(self, learner: Learner) -> None:
        """Try a pass of one token, so that DDP knows whether some weights may take no part in it."""
        assert isinstance(self.ranks, Ranks)
        self.score(self._nothing()).logprobs_BT.sum().backward()
        has_unused = any(p.grad is None for p in learner.parameters.values())
        learner.forget_gradients()
        self.ranks.wrap(self.scorer, learner.name, has_unused)

    def _agree(self, learner: Learner, done: Pass, rows: Sequence[Row], step: int) -> list[Pass]:
        """What every rank measured; one rank's non-finite loss stops them all."""
        found = self.ranks.gather(done)
        bad = [turn for part in found for turn in part.bad]
        if bad:
            self._stop("loss", bad, rows, learner, step)
        return found

    def _apply(
        self, learner: Learner, optimizer: torch.optim.AdamW, spec: Optimizer, rows: Sequence[Row], step: int
    ) -> float:
        """Clip, check, step, forget the gradients; the norm before clipping."""
        assert any(p.grad is not None for p in learner.parameters.values()), "Policies.rebind was forgotten"
        norm = float(gathered(nn.utils.clip_grad_norm_(learner.parameters.values(), spec.max_grad_norm)))
        if not math.isfinite(norm):
            self._stop(f"gradient norm {norm}", [row.turn_id for row in rows], rows, learner, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _stop(self, what: str, bad: Sequence[str], rows: Sequence[Row], learner: Learner, step: int) -> None:
        """Write the batch for a post-mortem, forget the gradients, and raise."""
        file = self.dump_dir / f"nonfinite-{learner.name.replace('/', '.')}-step{step + 1}.pt"
        dumped = f"the batch is in {file}"
        if self.ranks.is_first:
            with boundary(str(file)) as caught:
                self.dump_dir.mkdir(parents=True, exist_ok=True)
                torch.save({"bad": list(bad), "rows": [asdict(row) for row in rows]}, file)
            dumped = f"the batch can't be written: {caught.error}" if caught.error else dumped
        learner.forget_gradients()
        names = ", ".join(bad[:8]) + (" …" if len(bad) > 8 else "")
        place = f"policy '{learner.name}', step {step + 1}"
        raise RunError(
            f"{place}: non-finite {what}; turns {names}; {dumped}",
            "lower the learning rate, or look at those turns' rewards",
        )


def _watched(batch: MicroBatch, loss_of: TokenLoss, dtype: torch.dtype) -> tuple[Tensor, TokenLoss]:
    """(B,) that each row's loss is added to as its tokens are seen, and the loss that does so."""
    loss_B = torch.zeros(len(batch.rows), dtype=dtype, device=batch.row_N.device)

    def loss_n(logprobs_n: Tensor, entropy_n: Tensor, place_n: Tensor) -> Tensor:
        found_n = loss_of(logprobs_n, entropy_n, place_n)
        loss_B.index_add_(0, batch.row_N[place_n], found_n.detach())
        return found_n

    return loss_B, loss_n
