"""A critic: a language model's body with a value head a role, its own optimizer, and one batch at a time.

Shapes: N values (reply tokens of all rows, or one a row), D hidden, R roles. Values are taken where a reply
token is predicted: the state before it. `estimate` is asked once a step, before the first update; `update`
learns from what it found. Knows no policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from masflow.compiler.plan import CriticIR, ModelIR
from masflow.errors import RunError
from masflow.models import saving
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base
from masflow.models.experience import Row
from masflow.models.learner import Learner, learning_rate
from masflow.models.packs import Budget, MicroBatch, budget_of
from masflow.models.trainer import Trainer
from masflow.rl.chains import Link
from masflow.rl.gae import chain_gae, explained_variance, token_gae, whiten
from masflow.spec.experiment import Gae
from masflow.spec.mapping import ConfigBase, Optimizer

__all__ = ["Critic", "Estimate", "value_loss_N"]


def value_loss_N(
    values_N: Tensor, old_N: Tensor, targets_N: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """½ max((V - R)², (V_c - R)²), V_c = V held within `clip` of the old value: PPO's value clipping (as in
    arXiv 2005.12729, section 3; MAPPO, arXiv 2103.01955, appendix A). Minimise its mean.

    Args:
        values_N: (N,) under the weights in training, with gradient.
        old_N: (N,) before the step's first update.
        targets_N: (N,) old value plus advantage, not whitened.
        clip: None: not clipped.
    Returns:
        (N,) losses, and (N,) bool: where the clipped one decided and is flat.
    """
    plain_N = (values_N - targets_N) ** 2
    if clip is None:
        return plain_N / 2, torch.zeros_like(plain_N, dtype=torch.bool)
    held_N = old_N + (values_N - old_N).clamp(-clip, clip)
    clipped_N = (held_N - targets_N) ** 2
    return torch.maximum(plain_N, clipped_N) / 2, (clipped_N > plain_N).detach()


@dataclass(frozen=True)
class Estimate:
    """What one step's batch was worth before its updates. Rows in the order of the links."""

    links: tuple[Link, ...]
    rows: tuple[Row, ...]
    """As the critic reads them."""
    old: tuple[np.ndarray, ...]
    """(T,) float64 of each row's reply tokens; (1,) of whole turns."""
    targets: tuple[np.ndarray, ...]
    advantages: tuple[np.ndarray, ...]
    """Whitened a role."""
    cut: int = 0
    """Texts that were longer than the critic's context."""


class Critic:
    """One value network of a plan, in the process that trains its model."""

    def __init__(self, spec: CriticIR, host: ModelIR, run_dir: Path, seed: int, shares: bool = True):
        """Load the base anew, without its language head, and put heads of zeros on it: values begin at 0.

        Raises:
            RunError: the base can't be loaded, or its body can't be told from its head.
        """
        self.spec = spec
        # The host's name finds the folder of a base that is made from a config: it starts from the same.
        like = replace(
            host, base=spec.base, base_hash=spec.base_hash, train="full", dtype="auto", quantize=None
        )
        base = load_base(like if spec.base == host.base else replace(like, context=None), run_dir, seed)
        self.tokenizer, self.context = base.tokenizer, base.context
        self.backbone = Backbone(base.model, recompute=host.gradient_checkpointing)
        if not self.backbone.is_split:
            message = f"critic '{spec.name}': the body of '{spec.base}' can't be told from its language head"
            raise RunError(message, "write algorithm: {critic: {base: …}} with another base")
        body: nn.Module = base.model.base_model
        width = int(base.model.config.hidden_size)
        self.head = nn.Linear(width, len(spec.roles), device=self.backbone.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        frozen = set(map(id, _frozen(spec.base, base.model)))
        weights = {n: p for n, p in body.named_parameters() if id(p) not in frozen}
        heads = {f"value_head.{n}": p for n, p in self.head.named_parameters()}
        self.learner = Learner(spec.name, weights | heads)
        for parameter in self.learner.parameters.values():
            parameter.requires_grad_(True)
        budget = replace(budget_of(base.model.config), shares=shares)
        self._packing = Trainer(self.backbone, run_dir / "nonfinite", _without_logits(budget))
        self.estimated: Estimate | None = None

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.learner.parameters.values())

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of a model of the same base, by their names there; heads stay as they are.

        Where they have other shapes (a base in four bits), the critic keeps those of its base.
        """
        own = dict(self.backbone.model.named_parameters())
        if any(name not in weights or weights[name].shape != p.shape for name, p in own.items()):
            return
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(weights[name])

    # -- values -----------------------------------------------------------------------------------

    def values_N(self, batch: MicroBatch, heads_B: Tensor) -> Tensor:
        """(N,) float32 or wider, with gradient: of each of the micro-batch's predictions by its row's head.

        Args:
            heads_B: (B,) int64, place of each row's role among the heads.
        """
        is_plain = batch.mask is None and batch.blocks is None
        hidden_STD = self.backbone.hidden(
            batch.ids_ST,
            mask=batch.mask,
            positions_BT=None if is_plain else batch.positions_ST,
            blocks=batch.blocks,
        )
        hidden_UD = hidden_STD.flatten(0, 1)[batch.source_U]
        values_UR = self.head(hidden_UD.to(self.head.weight.dtype))
        return values_UR[batch.prediction_N, heads_B[batch.row_N]]

    def _batches(self, rows: Sequence[Row], links: Sequence[Link]) -> Iterator[tuple[MicroBatch, Tensor]]:
        heads = [self.spec.roles.index(link.role) for link in links]
        for batch in self._packing.pack(rows, [1.0] * len(rows)):
            yield batch, torch.tensor([heads[i] for i in batch.rows], device=self.backbone.device)

    def values(self, rows: Sequence[Row], links: Sequence[Link]) -> list[np.ndarray]:
        """(T,) float64 of each row: values before its reply tokens."""
        found: dict[int, np.ndarray] = {}
        with torch.no_grad():
            for batch, heads_B in self._batches(rows, links):
                values_N = self.values_N(batch, heads_B).double().cpu().numpy()
                parts = np.split(values_N, np.cumsum(batch.lengths_B.cpu().numpy())[:-1])
                found.update(zip(batch.rows, parts, strict=True))
        return [found[i] for i in range(len(rows))]

    # -- a step -----------------------------------------------------------------------------------

    def estimate(self, links: Sequence[Link], rows: Mapping[str, Row], by_token: bool, gae: Gae) -> Estimate:
        """Old values, targets and whitened advantages of a step's turns; kept for `update`.

        Args:
            rows: turn id → its tokens; those of links with a text are not asked for.
            by_token: a value a reply token; else one a turn, of what it was asked.
        """
        read, cut = [], 0
        for link in links:
            row, is_cut = self._read(link, rows, by_token)
            read.append(row)
            cut += is_cut
        old = self.values(read, links)
        raw = _token_advantages(old, links, gae) if by_token else _turn_advantages(old, links, gae)
        targets = [values + advantages for values, advantages in zip(old, raw, strict=True)]
        whitened: list[np.ndarray] = list(raw)
        for role in self.spec.roles:
            mine = [i for i, link in enumerate(links) if link.role == role]
            if mine:
                every = whiten(np.concatenate([raw[i] for i in mine]))
                parts = np.split(every, np.cumsum([len(raw[i]) for i in mine])[:-1])
                for i, part in zip(mine, parts, strict=True):
                    whitened[i] = part
        self.estimated = Estimate(tuple(links), tuple(read), tuple(old), tuple(targets), tuple(whitened), cut)
        return self.estimated

    def _read(self, link: Link, rows: Mapping[str, Row], by_token: bool) -> tuple[Row, bool]:
        """The row as the critic reads it; of a text its last tokens, and whether there were more."""
        if link.text is None:
            row = rows[link.turn_id]
            return (row if by_token else replace(row, reply_ids=row.reply_ids[:1])), False
        ids = self.tokenizer(link.text, add_special_tokens=False)["input_ids"]
        kept = tuple(ids[-(self.context - 1) :])
        return Row(link.turn_id, "", kept, kept[-1:], (), 0, "", ""), len(kept) < len(ids)

    def update(
        self, spec: Optimizer, clip: float | None, epochs: int, step: int, num_steps: int
    ) -> dict[str, float]:
        """One optimizer step a mini-batch and epoch on the mean value loss of what was last estimated.

        Returns:
            `value_loss, clip_frac` (means over the updates), `explained_variance` (of the old values),
            `grad_norm` (unclipped, the largest), `lr, values, optimizer_steps, value_mean, target_mean`, and
            of a critic that reads text `cut_frac`.
        Raises:
            RunError: nothing was estimated; a non-finite value or gradient.
        """
        found, self.estimated = self.estimated, None
        if found is None or not found.links:
            raise RunError(f"critic '{self.spec.name}' has nothing to learn from", "estimate first")
        rate = learning_rate(spec, step, num_steps)
        optimizer = self.learner.ready(spec, rate)
        numbers = sorted({link.minibatch for link in found.links})
        norms, sums = [], np.zeros(3)
        for number in numbers * epochs:
            mine = [i for i, link in enumerate(found.links) if link.minibatch == number]
            sums += self._backward(found, mine, clip, step)
            norms.append(self._apply(optimizer, spec, step))
        old_N, targets_N = np.concatenate(found.old), np.concatenate(found.targets)
        metrics = {
            "value_loss": sums[0] / sums[2],
            "clip_frac": sums[1] / sums[2],
            "explained_variance": explained_variance(old_N, targets_N),
            "grad_norm": max(norms),
            "lr": rate,
            "values": len(old_N),
            "optimizer_steps": len(norms),
            "value_mean": old_N.mean(),
            "target_mean": targets_N.mean(),
        }
        if found.links[0].text is not None:
            metrics["cut_frac"] = found.cut / len(found.links)
        return {name: float(value) for name, value in metrics.items()}

    def _backward(self, found: Estimate, mine: Sequence[int], clip: float | None, step: int) -> np.ndarray:
        """Gradients of the mean loss over these rows; (sum of losses, clipped values, values)."""
        rows, links = [found.rows[i] for i in mine], [found.links[i] for i in mine]
        count = sum(len(found.old[i]) for i in mine)
        sums = np.array([0.0, 0.0, float(count)])
        for batch, heads_B in self._batches(rows, links):
            values_N = self.values_N(batch, heads_B)

            def of(parts: Sequence[np.ndarray], batch: MicroBatch = batch, like: Tensor = values_N) -> Tensor:
                flat = np.concatenate([parts[mine[b]] for b in batch.rows])
                return torch.as_tensor(flat, dtype=like.dtype, device=like.device)

            loss_N, clipped_N = value_loss_N(values_N, of(found.old), of(found.targets), clip)
            if not bool(torch.isfinite(loss_N).all()):
                self._stop("value loss", [rows[b].turn_id for b in batch.rows], step)
            (loss_N.sum() / count).backward()
            sums[:2] += float(loss_N.detach().sum()), float(clipped_N.sum())
        return sums

    def _apply(self, optimizer: torch.optim.AdamW, spec: Optimizer, step: int) -> float:
        norm = float(nn.utils.clip_grad_norm_(self.learner.parameters.values(), spec.max_grad_norm))
        if not math.isfinite(norm):
            self._stop(f"gradient norm {norm}", [], step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _stop(self, what: str, turns: Sequence[str], step: int) -> None:
        self.learner.forget_gradients()
        names = f"; turns {', '.join(turns[:8])}" if turns else ""
        message = f"critic '{self.spec.name}', step {step + 1}: non-finite {what}{names}"
        raise RunError(message, "lower algorithm.critic.optimizer.lr, or look at those turns' rewards")

    # -- on disk ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Weights, and the optimizer where there is one; `load` gives back exactly them."""
        saving.save_learner(folder, self.learner)

    def load(self, folder: Path, has_optimizer: bool) -> None:
        """Raises RunError where the folder lacks this critic, or holds another one's weights."""
        optimizers = (self.learner.name,) if has_optimizer else ()
        saving.load_alone(folder, self.learner, saving.file_name(self.learner.name), optimizers)


def _token_advantages(old: Sequence[np.ndarray], links: Sequence[Link], gae: Gae) -> list[np.ndarray]:
    gamma = 1.0 if gae.gamma is None else gae.gamma
    return [
        token_gae(values_T, link.reward, gamma, gae.lam) for values_T, link in zip(old, links, strict=True)
    ]


def _turn_advantages(old: Sequence[np.ndarray], links: Sequence[Link], gae: Gae) -> list[np.ndarray]:
    place = {link.turn_id: i for i, link in enumerate(links)}
    successors = [place[link.successor] if link.successor is not None else None for link in links]
    rewards_N = np.array([link.reward for link in links])
    decays_N = np.array([link.decay for link in links])
    values_N = np.array([float(values[0]) for values in old])
    return [np.array([a]) for a in chain_gae(values_N, rewards_N, successors, decays_N, gae.lam)]


def _frozen(base: Any, model: Any) -> list[Tensor]:
    """Weights that the base's config keeps as they are."""
    is_kept = isinstance(base, ConfigBase) and "embeddings" in base.freeze
    return [model.get_input_embeddings().weight] if is_kept else []


def _without_logits(budget: Budget) -> Budget:
    """A critic makes no logits, so only tokens and masks bound its micro-batches."""
    return replace(budget, logits=1 << 62)
