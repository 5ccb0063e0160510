"""The graph IR: frozen dataclasses of tuples. Made by `lower`, checked by `verify`, played by the player.

Strings with `{{ }}` are templates, `when`, `foreach`, `switch`, `speaker`, `key` bare expressions; both are
compiled by `masflow.compiler.expressions` where they are used, so that a plan is plain JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from masflow.errors import Where
from masflow.spec.replies import Reply, TextReply
from masflow.spec.types import Type
from masflow.spec.workflow import Handoff, Human, RoleSampling

START, END = "start", "end"


@dataclass(frozen=True)
class Arrow:
    """A way out of a node. One target: go on there; several: fan out to all, up to `join`."""

    targets: tuple[str, ...]
    when: str | None = None
    case: str | None = None
    """The value of the node's `switch` that takes this arrow."""
    join: str | None = None
    """Of a fan-out: the node (or `end`) where its branches meet."""
    where: Where = field(default=Where(), compare=False)


@dataclass(frozen=True)
class Node:
    """One node. Fields of other kinds keep their defaults."""

    name: str
    kind: Literal["role", "tool", "call", "workflow", "human", "set"]
    arrows: tuple[Arrow, ...] = ()
    """Tried in order; the unconditional one stands last."""
    switch: str | None = None
    when: str | None = None
    foreach: str | None = None
    as_name: str | None = None
    in_order: bool = False
    key: str | None = None
    join: Literal["all", "any"] | int = "all"
    with_: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    write: dict[str, Any] = field(default_factory=dict)
    set_: dict[str, Any] = field(default_factory=dict)
    max_visits: int = 8
    role: str | None = None
    """Role name of `Graph.roles`, or a template over `among`."""
    among: tuple[str, ...] = ()
    speaker: str | None = None
    prompt: str | None = None
    """Template text of the user message (the node's own, else the role's)."""
    next_prompt: str | None = None
    prompt_file: str = ""
    tool: str | None = None
    call: str | None = None
    workflow: str | None = None
    """Key in `Plan.workflows`."""
    params: dict[str, Any] = field(default_factory=dict)
    keep_rewards: bool = False
    human: Human | None = None
    where: Where = field(default=Where(), compare=False)


@dataclass(frozen=True)
class RoleIR:
    """One role with its prompt texts read from their files."""

    name: str
    prompt: str | None
    system: str | None = None
    reply: Reply = field(default_factory=TextReply)
    sampling: RoleSampling = field(default_factory=RoleSampling)
    conversation: Literal["none", "role", "node"] = "none"
    next_prompt: str | None = None
    tools: tuple[str, ...] = ()
    max_calls: int = 4
    approve: bool = False
    handoff: Handoff | None = None
    members: tuple[str, ...] = ()
    """Names of copies or of a family, in order; empty for a plain role."""
    is_family: bool = False
    """True: one member speaks (`speaker`); False with members: copies, all speak at once."""
    where: Where = field(default=Where(), compare=False)


@dataclass(frozen=True)
class FunctionIR:
    """A user's function: how to find it again, and the hash of its file for the digest."""

    ref: str
    """`path.py:fn` (absolute path when it came from a file), `module:fn`, or a built-in's name."""
    hash: str = ""
    params: tuple[str, ...] = ()
    """Names of its parameters; with `**kwargs` also `**`."""
    required: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    """Parameters that may be null (annotated optional, or not annotated, or with default None)."""
    types: dict[str, Type] = field(default_factory=dict, compare=False)
    """Of the annotated parameters, where the type language has a word for it."""
    summary: str = field(default="", compare=False)
    """First paragraph of its docstring."""


@dataclass(frozen=True)
class ProgramIR:
    """The async function that plays a workflow instead of edges; the graph's nodes are what it may call."""

    function: FunctionIR
    """Its hash covers its file and the project's files that this one imports when it is imported."""
    timeout_s: float = 30.0
    """Of the function's own code between two awaits."""


@dataclass(frozen=True)
class ToolIR:
    name: str
    function: FunctionIR
    settings: dict[str, Any] = field(default_factory=dict)
    """Templates over params already rendered; paths made absolute."""
    scope: Literal["shared", "episode"] = "shared"
    approve: bool = False
    summary: str = ""
    parameters: dict[str, Type] = field(default_factory=dict)
    """Without those that are bound."""
    bind: dict[str, Any] = field(default_factory=dict)
    """Arguments that masflow passes itself: values and templates over task and params."""
    timeout_s: float = 30.0
    data_hash: str = ""
    """Hash of the files that the settings name."""
    at_once: int = 1
    """Calls that may run beside each other."""
    where: Where = field(default=Where(), compare=False)


@dataclass(frozen=True)
class RewardIR:
    """One reward, routed: which roles' turns of which nodes it pays."""

    name: str
    function: FunctionIR | None
    """None for `well_formed`; a judge's role stands in `judge`."""
    judge: str | None = None
    level: Literal["turn", "role", "trajectory"] = "trajectory"
    args: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    """Roles whose turns it applies to (turn, role level); empty: all."""
    nodes: tuple[str, ...] = ()
    when: str | None = None
    weight: float = 1.0
    to: tuple[str, ...] = ()
    otherwise: float | None = None
    measure_after: tuple[str, ...] = ()
    measure_args: dict[str, Any] = field(default_factory=dict)
    start: float = 0.0
    pay: tuple[tuple[str, str], ...] = ()
    """(role, `value` | `gain`)."""
    allocator: bool = False
    """`fn(trajectory) -> {turn id: reward}`."""
    timeout_s: float = 30.0
    batch: bool = False
    """One call for all trajectories that are scored together."""
    isolate: bool = True
    """Called in a process of its own."""
    memory_gb: float = 4.0
    where: Where = field(default=Where(), compare=False)


@dataclass(frozen=True)
class TaskFieldIR:
    name: str
    type: Type
    hidden: bool = False
    source: str = ""


@dataclass(frozen=True)
class StateFieldIR:
    name: str
    type: Type
    default: Any = None
    merge: str = "replace"
    merge_function: FunctionIR | None = None


@dataclass(frozen=True)
class LimitsIR:
    visits: int = 8
    turns: int = 64
    items: int = 256
    tokens: int | None = None


@dataclass(frozen=True)
class Graph:
    """One workflow, lowered. `start` is a pseudo-node that has arrows only; `end` has none and isn't in
    `nodes`.
    """

    name: str
    task: tuple[TaskFieldIR, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    state: tuple[StateFieldIR, ...] = ()
    roles: tuple[RoleIR, ...] = ()
    tools: tuple[ToolIR, ...] = ()
    nodes: tuple[Node, ...] = ()
    start: tuple[Arrow, ...] = ()
    output: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[RewardIR, ...] = ()
    credit: Literal["own", "return_to_go"] = "own"
    discount: float = 1.0
    limits: LimitsIR = LimitsIR()
    outcomes: dict[str, str] = field(default_factory=dict)
    """Training policy of each outcome: `train`, `mask` or `drop_episode`; complete."""
    program: ProgramIR | None = None
    functions: tuple[FunctionIR, ...] = ()
    """The functions of `call` nodes and of people's stand-ins, once each."""
    summary: str = ""
    where: Where = field(default=Where(), compare=False)

    def node(self, name: str) -> Node:
        return next(n for n in self.nodes if n.name == name)

    def role(self, name: str) -> RoleIR:
        return next(r for r in self.roles if r.name == name)
