"""The policies of one physical model: who is on, whose weights learn, and how they are saved, exactly.

One policy is the whole model, or each is an adapter on its backbone. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from urllib.parse import quote

import torch
from safetensors.torch import load_file

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.errors import RunError
from masflow.models import adapters, saving
from masflow.models.bases import Base, mix_seed
from masflow.models.publishing import Payload, Probe, as_tensor, make_payload
from masflow.models.trainer import Learner
from masflow.models.weights import checksum, gathered, put
from masflow.spec.mapping import ConfigBase

__all__ = ["Policies"]

BACKBONE = "(backbone)"
"""File name and key of the weights under adapters."""
KEPT = "(frozen).safetensors"
"""Weights that the base's config freezes: another run, or another model's name, makes others."""


class Policies:
    """Weights, versions and optimizers of a model's policies; at any time one of them is on."""

    def __init__(self, model: ModelIR, base: Base, seed: int):
        """Attach fresh adapters where the mapping asks for them."""
        self.model, self.base = model, base
        self.by_name: dict[str, PolicyIR] = {p.name: p for p in model.policies}
        self.versions = dict.fromkeys(self.by_name, 0)
        self.of_member = {role: p.name for p in model.policies for role in p.roles}
        self.has_adapters = model.train == "lora"
        self.is_first = True
        self._on: str | None = None
        self._changed: set[str] = {p.name for p in model.policies if p.train}
        self._unsent: set[str] = set()
        """Which of `BACKBONE` and `KEPT` moved since a payload took them along."""
        self.weights = weights = adapters.base_parameters(base.model)
        self.kept = {name: weights[name] for name in sorted(self._frozen_names() & set(weights))}
        backbone = {name: p for name, p in weights.items() if name not in self.kept}
        self.backbone = Learner(BACKBONE, backbone)
        self.learners = {
            name: Learner(name, backbone if self._learns(name) else weights) for name in self.by_name
        }
        if self.has_adapters:
            shapes = {_adapter(p): model.lora_of(p) for p in model.policies}
            adapters.attach(base.model, shapes, mix_seed(seed, model.name + "/lora"))
            for p in model.policies:
                self.learners[p.name] = Learner(p.name, adapters.adapter_parameters(base.model, _adapter(p)))

    def rebind(self, is_first: bool = True) -> None:
        """Look the weights up again, after a sharding trainer replaced them.

        Args:
            is_first: of the processes that share the weights, the one that writes and publishes them.
        """
        self.is_first = is_first
        self.weights = adapters.base_parameters(self.base.model)
        self.kept = {name: self.weights[name] for name in self.kept}
        for learner in (self.backbone, *self.learners.values()):
            found = self.weights
            if self.has_adapters and learner is not self.backbone:
                adapter = _adapter(self.by_name[learner.name])
                found = adapters.adapter_parameters(self.base.model, adapter)
            learner.parameters = {name: found[name] for name in learner.parameters}

    def _learns(self, name: str) -> bool:
        return self.by_name[name].train

    def _frozen_names(self) -> set[str]:
        """Embeddings that the base's config freezes, under every name that they are tied to."""
        spec = self.model.base
        if not isinstance(spec, ConfigBase) or "embeddings" not in spec.freeze:
            return set()
        weight = self.base.model.get_input_embeddings().weight
        return {name for name, p in self.base.model.named_parameters(remove_duplicate=False) if p is weight}

    # -- who is on --------------------------------------------------------------------------------

    def switch(self, policy: str) -> int:
        """Let a policy speak and learn; returns its version.

        Raises:
            RunError: this model has no such policy.
        """
        version = self.version_of(policy)
        if self.has_adapters and self._on != policy:
            adapters.activate(self.base.model, _adapter(self.by_name[policy]))
        self._on = policy
        return version

    def adapter_of(self, policy: str) -> str | None:
        """PEFT's name of a policy's adapter; None: the policy is the whole model."""
        return _adapter(self.by_name[policy]) if self.has_adapters else None

    def version_of(self, policy: str) -> int:
        """Raises RunError where this model has no such policy."""
        if policy not in self.by_name:
            raise RunError(
                f"model '{self.model.name}' has no policy '{policy}'; it has: {', '.join(self.by_name)}"
            )
        return self.versions[policy]

    @contextmanager
    def learning(self, policy: str) -> Iterator[Learner]:
        """Inside the block the policy is on, and exactly its weights take gradients.

        Raises:
            RunError: the policy is frozen.
        """
        self.switch(policy)
        if not self._learns(policy):
            raise RunError(
                f"policy '{policy}' is frozen", "leave its roles out of training, or write `train: full`"
            )
        with _gradients(self.learners[policy]):
            yield self.learners[policy]

    @contextmanager
    def learning_backbone(self) -> Iterator[Learner]:
        """As `learning`, for the backbone under adapters that are still fresh; all versions go up."""
        if not self.has_adapters:
            raise RunError(f"model '{self.model.name}' has no adapters", "train its policy instead")
        with adapters.switched_off(self.base.model), _gradients(self.backbone):
            yield self.backbone
        self._changed.add(BACKBONE)
        self._unsent.add(BACKBONE)
        for policy in self.versions:
            self.versions[policy] += 1

    def without_adapter(self) -> AbstractContextManager[None]:
        """The bare backbone, for the length of the block."""
        return adapters.switched_off(self.base.model) if self.has_adapters else nullcontext()

    # -- optimizers and references ----------------------------------------------------------------

    def reset_optimizers(self) -> None:
        for learner in (*self.learners.values(), self.backbone):
            learner.optimizer = None

    def snapshot_reference(self) -> None:
        """Keep today's weights as the KL's reference; of a fresh adapter, the bare backbone."""
        for learner in (self.learners[name] for name in self.by_name if self._learns(name)):
            weights = {name: p.detach().clone() for name, p in learner.parameters.items()}
            is_fresh = self.has_adapters and not any(
                bool(gathered(w).any()) for n, w in weights.items() if "lora_B" in n
            )
            learner.reference, learner.has_reference = (None if is_fresh else weights), True

    # -- from process to process ------------------------------------------------------------------

    def payload(self, policy: str, probe: Probe | None = None, *, whole: bool = False) -> Payload:
        """A policy's weights for the processes that speak: an adapter alone, where only adapters are trained.

        What is under an adapter goes along once after a warm start, `load` or `start_from` moved it. Where
        several processes share the weights, all call this and the first one's payload holds them.

        Args:
            whole: for a receiver that has nothing but the base: take along whatever isn't the base's own.
        """
        moved = self._under() if whole else self._unsent
        base = dict(self.backbone.parameters) if BACKBONE in moved else {}
        base |= self.kept if KEPT in moved else {}
        own = self.learners[policy].parameters
        self._unsent = self._unsent if whole else set()
        if not self.is_first:
            for weight in (*own.values(), *base.values()):
                gathered(weight)
            own, base = {}, {}
        return make_payload(policy, self.versions[policy], own, base, probe)

    def receive(self, payload: Payload) -> None:
        """Take a payload's weights and version, all or nothing. The policy needs no optimizer here.

        Raises:
            RunError: a tensor isn't what was sent, or isn't this model's; named with its policy.
        """
        payload.verify()
        policy = payload.policy
        into = {**self.weights, **self.learners[policy].parameters}
        received = {**payload.base, **payload.tensors}
        missing = sorted(set(self.learners[policy].parameters) - set(received))
        odd = [n for n, a in received.items() if n not in into or tuple(into[n].shape) != a.shape] or missing
        if odd:
            raise RunError(
                f"policy '{policy}' version {payload.version}: tensor '{odd[0]}' doesn't fit this worker's"
                f" model '{self.model.name}'",
                "start trainer and rollout workers from one plan",
            )
        for name, array in received.items():
            put(into[name], as_tensor(array, payload.dtypes[name]))
        self._changed |= {policy} | ({BACKBONE} if self.has_adapters and payload.base else set())
        self.versions[policy] = payload.version

    def _under(self) -> set[str]:
        """Which weights beside the policies' own may not be the base's."""
        return ({BACKBONE} & self._changed) | ({KEPT} if self.kept else set())

    # -- on disk ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the policies whose weights aren't the base's own, optimizers, versions, random state.

        Where several processes share the weights, all call this and the first one writes.
        """
        for name in (name for name in self.by_name if name in self._changed):
            saving.save_learner(folder, self.learners[name], self.is_first)
        if BACKBONE in self._changed:
            saving.save_learner(folder, self.backbone, self.is_first)
        kept = {name: gathered(weight.detach()) for name, weight in self.kept.items()}
        if not self.is_first:
            return
        if kept:
            saving.save_weights(folder / KEPT, kept)
        saving.save_object(folder / "random.pt", torch.get_rng_state())
        learners = {BACKBONE: self.backbone, **self.learners}
        facts = saving.Facts(
            model=self.model.name,
            train=self.model.train,
            policies={p.name: saving.Saved(p.adapter, tuple(p.roles)) for p in self.model.policies},
            versions=self.versions,
            changed=tuple(sorted(self._changed)),
            has_reference=tuple(n for n, learner in self.learners.items() if learner.has_reference),
            optimizers=tuple(n for n in sorted(self._changed) if learners[n].optimizer is not None),
            references=tuple(n for n in sorted(self._changed) if learners[n].reference is not None),
            dtype=str(self.base.model.dtype).removeprefix("torch."),
            alphas=self._alphas(),
            files={name: saving.file_name(name) for name in learners},
        )
        saving.write_facts(folder, facts)

    def _alphas(self) -> dict[str, float] | None:
        if not self.has_adapters:
            return None
        return {p.name: self.model.lora_of(p).alpha for p in self.model.policies}

    def load(self, folder: Path) -> None:
        """The exact reverse of `save`.

        Raises:
            RunError: the folder belongs to other policies or weights.
        """
        facts = saving.read_facts(folder)
        if set(facts.policies) != set(self.by_name) or facts.train != self.model.train:
            known = ", ".join(facts.policies)
            message = f"{folder} holds the policies {known} ({facts.train})"
            raise RunError(message, "use the mapping that it was saved with")
        self._changed = set(facts.changed)
        self._unsent = self._under()
        if self.kept:
            saving.load_weights(folder / KEPT, self.kept)
        if BACKBONE in self._changed:
            saving.load_learner(folder, self.backbone, facts)
        for name, learner in self.learners.items():
            if name in self._changed:
                saving.load_learner(folder, learner, facts)
            learner.has_reference = name in facts.has_reference
        self.versions = {name: facts.versions[name] for name in self.by_name}
        saving.read_whole(folder / "random.pt", lambda file: torch.set_rng_state(torch.load(file)))

    def start_from(self, policy: str, models: Path) -> None:
        """Take a policy's weights, no optimizer, from the models of an earlier run's checkpoint.

        Full to full, adapter to adapter with its backbone, full to the backbone under adapters, adapter and
        backbone added up to a frozen model. The earlier policy is the one of the same name, else the one that
        played these roles, else the only one.

        Args:
            models: the checkpoint's folder of models.
        Raises:
            RunError: no such policy or several, or its weights don't fit.
        """
        part, source = _find_policy(self.by_name[policy], models)
        facts = saving.read_facts(part)
        is_adapter = facts.train == "lora"
        kept = [part / KEPT] if (part / KEPT).is_file() else []
        if self.has_adapters and (not is_adapter or BACKBONE in facts.changed):
            name = BACKBONE if is_adapter else facts.stem(source)
            self._load_backbone(policy, [part / f"{name}.safetensors", *kept])
        file = part / f"{facts.stem(source)}.safetensors"
        if is_adapter and not self.has_adapters:
            self._add_up(policy, source, part, facts, kept)
        elif is_adapter:
            saving.load_weights(file, self.learners[policy].parameters)
        elif not self.has_adapters:
            saving.load_weights([file, *kept], self.weights)
        self._changed.add(policy)
        self._unsent |= self._under()

    def _add_up(self, policy: str, source: str, part: Path, facts: saving.Facts, kept: list[Path]) -> None:
        """Take an earlier adapter with what it stood on into the weights of a frozen model."""
        if self._learns(policy):
            message = f"policy '{policy}' is full, and {part} holds the adapter '{source}'"
            raise RunError(message, "write `train: lora`, or `train: frozen` to play it as it is")
        alpha = facts.alpha_of(source)
        if alpha is None:
            message = (
                f"{part} doesn't say how its adapters were scaled: an earlier version of masflow wrote it"
            )
            raise RunError(message, f"export it with --merge, and name that folder as the base of '{policy}'")
        if BACKBONE in facts.changed:
            saving.load_weights([part / f"{BACKBONE}.safetensors", *kept], self.weights)
        file = part / f"{facts.stem(source)}.safetensors"
        adapter = saving.read_whole(file, load_file)
        adapters.add_up(self.base.model, self.weights, adapter, alpha, str(file))

    def _load_backbone(self, policy: str, files: list[Path]) -> None:
        before = checksum(self.weights)
        saving.load_weights(files, self.weights)
        if BACKBONE in self._changed and checksum(self.weights) != before:
            message = (
                f"policy '{policy}': {files[0]} isn't the backbone that the model's other adapters start from"
            )
            raise RunError(message, "start all adapters of a model from one run")
        self._changed.add(BACKBONE)


def _find_policy(policy: PolicyIR, models: Path) -> tuple[Path, str]:
    """(model's folder, name) of the earlier policy that this one starts from."""
    parts = sorted(p for p in models.glob("*") if p.is_dir())
    known = {(part, n): fact for part in parts for n, fact in saving.read_facts(part).policies.items()}
    same_name = [place for place in known if place[1] == policy.name]
    same_roles = [place for place, fact in known.items() if set(fact.roles) & set(policy.roles)]
    found = same_name or same_roles or list(known)
    if len(found) != 1:
        names = ", ".join(name for _, name in known) or "none"
        raise RunError(
            f"can't tell which policy of {models.parent} '{policy.name}' starts from; it holds: {names}",
            "start from a run in which one policy played these roles, or give each role a policy of its own",
        )
    return found[0]


@contextmanager
def _gradients(learner: Learner) -> Iterator[None]:
    """Exactly this learner's weights take gradients inside the block; none do after it."""
    for parameter in learner.parameters.values():
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in learner.parameters.values():
            parameter.requires_grad_(False)


def _adapter(policy: PolicyIR) -> str:
    """PEFT's name of a policy's adapter; it may hold no dots, and no two policies' may be the same."""
    return "policy_" + quote(policy.adapter or "default", safe="").replace(".", "%2E")
