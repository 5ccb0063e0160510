"""The plan: everything that the runtime reads, as frozen dataclasses that go to JSON and back.

Knows no torch and no files; `link` makes it, passes change it, `plan.json` holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from masflow.compiler.graph import Graph
from masflow.errors import Where
from masflow.spec.experiment import Algorithm, Eval, Train, WarmStart
from masflow.spec.mapping import Chat, ConfigBase, Endpoint, Lora, Optimizer
from masflow.spec.runtime import Place, Runtime


@dataclass(frozen=True)
class PolicyIR:
    """A trainable unit: a full model, or one (model, adapter)."""

    name: str
    """`MODEL` or `MODEL/ADAPTER`."""
    model: str
    adapter: str | None
    roles: tuple[str, ...]
    """Qualified member names (`planner`, `team/worker`, `debater_0`)."""
    train: bool
    optimizer: Optimizer
    init: str | None = None
    """The folder of the checkpoint that its weights come from; not in the digest."""
    init_hash: str = ""
    """Of the weights there."""
    lora: Lora | None = None
    """The shape of its adapter where that isn't the model's."""


@dataclass(frozen=True)
class ModelIR:
    """One physical model, resolved once and completely."""

    name: str
    base: str | ConfigBase | None
    base_hash: str
    """Of a config: of its JSON and its tokenizer files; of a folder: of its config and weight names and
    sizes.
    """
    train: Literal["full", "lora", "frozen"]
    policies: tuple[PolicyIR, ...]
    lora: Lora = field(default_factory=Lora)
    context: int | None = None
    dtype: str = "auto"
    chat: Chat = field(default_factory=Chat)
    """`template` holds the text of its file."""
    template_file: str = ""
    """Where that text came from, for messages; not in the digest."""
    dialect: str = "text"
    """How its roles' tool calls are written: `text` (masflow's own), or the form of its chat template."""
    quantize: Literal["4bit"] | None = None
    gradient_checkpointing: bool = False
    endpoint: Endpoint | None = None
    """The server that plays the roles; then there is no base, and the policies are frozen."""
    served: str | None = None
    """The model's name at the endpoint."""
    place: Place = field(default_factory=Place)
    """What it gets of a cluster; not in the digest."""
    where: Where = field(default=Where(), compare=False)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for policy in self.policies for role in policy.roles)

    def lora_of(self, policy: PolicyIR) -> Lora:
        """The shape of a policy's adapter."""
        return policy.lora or self.lora


@dataclass(frozen=True)
class CriticIR:
    """One value network, with a head a role; trained by the process that trains `model`."""

    name: str
    """Of its role (`per: role`), its model (`per: model`), or `team`."""
    model: str
    """The model whose process holds it; of a central one, the first that is trained."""
    roles: tuple[str, ...]
    """Qualified member names, in the order of the heads."""
    base: str | ConfigBase | None
    base_hash: str
    optimizer: Optimizer
    central: bool = False
    """It sees what every role was asked, as text, instead of the acting role's tokens."""


@dataclass(frozen=True)
class SourceIR:
    """One file or hub id of a split."""

    path: str
    """Absolute for files."""
    hash: str = ""
    split: str | None = None
    weight: float | None = None
    """Its share in a mixture, to be divided by the sum of all; None: as many as it has rows."""
    is_file: bool = True
    name: str = ""
    """In metrics."""


@dataclass(frozen=True)
class GroupIR:
    """One baseline: which turns are compared with which, and how many of them are expected."""

    key: tuple[str, ...]
    """(`task`, role, node path)."""
    expected_size: int
    role: str
    node: str


@dataclass(frozen=True)
class SamplerIR:
    """How episodes are drawn; a pass may replace it."""

    kind: str = "trajectories"
    samples: int = 8
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageIR:
    """One stage of the training step and the operator that fills it."""

    name: str
    op: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SharingIR:
    """Whether a model's rows share their beginnings in training, and about what that saves."""

    model: str
    shares: bool
    why: str
    rows_tokens: int
    """Of one task's rows, one by one; at most, what templates put in left aside."""
    computed_tokens: int
    """Of these, those that go through the model."""


STAGES = ("sample", "score", "credit", "group", "advantage", "select", "update", "evolve")


@dataclass(frozen=True)
class Plan:
    """A compiled experiment. `workflows[root]` is the team; other entries are its sub-workflows."""

    root: str
    workflows: dict[str, Graph]
    models: tuple[ModelIR, ...] = ()
    policy_of: dict[str, str] = field(default_factory=dict)
    """Qualified member name → policy name."""
    data: dict[str, tuple[SourceIR, ...]] = field(default_factory=dict)
    """Split → sources (`train`, `eval`, …, `warm_start`)."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    warm_start: WarmStart | None = None
    init: str | None = None
    """As a policy's, for those that have none of their own."""
    init_hash: str = ""
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    runtime: Runtime = field(default_factory=Runtime)
    sampler: SamplerIR = field(default_factory=SamplerIR)
    stages: tuple[StageIR, ...] = ()
    groups: tuple[GroupIR, ...] = ()
    passes: tuple[dict[str, Any], ...] = ()
    critics: tuple[CriticIR, ...] = ()
    sharing: tuple[SharingIR, ...] = ()
    """Of the models that learn; not in the digest, for it changes no gradient."""
    root_dir: str = ""
    """The project's root, for the paths of user code; not in the digest."""
    digest: str = ""

    @property
    def graph(self) -> Graph:
        return self.workflows[self.root]

    def model(self, name: str) -> ModelIR:
        return next(m for m in self.models if m.name == name)

    @property
    def policies(self) -> tuple[PolicyIR, ...]:
        return tuple(p for m in self.models for p in m.policies)

    def shares_prefixes(self, model: str) -> bool:
        """Whether a model's rows share their beginnings in training."""
        return all(entry.shares for entry in self.sharing if entry.model == model)

    def dialect_of(self, policy: str) -> str:
        """How the model of a policy calls tools (`ModelIR.dialect`)."""
        return next((m.dialect for m in self.models if any(p.name == policy for p in m.policies)), "text")
