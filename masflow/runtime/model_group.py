"""A model group: one physical model with its policies, engine, trainer, and the only copy of its tokens.

Text, ids and scalars come in and go out; token tensors stay. A saved group holds `model.json` (versions,
kinds), `(base).safetensors` where the backbone under adapters was trained here, and each policy's weights
and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.errors import RunError
from masflow.models import adapters, saving
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base, mix_seed
from masflow.models.engine import Reply, Request
from masflow.models.experience import Experience, Row, TokenTrace
from masflow.models.tokens import ChatTokens
from masflow.models.trainer import Learner, Trainer, TrainItem
from masflow.models.transformers_engine import TransformersEngine
from masflow.rl.losses import LossSpec
from masflow.runtime import checkpoints
from masflow.spec.mapping import Optimizer
from masflow.trace import Message, Turn

__all__ = ["Delivery", "ModelGroup"]

_BASE = "(base)"
_PROBE = (Message("user", "what is the capital of france"),)


@dataclass(frozen=True)
class Delivery:
    """Proof that the engine speaks with the trainer's weights. Made after a publication; eaten by metrics."""

    policy: str
    version: int
    checksum: str
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
        if plan.runtime.deterministic:
            torch.set_num_threads(plan.runtime.threads)
        self.model, self.plan, self.run_dir = model, plan, run_dir
        self.base = load_base(model, run_dir, plan.train.seed)
        self.backbone = Backbone(self.base.model)
        self.tokens = ChatTokens(self.base.tokenizer, self.base.stop_ids)
        self.experience = Experience()
        self.trace = TokenTrace(run_dir / "tokens" / f"{model.name}.sqlite")
        self.trainer = Trainer(self.backbone, run_dir / "nonfinite")
        self._policies: dict[str, PolicyIR] = {p.name: p for p in model.policies}
        self._versions = dict.fromkeys(self._policies, 0)
        self._policy_of = {role: p.name for p in model.policies for role in p.roles}
        self._on: str | None = None
        self._base_changed = False
        self._learners = self._make_learners()
        self.engine = TransformersEngine(
            self.backbone,
            self.tokens,
            self.experience,
            context=self.base.context,
            max_batch_tokens=plan.runtime.engine.max_batch_tokens,
            switch=self._switch,
        )
        for policy in model.policies:
            if policy.init is not None:
                self._init_policy(policy)

    def _make_learners(self) -> dict[str, Learner]:
        base = adapters.base_parameters(self.base.model)
        frozen = self._frozen_names()
        trainable = {name: p for name, p in base.items() if name not in frozen}
        if self.model.train != "lora":
            return {name: Learner(name, trainable) for name in self._policies}
        names = [_adapter(p) for p in self.model.policies]
        adapters.attach(
            self.base.model, names, self.model.lora, mix_seed(self.plan.train.seed, self.model.name + "/lora")
        )
        learners = {
            p.name: Learner(p.name, adapters.adapter_parameters(self.base.model, _adapter(p)))
            for p in self.model.policies
        }
        return learners | {_BASE: Learner(f"{self.model.name}(base)", trainable)}

    def _frozen_names(self) -> set[str]:
        """Embeddings that the base's config freezes, under every name that they are tied to."""
        spec = self.model.base
        if spec is None or isinstance(spec, str) or "embeddings" not in spec.freeze:
            return set()
        weight = self.base.model.get_input_embeddings().weight
        return {name for name, p in self.base.model.named_parameters(remove_duplicate=False) if p is weight}

    # -- speaking ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; their tokens are kept by turn id, and written to the token trace."""
        replies = self.engine.generate(requests)
        kept = [row for r in requests if (row := self.experience.get(r.turn_id)) is not None]
        if kept:
            self.trace.add(kept)
        return replies

    def add_rows(self, turns: Sequence[Turn]) -> None:
        """Tokenise demonstrated turns by the code path of `generate`; parents before their continuations."""
        for turn in turns:
            prompt = self.tokens.prompt(turn.messages, self.experience.get(turn.parent))
            reply = self.tokens.reply(turn.text)
            if len(prompt.ids) + len(reply) > self.base.context:
                size = f"{len(prompt.ids) + len(reply)} tokens; the context is {self.base.context}"
                raise RunError(
                    f"a demonstration of '{turn.node}' has {size}", "shorten it, or raise the context"
                )
            policy = self._policy_of.get(turn.member, turn.policy)
            row = Row(turn.id, policy, prompt.ids, reply, (), -1, prompt.text, turn.text)
            self.experience.add([row])

    def _switch(self, policy: str) -> int:
        """Let a policy speak (and learn); returns its version."""
        if policy not in self._policies:
            raise RunError(
                f"model '{self.model.name}' has no policy '{policy}'; it has: {', '.join(self._policies)}"
            )
        if self.model.train == "lora" and self._on != policy:
            adapters.activate(self.base.model, _adapter(self._policies[policy]))
        self._on = policy
        return self._versions[policy]

    # -- learning ---------------------------------------------------------------------------------

    def supervise(
        self, policy: str, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One optimizer step on the mean over these turns' reply tokens; `step` counts from 0.

        Where adapters sit on a base made from a config, the model's own name means its backbone.
        """
        if self.model.train == "lora" and self.base.made and policy == self.model.name:
            return self.supervise_base(turn_ids, optimizer, step, num_steps)
        learner = self._learner(policy)
        with self._learning(policy, learner):
            metrics = self.trainer.supervise(
                learner, self.experience.rows(turn_ids), optimizer, step, num_steps
            )
        self._publish(policy)
        return metrics

    def supervise_base(
        self, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        """One step of the whole backbone, adapters off: the shared start of adapters on a made base.

        Adapters are fresh meanwhile (their product is 0), so every policy speaks as the backbone does.
        """
        learner = self._learners[_BASE]
        with adapters.switched_off(self.base.model), _gradients(learner):
            metrics = self.trainer.supervise(
                learner, self.experience.rows(turn_ids), optimizer, step, num_steps
            )
        self._base_changed = True
        for policy in self._policies:
            self._versions[policy] += 1
        return metrics

    def update(
        self, policy: str, rows: Sequence[TrainItem], loss: LossSpec, step: int, num_steps: int
    ) -> dict[str, float]:
        """`updates_per_step` optimizer steps of a policy, one a mini-batch, then its publication.

        Without rows nothing moves, bit for bit, and there are no metrics.
        """
        if not rows:
            return {}
        learner = self._learner(policy)
        kept = self.experience.rows([row.turn_id for row in rows])
        self._check_rows(policy, kept)
        off: Callable[[], AbstractContextManager[None]] | None = None
        if self.model.train == "lora":
            off = lambda: adapters.switched_off(self.base.model)  # noqa: E731
        spec = self._policies[policy].optimizer
        with self._learning(policy, learner):
            metrics = self.trainer.update(learner, rows, kept, loss, spec, step, num_steps, off)
        staleness = max(self._versions[policy] - row.version for row in kept)
        delivery = self._publish(policy)
        return metrics | {
            "staleness": float(staleness),
            "delivery_gap": delivery.logprob_gap,
            "version": float(delivery.version),
        }

    def _check_rows(self, policy: str, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.policy != policy:
                raise RunError(f"turn {row.turn_id} was sampled by policy '{row.policy}', not '{policy}'")
            if not row.logprobs:
                raise RunError(
                    f"turn {row.turn_id} is a demonstration; it has no log-probs to take a ratio with"
                )

    def _learner(self, policy: str) -> Learner:
        self._switch(policy)
        if not self._policies[policy].train:
            raise RunError(
                f"policy '{policy}' is frozen", "leave its roles out of training, or write `train: full`"
            )
        return self._learners[policy]

    def _learning(self, policy: str, learner: Learner) -> AbstractContextManager[None]:
        self._switch(policy)
        return _gradients(learner)

    def _publish(self, policy: str) -> Delivery:
        """Count the version up and prove that the engine has it."""
        self._versions[policy] += 1
        return self.prove_delivery(policy)

    def prove_delivery(self, policy: str) -> Delivery:
        """Compare the engine's log-probs of a probe prompt with the trainer's, and sum up the weights.

        Raises:
            RunError: they differ by more than 1e-3 nats (float32) or 0.1 (half precision).
        """
        version = self._switch(policy)
        learner = self._learners[policy]
        prompt = self.tokens.prompt(_PROBE)
        gap = self.engine.probe_gap(prompt.ids[: self.base.context - 2], self.trainer)
        weight = next(iter(learner.parameters.values()))
        if not gap <= (
            1e-3 if weight.dtype == torch.float32 and self.base.model.dtype == torch.float32 else 0.1
        ):
            raise RunError(
                f"policy '{policy}' version {version}: the engine is {gap:.2g} nats off the trainer"
            )
        return Delivery(policy, version, saving.checksum(learner.parameters), gap)

    # -- state ------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Publications of each policy so far."""
        return dict(self._versions)

    def clear_rows(self) -> None:
        """Forget the rows; the token trace on disk keeps them."""
        self.experience.clear()

    def reset_optimizers(self) -> None:
        for learner in self._learners.values():
            learner.optimizer = None

    def snapshot_reference(self) -> None:
        """Keep today's weights as the KL's reference; of a fresh adapter, the bare backbone."""
        for learner in self._trained():
            weights = {name: p.detach().clone() for name, p in learner.parameters.items()}
            is_fresh = self.model.train == "lora" and all(
                not bool(w.any()) for n, w in weights.items() if "lora_B" in n
            )
            learner.reference, learner.has_reference = (None if is_fresh else weights), True

    def _trained(self) -> list[Learner]:
        return [self._learners[p.name] for p in self.model.policies if p.train]

    def save(self, folder: Path) -> None:
        """Write every policy with its optimizer, the backbone if trained here, versions, random state."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, learner in self._learners.items():
            if name != _BASE:
                saving.save_learner(folder, learner)
        base = self._learners.get(_BASE)
        if base is not None and self._base_changed:
            saving.save_learner(folder, _renamed(base))
        torch.save(torch.get_rng_state(), folder / "random.pt")
        facts = {
            "model": self.model.name,
            "train": self.model.train,
            "policies": {p.name: {"adapter": p.adapter, "roles": list(p.roles)} for p in self.model.policies},
            "versions": self._versions,
            "base_changed": self._base_changed,
            "has_reference": any(learner.has_reference for learner in self._learners.values()),
            "num_forked": self.experience.num_forked,
        }
        saving.write_facts(folder, facts)

    def load(self, folder: Path) -> None:
        """The exact reverse of `save`.

        Raises:
            RunError: the folder belongs to other policies or weights.
        """
        facts = saving.read_facts(folder)
        if set(facts["policies"]) != set(self._policies) or facts["train"] != self.model.train:
            known = ", ".join(facts["policies"])
            raise RunError(
                f"{folder} holds the policies {known} ({facts['train']})",
                "use the mapping that it was saved with",
            )
        self._base_changed = facts["base_changed"]
        base = self._learners.get(_BASE)
        if base is not None and self._base_changed:
            saved = _renamed(base)
            saving.load_learner(folder, saved)
            base.optimizer, base.reference = saved.optimizer, saved.reference
        for name, learner in self._learners.items():
            if name != _BASE:
                saving.load_learner(folder, learner)
            learner.has_reference = facts["has_reference"]
        self._versions = {name: int(facts["versions"][name]) for name in self._policies}
        self.experience.num_forked = int(facts["num_forked"])
        torch.set_rng_state(torch.load(folder / "random.pt", weights_only=True))

    def _init_policy(self, policy: PolicyIR) -> None:
        """Start a policy from an earlier run's: of its own name, else of its roles, else the only one."""
        assert policy.init is not None
        places = (Path.cwd(), Path(self.plan.root_dir))
        models = checkpoints.find(policy.init, places) / "models"
        candidates = {
            (part, name): set(fact["roles"]) | {name}
            for part in sorted(p for p in models.iterdir() if p.is_dir())
            for name, fact in saving.read_facts(part)["policies"].items()
        }
        wanted = {policy.name, *policy.roles}
        found = [place for place, names in candidates.items() if names & wanted] or list(candidates)
        exact = [place for place in found if place[1] == policy.name] or found
        if len(exact) != 1:
            known = ", ".join(name for _, name in candidates)
            raise RunError(
                f"policy '{policy.name}': can't tell which policy of {policy.init} to start from: {known}"
            )
        self._load_weights(policy, *exact[0])

    def _load_weights(self, policy: PolicyIR, part: Path, source: str) -> None:
        """Weights alone: full to full, adapter to adapter and backbone, full to the backbone of adapters."""
        facts = saving.read_facts(part)
        file = part / f"{saving.file_name(source)}.safetensors"
        is_adapter = facts["train"] == "lora"
        if is_adapter and self.model.train != "lora":
            raise RunError(
                f"policy '{policy.name}' is full, and {policy.init} holds an adapter", "write `train: lora`"
            )
        if self.model.train == "lora" and (not is_adapter or facts["base_changed"]):
            backbone = part / "(base).safetensors" if is_adapter else file
            self._load_backbone(policy, backbone)
        if is_adapter or self.model.train != "lora":
            saving.load_weights(file, self._learners[policy.name].parameters)

    def _load_backbone(self, policy: PolicyIR, file: Path) -> None:
        base = self._learners[_BASE]
        before = saving.checksum(base.parameters)
        saving.load_weights(file, base.parameters)
        if self._base_changed and saving.checksum(base.parameters) != before:
            raise RunError(
                f"policy '{policy.name}': {policy.init} has another backbone than the model's other adapters"
            )
        self._base_changed = True

    def describe(self) -> dict[str, Any]:
        """Parameters, bytes, device, context: for progress and `explain`."""
        everything = list(self.base.model.parameters())
        return {
            "parameters": sum(p.numel() for p in everything),
            "trainable": {
                name: sum(p.numel() for p in learner.parameters.values())
                for name, learner in self._learners.items()
                if name != _BASE
            },
            "bytes": sum(p.numel() * p.element_size() for p in everything),
            "device": str(self.backbone.device),
            "dtype": str(self.base.model.dtype).removeprefix("torch."),
            "context": self.base.context,
            "vocabulary": len(self.base.tokenizer),
            "forked_rows": self.experience.num_forked,
        }

    def close(self) -> None:
        self.trace.close()


class _gradients(AbstractContextManager[None]):
    """Exactly this learner's weights take gradients inside the block; none do after it."""

    def __init__(self, learner: Learner):
        self.learner = learner

    def __enter__(self) -> None:
        for parameter in self.learner.parameters.values():
            parameter.requires_grad_(True)

    def __exit__(self, *_: object) -> None:
        for parameter in self.learner.parameters.values():
            parameter.requires_grad_(False)


def _renamed(base: Learner) -> Learner:
    """The backbone's learner under its file name."""
    return Learner(_BASE, base.parameters, base.optimizer, base.reference)


def _adapter(policy: PolicyIR) -> str:
    """PEFT's name of a policy's adapter; it may hold no dots."""
    return f"policy_{(policy.adapter or 'default').replace('.', '_').replace('/', '_')}"
