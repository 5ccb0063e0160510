"""The workflow document as objects: roles, tools, state, nodes, edges, rewards. One object is valid in itself;
whatever spans objects is the compiler's business."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from masflow.spec.base import JsonValue, Spec
from masflow.spec.edges import Edges
from masflow.spec.replies import HasReply, Reply, TextReply
from masflow.spec.types import TypeField

Templates = dict[str, JsonValue]
"""Names to values; a string that is exactly one `{{ }}` keeps its type, other strings render to text."""


class TaskField(Spec):
    """One field of a data row."""

    type: TypeField
    hidden: bool = False
    """Rewards, tools and calls may read it; in a prompt or condition it is a compile error."""
    source: str | None = Field(None, alias="from")
    """The column's name in the data, where it differs."""


class StateField(Spec):
    """One entry of the blackboard."""

    type: TypeField
    default: JsonValue | None = None
    merge: str = "replace"
    """How concurrent writes meet: replace, append, extend, add, union, update or `file.py:fn`."""


class Sampling(Spec):
    """How tokens are drawn; a field left out takes the algorithm's, or the engine's, default."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop: tuple[str, ...] | None = None


class RoleSampling(Spec):
    """Sampling of one role, apart for training and evaluation."""

    train: Sampling = Sampling()
    eval: Sampling = Sampling()


class Handoff(Spec):
    """The role may hand the floor to others: the chosen name is pushed on a stack in state."""

    push: str | tuple[str, ...]
    to: str


class Role(HasReply):
    """One voice of the team: a prompt and a reply format."""

    prompt: str | None = None
    """A file, or the template itself when it holds a line break, a blank or `{{`."""
    system: str | None = None
    reply: Reply = TextReply()
    sampling: RoleSampling = RoleSampling()
    conversation: Literal["none", "role", "node"] = "none"
    next_prompt: str | None = None
    """The user message from the second visit of a conversation on."""
    tools: tuple[str, ...] = ()
    max_calls: int = Field(4, ge=1)
    """Tool calls of one visit of a ReAct role at most; the last call of the model offers no tools."""
    approve: Literal["human"] | None = None
    handoff: Handoff | None = None
    copies: int | str | None = None
    """N mappable members NAME_0 … NAME_{N-1} that speak concurrently; a template over params is allowed."""
    names: tuple[str, ...] | str | None = None
    """A family: one mappable member a name; `me` in its prompt is the member's name."""


class Tool(Spec):
    """A tool: `use` names a built-in or a function; every other key is the tool's own setting."""

    model_config = {**Spec.model_config, "extra": "allow"}

    use: str
    scope: Literal["shared", "episode"] = "shared"
    approve: Literal["human"] | None = None
    summary: str | None = None
    parameters: dict[str, TypeField] | None = None
    """What a ReAct role may pass; read from the function's signature when left out."""
    timeout_s: float = Field(30.0, gt=0)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class NodeBase(Spec):
    with_: Templates = Field(default_factory=dict, alias="with")
    """Extra template values of this node's prompt."""
    when: str | None = None
    """A bare expression; false skips the node, whose value is then null."""
    foreach: str | None = None
    as_: str | None = Field(None, alias="as")
    in_order: bool = False
    """Items one after the other, each seeing the writes of those before it."""
    key: str | None = None
    """A bare expression that names an item in paths, instead of its index."""
    write: Templates = Field(default_factory=dict)
    """Merges into state by each field's rule."""
    set_: Templates = Field(default_factory=dict, alias="set")
    """Replaces in state."""
    join: Literal["all", "any"] | int = "all"
    """On the joining node of a fan-out: how many branches are waited for."""
    limits: Limits | None = None


class Limits(Spec):
    """Bounds of an episode (or of a sub-workflow's call); reaching one is outcome `limit`."""

    visits: int | None = Field(None, ge=1)
    """Visits of one node; default 8."""
    turns: int | None = Field(None, ge=1)
    """Model calls; default 64."""
    items: int | None = Field(None, ge=1)
    """Items of one `foreach`; default 256."""
    tokens: int | None = Field(None, ge=1)
    """Prompt and reply tokens of the episode together; default: none."""


class RoleNode(NodeBase):
    role: str
    """A role's name, or a `{{ }}` over `among`."""
    among: tuple[str, ...] | None = None
    speaker: str | None = None
    """A bare expression giving the member of a family who speaks."""
    prompt: str | None = None
    next_prompt: str | None = None


class ToolNode(NodeBase):
    tool: str
    args: Templates = Field(default_factory=dict)


class CallNode(NodeBase):
    call: str
    args: Templates = Field(default_factory=dict)


class WorkflowNode(NodeBase):
    workflow: str | Workflow
    """A file, a workflow named in `workflows:`, or one written in place."""
    args: Templates = Field(default_factory=dict)
    params: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: Literal["keep", "drop"] = "drop"


class Human(HasReply):
    """A question to a person."""

    ask: str
    reply: Reply = TextReply()
    in_training: Literal["skip"] | dict[str, JsonValue] | None = None
    """`skip`, or {value}, {call} or {role}: who answers when nobody is there."""


class HumanNode(NodeBase):
    human: Human


class SetNode(NodeBase):
    """Only computes: `set` (or `write`) alone."""


NODE_KINDS = ("role", "tool", "call", "workflow", "human")


def _node_kind(raw: object) -> str:
    if isinstance(raw, dict):
        return next((kind for kind in NODE_KINDS if kind in raw), "set")
    return next((kind for kind in NODE_KINDS if hasattr(raw, kind)), "set")


Node = Annotated[
    Annotated[RoleNode, Tag("role")]
    | Annotated[ToolNode, Tag("tool")]
    | Annotated[CallNode, Tag("call")]
    | Annotated[WorkflowNode, Tag("workflow")]
    | Annotated[HumanNode, Tag("human")]
    | Annotated[SetNode, Tag("set")],
    Discriminator(_node_kind),
]


class Measure(Spec):
    """A quantity measured after some nodes."""

    after: tuple[str, ...]
    args: Templates = Field(default_factory=dict)
    start: float = 0.0


class Reward(Spec):
    """Who is paid what: a function of its arguments, at one of three levels."""

    name: str
    use: str
    """`file.py:fn`, `module:fn`, a built-in (`well_formed`), or a frozen role as a judge (`role:NAME`)."""
    level: Literal["turn", "role", "trajectory"] | None = None
    """Default: `trajectory`; a `measure` pays turns."""
    args: Templates = Field(default_factory=dict)
    roles: tuple[str, ...] | None = None
    nodes: tuple[str, ...] | None = None
    when: str | None = None
    weight: float = 1.0
    """0 makes it a metric: reported, never trained on."""
    to: tuple[str, ...] | None = None
    otherwise: float | None = None
    measure: Measure | None = None
    pay: dict[str, Literal["value", "gain"]] | None = None
    """Role to what it is paid of the measurement."""
    timeout_s: float = Field(30.0, gt=0)


class Workflow(Spec):
    """A whole workflow."""

    name: str
    summary: str = ""
    task: dict[str, TaskField] = Field(default_factory=dict)
    params: dict[str, JsonValue] = Field(default_factory=dict)
    state: dict[str, StateField] = Field(default_factory=dict)
    roles: dict[str, Role] = Field(default_factory=dict)
    tools: dict[str, Tool] = Field(default_factory=dict)
    workflows: dict[str, str | Workflow] = Field(default_factory=dict)
    nodes: dict[str, Node]
    edges: Edges
    output: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: tuple[Reward, ...] = ()
    credit: Literal["own", "return_to_go"] = "own"
    discount: float = Field(1.0, ge=0, le=1)
    """Per superstep, with `credit: return_to_go`."""
    limits: Limits = Limits()
    outcomes: dict[str, Literal["train", "mask", "drop_episode"]] = Field(default_factory=dict)
    """Changes of the default training policy of an outcome."""


NodeBase.model_rebuild()
WorkflowNode.model_rebuild()
