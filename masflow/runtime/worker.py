"""One process of a physical model: it speaks, or learns, or both with the same weights.

Text, ids and scalars come in and go out; rows go to the model's store and come from it. Knows no Ray: whoever
makes it hands it the store as an actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models import saving
from masflow.models.adapters import StackedAdapters
from masflow.models.backbone import Backbone
from masflow.models.bare import BareSpeaker
from masflow.models.bases import load_base
from masflow.models.critics import Critics
from masflow.models.engine import Reply, Request
from masflow.models.experience import Experience, Row
from masflow.models.packs import budget_of
from masflow.models.policies import Policies
from masflow.models.precision import slow_halves
from masflow.models.publishing import PROBE_TOKENS, Payload, Probe
from masflow.models.ranks import Ranks, free_address
from masflow.models.speaking import ModuleSpeaker, Speaker
from masflow.models.tokens import ChatTokens
from masflow.models.trainer import Trainer, TrainItem
from masflow.models.transformers_engine import TransformersEngine, not_finite
from masflow.rl.chains import Link
from masflow.rl.losses import LossSpec
from masflow.runtime.backend import Actor
from masflow.runtime.messages import Answer, Delivery, Part
from masflow.spec.mapping import Optimizer
from masflow.spec.replies import Retry
from masflow.spec.runtime import Engine
from masflow.trace import Message, Turn

__all__ = ["Answer", "Delivery", "Part", "Worker"]

_PROBE = (Message("user", "what is the capital of france"),)
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_HALF_TOLERANCE = 0.15
"""Nats a token between engine and trainer on the probe, a mean over eight. In bfloat16 a logit near 32 is
known to 0.125: on five prompts Hugging Face's own passes with and without a cache came 0.005 to 0.053 apart
(single tokens 0.17), and 48 deliveries of two adapters on the same 135 million parameters 0.003 to 0.06. This
bound tells an adapter that isn't there; that the version is the right one, its checksum proves."""


class Worker:
    """A model in this process, with an engine, a trainer, or both."""

    joins: ClassVar[bool] = True
    """Requests may join those that are being answered: `advance`."""

    def __init__(self, model: ModelIR, plan: Plan, run_dir: Path, store: Actor, part: Part):
        """Load or make the base, attach adapters, and load what `init` of a policy names: a checkpoint's
        folder.

        Raises:
            RunError: the base or a policy's `init` can't be loaded.
        """
        if part.threads is not None:
            torch.set_num_threads(part.threads)
        self.model, self.part, self.store = model, part, store
        self.base = load_base(model, run_dir, plan.train.seed)
        self.backbone = Backbone(self.base.model, recompute=model.gradient_checkpointing)
        self.policies = Policies(model, self.base, plan.train.seed)
        self.tokens = ChatTokens.of(model, self.base.tokenizer, self.base.stop_ids)
        self.experience = Experience()
        """Rows that this process has at hand; all are in the store."""
        budget = replace(budget_of(self.base.model.config), shares=plan.shares_prefixes(model.name))
        self.trainer = Trainer(self.backbone, run_dir / "nonfinite", budget)
        self.critics = Critics(model, plan, run_dir, self.base) if part.learns else None
        self._continued = _continued(plan)
        self.engine = self._make_engine(model.place.rollout.engine or plan.runtime.engine)
        if part.speaks and isinstance(self.engine, TransformersEngine):
            self.engine.speaker()  # which one is found out by trying: not on weights that a resumed run lacks
        for policy in model.policies:
            if policy.init is not None:
                self.policies.start_from(policy.name, Path(policy.init) / "models")

    def _make_engine(self, spec: Engine) -> TransformersEngine:
        names = [name for p in self.model.policies if (name := self.policies.adapter_of(p.name)) is not None]
        stacked = StackedAdapters.of(self.base.model, names) if names else None
        together = stacked is not None or not names
        return TransformersEngine(
            self.backbone,
            self.tokens,
            self.experience,
            context=self.base.context,
            max_batch_tokens=spec.max_batch_tokens,
            switch=self.policies.version_of if together else self.policies.switch,
            adapter_of=self.policies.adapter_of if together else None,
            speaker=lambda: self._make_speaker(stacked, spec.decoder),
            refresh=stacked.refresh if stacked is not None else None,
            continued=self._continued,
            prefix_cache_bytes=spec.prefix_cache_bytes,
        )

    def _make_speaker(self, stacked: StackedAdapters | None, decoder: str) -> Speaker:
        bare = BareSpeaker.of(self.backbone, stacked) if decoder == "auto" else None
        return bare or ModuleSpeaker(self.backbone, stacked)

    def ready(self) -> None:
        """Answers once the model is loaded."""

    def address(self) -> str:
        """Where the first process that learns will wait for the others."""
        return free_address()

    def join(self, address: str) -> None:
        """Meet the model's other processes that learn; from now on they train as one.

        Raises:
            RunError: they don't come, or hold other weights.
        """
        part = self.part
        device = self.backbone.device.type
        ranks = Ranks(part.rank, part.world, address, part.strategy, device=device, timeout_s=part.timeout_s)
        self.trainer = Trainer(self.backbone, self.trainer.dump_dir, self.trainer.budget, ranks)
        self.policies.rebind(ranks.is_first)
        self.engine.drop()

    # -- speaking ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> Answer:
        """One reply a request, in order; their rows are in the store when this returns."""
        self._find_parents(requests)
        return self._counted(lambda: self.engine.generate(requests))

    def advance(self, requests: Sequence[Request], max_steps: int | None = None) -> Answer:
        """Let requests join those that are being answered, and draw until a reply is done, or for so many
        steps: replies that are done, in whatever order."""
        self._find_parents(requests)
        self.engine.admit(requests)
        return self._counted(lambda: self.engine.advance(max_steps))

    def drop(self) -> None:
        """Forget the requests that are being answered."""
        self.engine.drop()

    def _find_parents(self, requests: Sequence[Request]) -> None:
        absent = [r.parent for r in requests if r.parent and self.experience.get(r.parent) is None]
        if absent:
            self.experience.add(self._ask_store("known", list(dict.fromkeys(absent))))

    def _counted(self, speak: Callable[[], list[Reply]]) -> Answer:
        engine = self.engine
        before = engine.num_replies, engine.num_batches, engine.num_cached
        replies = speak()
        rows = [row for r in replies if (row := self.experience.get(r.turn_id)) is not None]
        if rows:
            self._ask_store("add", rows)
        drawn, batches = engine.num_replies - before[0], engine.num_batches - before[1]
        forked = sum(row.forked for row in rows)
        return Answer(replies, drawn, batches, forked, engine.num_cached - before[2])

    def add_rows(self, turns: Sequence[Turn]) -> None:
        """Tokenise demonstrated turns by the code path of `generate`; parents before their continuations.

        Raises:
            RunError: a demonstration doesn't fit the context.
        """
        rows: list[Row] = []
        for turn in turns:
            prompt = self.tokens.prompt(turn.messages, self.experience.get(turn.parent), turn.node)
            reply = self.tokens.reply(turn.text)
            if len(prompt.ids) + len(reply) > self.base.context:
                size = f"{len(prompt.ids) + len(reply)} tokens; the context is {self.base.context}"
                raise RunError(
                    f"a demonstration of '{turn.node}' has {size}", "shorten it, or raise the context"
                )
            policy = self.policies.of_member.get(turn.member, turn.policy)
            fields = {"parent": turn.parent, "prefix": prompt.prefix, "forked": prompt.forked}
            row = Row(turn.id, policy, prompt.ids, reply, (), -1, prompt.text, turn.text, **fields)
            self.experience.add([row])
            rows.append(row)
        self._ask_store("teach", rows)

    def _ask_store(self, method: str, *args: Any) -> Any:
        return self.store.call(method, *args).get(self.part.timeout_s)

    def _rows(self, turn_ids: Sequence[str]) -> list[Row]:
        """Rows at hand, and from the store what isn't. Raises RunError for a turn that it doesn't know."""
        absent = [t for t in dict.fromkeys(turn_ids) if self.experience.get(t) is None]
        if absent:
            self.experience.add(self._ask_store("rows", absent))
        return self.experience.rows(turn_ids)

    # -- learning ---------------------------------------------------------------------------------

    def supervise(
        self, policy: str, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One optimizer step on the mean over these turns' reply tokens; `ModelGroup.supervise`."""
        with self.policies.learning(policy) as learner:
            metrics = self.trainer.supervise(learner, self._rows(turn_ids), optimizer, step, num_steps)
        self.policies.versions[policy] += 1
        self._moved()
        return metrics

    def supervise_base(
        self, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One step of the whole backbone, adapters off: the shared start of adapters on a made base.

        Adapters are fresh meanwhile (their product is 0), so every policy speaks as the backbone does.
        """
        with self.policies.learning_backbone() as learner:
            metrics = self.trainer.supervise(learner, self._rows(turn_ids), optimizer, step, num_steps)
        self._moved()
        return metrics

    def update(
        self,
        policy: str,
        items: Sequence[TrainItem],
        loss: LossSpec,
        step: int,
        num_steps: int,
        rescore: bool = False,
    ) -> dict[str, float]:
        """`updates_per_step` optimizer steps of a policy, one a mini-batch; `ModelGroup.update`.

        Args:
            rescore: as of `Trainer.update`.
        """
        rows = self._rows([item.turn_id for item in items])
        _check_rows(policy, rows)
        self._forget()  # the memory is the trainer's now
        BareSpeaker.forget(self.backbone)
        staleness = max(self.policies.versions.get(policy, 0) - row.version for row in rows)
        with self.policies.learning(policy) as learner:
            spec, off = self.policies.by_name[policy].optimizer, self.policies.without_adapter
            known = self.critics.token_advantages if self.critics else {}
            metrics = self.trainer.update(
                learner, items, rows, loss, spec, step, num_steps, off, rescore, known
            )
        self.policies.versions[policy] += 1
        self._moved()
        return metrics | {"staleness": float(staleness)}

    # -- critics ----------------------------------------------------------------------------------

    def start_critics(self) -> None:
        """At the start of RL: critics begin from the model's weights as they are now."""
        if self.critics:
            self.critics.start_from(self.policies.weights)

    def estimate(self, links: Mapping[str, Sequence[Link]]) -> dict[str, float]:
        """What this process's critics make of a step's turns: turn id → advantage; kept for the updates.

        Args:
            links: critic's name → its turns.
        """
        assert self.critics is not None
        self._forget()  # the memory is the critics' now
        BareSpeaker.forget(self.backbone)
        every = [link.turn_id for mine in links.values() for link in mine if link.text is None]
        rows = dict(zip(every, self._rows(every), strict=True))
        return self.critics.estimate(links, rows)

    def update_critics(self, step: int, num_steps: int) -> dict[str, dict[str, float]]:
        """Critic's name → metrics of its updates on what was last estimated."""
        assert self.critics is not None
        return self.critics.update(step, num_steps)

    def _forget(self) -> None:
        if isinstance(self.engine, TransformersEngine):
            self.engine.forget()

    def _moved(self) -> None:
        """Weights of this process are others now."""
        if isinstance(self.engine, TransformersEngine):
            self.engine.moved()
        BareSpeaker.forget(self.backbone)

    # -- publishing -------------------------------------------------------------------------------

    def prove(self, policy: str) -> Delivery:
        """With engine and trainer in this process: that they agree on a probe prompt.

        Raises:
            RunError: they differ by more than 1e-3 nats (half precision: 0.15), or aren't finite.
        """
        version = self.policies.switch(policy)
        return self._delivery(policy, version, self.engine.probe_gap(policy, self._probe_ids(), self.trainer))

    def payload(self, policy: str, whole: bool = False) -> Payload:
        """A policy's weights for the workers that speak, with a probe; `whole`: for one that has only the
        base."""
        version = self.policies.switch(policy)
        ids = self._probe_ids()
        at = max(1, len(ids) - PROBE_TOKENS)
        row = Row("probe", "", ids[:at], ids[at:], (), version, "", "")
        logprobs = tuple(self.trainer.logprobs([row], [1.0])[0])
        if not all(map(math.isfinite, logprobs)):
            raise not_finite(policy, version)
        return self.policies.payload(policy, Probe(ids[:at], ids[at:], logprobs), whole=whole)

    def receive(self, payload: Payload) -> Delivery:
        """Take a published policy, and prove that it speaks here.

        Raises:
            RunError: what speaks here isn't what the trainer published; names the policy and this worker.
        """
        self.take(payload)
        version = self.policies.switch(payload.policy)
        found = saving.checksum(self.policies.learners[payload.policy].parameters)
        if (version, found) != (payload.version, payload.checksum):
            wanted = f"version {payload.version} with checksum {payload.checksum}"
            raise _undelivered(self.part.name, payload.policy, f"{wanted} was sent, {version} {found} speaks")
        assert payload.probe is not None
        logprobs = self.engine.probe(payload.policy, payload.probe.prompt_ids, payload.probe.reply_ids)
        return self._delivery(payload.policy, version, payload.probe.gap(logprobs))

    def take(self, payload: Payload) -> None:
        """Let a published policy's weights be those that speak here."""
        self.policies.receive(payload)
        self._moved()

    def _probe_ids(self) -> tuple[int, ...]:
        context = self.base.context
        return self.tokens.prompt(_PROBE).ids[: max(context - PROBE_TOKENS, context // 2)]

    def _delivery(self, policy: str, version: int, gap: float) -> Delivery:
        if math.isnan(gap):
            raise not_finite(policy, version)
        if not gap <= _TOLERANCE.get(self.base.model.dtype, _HALF_TOLERANCE):
            what = f"version {version}: the engine is {gap:.2g} nats off the trainer"
            raise _undelivered(self.part.name, policy, what)
        return Delivery(policy, version, saving.checksum(self.policies.learners[policy].parameters), gap)

    # -- state ------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Publications of each policy so far."""
        return dict(self.policies.versions)

    def clear_rows(self) -> None:
        """Forget the rows at hand."""
        self.experience.clear()
        self._forget()

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
        if self.critics:
            self.critics.save(folder)

    def load(self, folder: Path) -> None:
        """Raises RunError where `folder` belongs to other policies or weights."""
        self.policies.load(folder)
        if self.critics:
            self.critics.load(folder)
        self._moved()
        if not self.part.learns:
            self.policies.reset_optimizers()

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
            **({"critics": self.critics.describe()} if self.critics else {}),
            "notes": [
                *self.tokens.chat.notes,
                *self.trainer.notes,
                *slow_halves(self.base.model.dtype, self.backbone.device.type),
            ],
        }


def _continued(plan: Plan) -> Callable[[Request], bool]:
    """Whether a later prompt may begin with what a request and its reply are: in a conversation, between
    calls of tools, at another attempt, and everywhere where episodes branch."""
    branches = plan.sampler.kind != "trajectories"
    names = {
        role.name
        for graph in plan.workflows.values()
        for role in graph.roles
        if role.conversation != "none"
        or role.tools
        or role.handoff is not None
        or isinstance(role.reply.on_malformed, Retry)
    }
    return lambda request: branches or request.role.rpartition("/")[2] in names


def _undelivered(worker: str, policy: str, what: str) -> RunError:
    return RunError(
        f"policy '{policy}' was not delivered to '{worker}': {what}",
        "look at that worker's machine, then go on with --resume",
    )


def _check_rows(policy: str, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.policy != policy:
            raise RunError(f"turn {row.turn_id} was sampled by policy '{row.policy}', not '{policy}'")
        if not row.logprobs:
            raise RunError(f"turn {row.turn_id} is a demonstration; it has no log-probs to take a ratio with")
