"""A model group: one physical model with its policies, engine, trainer, and the only copy of its tokens.

Text, ids and scalars come in and go out; token tensors stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models import saving
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base
from masflow.models.engine import Reply, Request
from masflow.models.experience import Experience, Row, TokenTrace
from masflow.models.policies import Policies
from masflow.models.tokens import ChatTokens
from masflow.models.trainer import Trainer, TrainItem
from masflow.models.transformers_engine import TransformersEngine, not_finite
from masflow.rl.losses import LossSpec
from masflow.runtime import checkpoints
from masflow.spec.mapping import Optimizer
from masflow.trace import Message, Turn

__all__ = ["Delivery", "ModelGroup"]

_PROBE = (Message("user", "what is the capital of france"),)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Nats between engine and trainer on the probe; half precision: 0.1."""


@dataclass(frozen=True)
class Delivery:
    """Proof that the engine speaks with the trainer's weights. Made after a publication; eaten by metrics."""

    policy: str
    version: int
    checksum: str
    """Of the policy's weights."""
    logprob_gap: float
    """Largest difference between the engine's and the trainer's log-probs on the probe prompt, nats."""


class ModelGroup:
    """All that happens to one physical model in this process."""

    repeats = True

    def __init__(self, model: ModelIR, plan: Plan, run_dir: Path):
        """Load or make the base, attach adapters, and load what `init` of a policy names.

        Raises:
            RunError: the base or a policy's `init` can't be loaded.
        """
        threads = plan.runtime.threads or (1 if plan.runtime.deterministic else None)
        if threads is not None:
            torch.set_num_threads(threads)
        self.model = model
        self.base = load_base(model, run_dir, plan.train.seed)
        self.backbone = Backbone(self.base.model)
        self.policies = Policies(model, self.base, plan.train.seed)
        self._unproven: set[str] = set()
        self.tokens = ChatTokens(self.base.tokenizer, self.base.stop_ids)
        self.experience = Experience()
        self.trainer = Trainer(self.backbone, run_dir / "nonfinite")
        self.engine = TransformersEngine(
            self.backbone,
            self.tokens,
            self.experience,
            context=self.base.context,
            max_batch_tokens=plan.runtime.engine.max_batch_tokens,
            switch=self.policies.switch,
        )
        for policy in model.policies:
            if policy.init is not None:
                place = checkpoints.find(policy.init, (Path.cwd(), Path(plan.root_dir)))
                self.policies.start_from(policy.name, place / "models")
        self.trace = TokenTrace(run_dir / "tokens" / f"{model.name}.sqlite")

    # -- speaking ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; their tokens are kept by turn id, and written to the token trace."""
        for policy in [p for p in self.policies.by_name if p in self._unproven]:
            self.prove_delivery(policy)
        replies = self.engine.generate(requests)
        self.trace.add([row for r in replies if (row := self.experience.get(r.turn_id)) is not None])
        return replies

    def add_rows(self, turns: Sequence[Turn]) -> None:
        """Tokenise demonstrated turns by the code path of `generate`; parents before their continuations.

        Raises:
            RunError: a demonstration doesn't fit the context.
        """
        for turn in turns:
            prompt = self.tokens.prompt(turn.messages, self.experience.get(turn.parent))
            reply = self.tokens.reply(turn.text)
            if len(prompt.ids) + len(reply) > self.base.context:
                size = f"{len(prompt.ids) + len(reply)} tokens; the context is {self.base.context}"
                raise RunError(
                    f"a demonstration of '{turn.node}' has {size}", "shorten it, or raise the context"
                )
            policy = self.policies.of_member.get(turn.member, turn.policy)
            fields = {"parent": turn.parent, "prefix": prompt.prefix, "forked": prompt.forked}
            self.experience.add(
                [Row(turn.id, policy, prompt.ids, reply, (), -1, prompt.text, turn.text, **fields)]
            )

    # -- learning ---------------------------------------------------------------------------------

    def supervise(
        self, policy: str, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One optimizer step on the mean over these turns' reply tokens; proven when the policy next speaks.

        Where adapters sit on a base made from a config, the model's own name means its backbone.

        Args:
            step: from 0, of `num_steps`, for the schedule.
        Returns:
            `loss` (nats a token), `likely_frac` (tokens of probability above 1/2), `grad_norm` (unclipped),
            `lr`, `tokens`.
        Raises:
            RunError: a frozen or unknown policy, unknown turns, a non-finite value, a failed delivery.
        """
        if self.policies.has_adapters and self.base.made and policy == self.model.name:
            return self.supervise_base(turn_ids, optimizer, step, num_steps)
        with self.policies.learning(policy) as learner:
            metrics = self.trainer.supervise(
                learner, self.experience.rows(turn_ids), optimizer, step, num_steps
            )
        self.policies.versions[policy] += 1
        self._unproven.add(policy)
        return metrics

    def supervise_base(
        self, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One step of the whole backbone, adapters off: the shared start of adapters on a made base.

        Adapters are fresh meanwhile (their product is 0), so every policy speaks as the backbone does.
        """
        self._unproven.update(self.policies.by_name)
        with self.policies.learning_backbone() as learner:
            return self.trainer.supervise(learner, self.experience.rows(turn_ids), optimizer, step, num_steps)

    def update(
        self, policy: str, rows: Sequence[TrainItem], loss: LossSpec, step: int, num_steps: int
    ) -> dict[str, float]:
        """`updates_per_step` optimizer steps of a policy, one a mini-batch, then its publication.

        Without rows nothing moves, bit for bit, and there are no metrics.

        Args:
            step: from 0, of `num_steps`, for the schedule.
        Raises:
            RunError: as `supervise`; a turn of another policy, or a demonstration.
        """
        if not rows:
            return {}
        kept = self.experience.rows([row.turn_id for row in rows])
        _check_rows(policy, kept)
        staleness = max(self.policies.versions.get(policy, 0) - row.version for row in kept)
        with self.policies.learning(policy) as learner:
            spec, off = self.policies.by_name[policy].optimizer, self.policies.without_adapter
            metrics = self.trainer.update(learner, rows, kept, loss, spec, step, num_steps, off)
        self.policies.versions[policy] += 1
        delivery = self.prove_delivery(policy)
        facts = {"version": delivery.version, "delivery_gap": delivery.logprob_gap, "staleness": staleness}
        return metrics | {name: float(value) for name, value in facts.items()}

    def prove_delivery(self, policy: str) -> Delivery:
        """Compare the engine's log-probs of a probe prompt with the trainer's, and sum up the weights.

        Raises:
            RunError: they differ by more than 1e-3 nats (half precision: 0.1), or aren't finite.
        """
        version = self.policies.switch(policy)
        prompt = self.tokens.prompt(_PROBE).ids[: self.base.context - 2]
        gap = self.engine.probe_gap(prompt, self.trainer)
        if math.isnan(gap):
            raise not_finite(policy, version)
        if not gap <= _TOLERANCE.get(self.base.model.dtype, 0.1):
            raise RunError(
                f"policy '{policy}' version {version}: the engine is {gap:.2g} nats off the trainer"
            )
        self._unproven.discard(policy)
        return Delivery(policy, version, saving.checksum(self.policies.learners[policy].parameters), gap)

    # -- state ------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Publications of each policy so far."""
        return dict(self.policies.versions)

    def traffic(self) -> tuple[int, int, int]:
        """Since the model was loaded: replies drawn, decoding batches, and rows that forked because the chat
        template rewrote their history."""
        return self.engine.num_replies, self.engine.num_batches, self.experience.num_forked

    def clear_rows(self) -> None:
        """Forget the rows; the token trace on disk keeps them."""
        self.experience.clear()

    def reset_optimizers(self) -> None:
        """Begin afresh: moments and step counts go, weights stay."""
        self.policies.reset_optimizers()

    def snapshot_reference(self) -> None:
        """Keep today's weights as what a KL penalty compares with."""
        self.policies.snapshot_reference()

    def save(self, folder: Path) -> None:
        """Write policies, optimizers, versions and random state; `load` gives back exactly them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.policies.save(folder)

    def load(self, folder: Path) -> None:
        """Raises RunError where `folder` belongs to other policies or weights."""
        self.policies.load(folder)
        self._unproven.update(self.policies.by_name)

    def describe(self) -> dict[str, Any]:
        """Parameters, bytes, device, context: for progress and `explain`."""
        everything = list(self.base.model.parameters())
        sizes = {
            name: sum(p.numel() for p in learner.parameters.values())
            for name, learner in self.policies.learners.items()
            if self.policies.by_name[name].train
        }
        return {
            "parameters": sum(p.numel() for p in everything),
            "trainable": sizes,
            "bytes": sum(p.numel() * p.element_size() for p in everything),
            "device": str(self.backbone.device),
            "dtype": str(self.base.model.dtype).removeprefix("torch."),
            "context": self.base.context,
            "vocabulary": len(self.base.tokenizer),
        }

    def close(self) -> None:
        self.trace.close()


def _check_rows(policy: str, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.policy != policy:
            raise RunError(f"turn {row.turn_id} was sampled by policy '{row.policy}', not '{policy}'")
        if not row.logprobs:
            raise RunError(f"turn {row.turn_id} is a demonstration; it has no log-probs to take a ratio with")
