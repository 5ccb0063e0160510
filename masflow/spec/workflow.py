"""The workflow document as objects. Whatever spans several of them is the compiler's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from masflow.errors import closest
from masflow.spec.base import Fault, Faults, JsonValue, Spec, by_shape, unknown_word
from masflow.spec.edges import Edges
from masflow.spec.fields import MERGES, StateField, TaskField
from masflow.spec.names import FUNCTION, AsName, Expression, NameList, Templates, check_names
from masflow.spec.replies import HasReply
from masflow.spec.rewards import Measure, Reward
from masflow.spec.roles import Handoff, Role, RoleSampling, Sampling, Tool
from masflow.trace import DEFAULT_POLICY

__all__ = [
    "MERGES",
    "NODE_KINDS",
    "CallNode",
    "Handoff",
    "Human",
    "HumanNode",
    "Limits",
    "Measure",
    "Node",
    "NodeBase",
    "Reward",
    "Role",
    "RoleNode",
    "RoleSampling",
    "Sampling",
    "SetNode",
    "StateField",
    "TaskField",
    "Templates",
    "Tool",
    "ToolNode",
    "Workflow",
    "WorkflowNode",
]

Either = Discriminator(by_shape("<inline>", "<name>"))


def _join(value: object) -> object:
    if value in ("all", "any") or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    message = f"'join' is {value!r}; it is all, any, or a number of branches from 1"
    raise Fault(message, code="bad-join", fix="write all, any or a number")


class NodeBase(Spec):
    with_: Templates = Field(default_factory=dict, alias="with")
    """Extra template values of this node's prompt."""
    when: Expression | None = None
    """A bare expression; false skips the node, whose value is then null."""
    foreach: Expression | None = None
    """A bare expression that gives a list; the node runs once an item, concurrently."""
    as_: AsName | None = Field(default=None, alias="as")
    """The item's name in templates; `item` always works."""
    in_order: bool = False
    """Items one after the other, each seeing the writes of those before it."""
    key: Expression | None = None
    """A bare expression that names an item in paths, instead of its index."""
    write: Templates = Field(default_factory=dict)
    """Merges into state by each field's rule."""
    set_: Templates = Field(default_factory=dict, alias="set")
    """Replaces in state."""
    join: Annotated[Literal["all", "any"] | int, BeforeValidator(_join)] = "all"
    """On the joining node of a fan-out: how many branches are waited for."""
    limits: Limits | None = None

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("foreach") is None:
            for key in ("as", "in_order", "key"):
                if data.get(key) not in (None, False):
                    message = f"'{key}' belongs to a 'foreach', and this node has none"
                    yield Fault(
                        message,
                        code="useless-key",
                        fix=f"add 'foreach: EXPR', or remove '{key}'",
                        path=(key,),
                    )
        write, replace = data.get("write"), data.get("set")
        merged, replaced = (set(part) if isinstance(part, dict) else set() for part in (write, replace))
        for name in sorted(merged & replaced, key=str):
            message = f"'{name}' is both merged ('write') and replaced ('set')"
            yield Fault(message, code="write-and-set", fix="keep one of the two", path=("set", name))


class Limits(Spec):
    """Bounds of an episode (or of a sub-workflow's call); reaching one is outcome `limit`."""

    visits: int | None = Field(default=None, ge=1)
    """Visits of one node; default 8."""
    turns: int | None = Field(default=None, ge=1)
    """Model calls; default 64."""
    items: int | None = Field(default=None, ge=1)
    """Items of one `foreach`; default 256."""
    tokens: int | None = Field(default=None, ge=1)
    """Prompt and reply tokens of the episode together; default: none."""


class RoleNode(NodeBase):
    role: str
    """A role's name, or a `{{ }}` over `among`."""
    among: NameList | None = None
    """The roles that a `{{ }}` in `role` may choose."""
    speaker: Expression | None = None
    """A bare expression giving the member of a family who speaks."""
    prompt: str | None = None
    next_prompt: str | None = None

    hints: ClassVar[dict[str, str]] = {"args": "with"} | {
        key: f"roles: {{NAME: {{{key}: …}}}}" for key in (*Role.model_fields,) if key not in ("prompt",)
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        yield from super().faults(data)
        chosen = isinstance(data.get("role"), str) and "{{" in data["role"]
        if chosen and not data.get("among"):
            message = "a role chosen at run time needs the list of roles that it may be"
            yield Fault(message, code="missing-among", fix="add 'among: [ROLE, ROLE]'", path=("role",))
        if data.get("among") and isinstance(data.get("role"), str) and not chosen:
            message = "'among' belongs to a role chosen at run time, and this one is fixed"
            yield Fault(
                message,
                code="useless-key",
                fix="remove 'among', or write role: \"{{ EXPR }}\"",
                path=("among",),
            )
        if data.get("among") and data.get("speaker") is not None:
            message = "a node has 'among' (which role) or 'speaker' (which member), not both"
            yield Fault(
                message, code="among-and-speaker", fix="remove 'among' or 'speaker'", path=("speaker",)
            )


def _function(value: object) -> object:
    if isinstance(value, str) and not FUNCTION.match(value):
        message = f"'{value}' isn't a function; it is file.py:name or module:name"
        fix = (
            f"write '{value}:NAME'"
            if value.endswith(".py")
            else f"write 'file.py:{value.split('.')[-1] or 'name'}'"
        )
        raise Fault(message, code="bad-function", fix=fix)
    return value


class ToolNode(NodeBase):
    hints: ClassVar[dict[str, str]] = {"with": "args", "input": "args"}

    tool: str
    args: Templates = Field(default_factory=dict)


class CallNode(NodeBase):
    hints: ClassVar[dict[str, str]] = {"with": "args", "input": "args"}

    call: Annotated[str, BeforeValidator(_function)]
    args: Templates = Field(default_factory=dict)


class WorkflowNode(NodeBase):
    workflow: Annotated[Annotated[str, Tag("<name>")] | Annotated[Workflow, Tag("<inline>")], Either]
    """A file, a workflow named in `workflows:`, or one written in place."""
    args: Templates = Field(default_factory=dict)
    params: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: Literal["keep", "drop"] = "drop"


def _answer(value: object) -> object:
    known = ("value", "call", "role")
    if value == "skip" or value is None:
        return value
    if isinstance(value, dict) and len(value) == 1:
        key = next(iter(value))
        if key in known:
            if key != "value" and not isinstance(value[key], str):
                raise Fault(
                    f"'{key}' is a name; got {value[key]!r}",
                    code="wrong-type",
                    fix="write a name",
                    path=(key,),
                )
            return value
        raise unknown_word("key", key, known, path=(key,))
    message = f"'in_training' is skip, {{value: …}}, {{call: file.py:fn}} or {{role: NAME}}; got {value!r}"
    raise Fault(message, code="bad-in-training", fix="write one of them")


class Human(HasReply):
    """A question to a person."""

    ask: str
    in_training: Annotated[Literal["skip"] | dict[str, JsonValue], BeforeValidator(_answer)] | None = None
    """`skip`, or {value}, {call} or {role}: who answers when nobody is there."""


class HumanNode(NodeBase):
    human: Human


class SetNode(NodeBase):
    """Only computes: `set` (or `write`) alone."""


NODE_KINDS = ("role", "tool", "call", "workflow", "human")


def _node_kind(raw: object) -> str:
    if isinstance(raw, dict):
        return f"<{next((kind for kind in NODE_KINDS if kind in raw), 'set')}>"
    return f"<{next((kind for kind in NODE_KINDS if hasattr(raw, kind)), 'set')}>"


def _one_kind(raw: object) -> object:
    """Refuse a node that isn't exactly one kind."""
    if isinstance(raw, NodeBase):
        return raw
    listed = f"{', '.join(NODE_KINDS)}, or only set"
    if not isinstance(raw, dict):
        fix = f"write {{role: {raw}}}" if isinstance(raw, str) else "write {role: NAME}"
        raise Fault(f"a node is a mapping with one of {listed}; got {raw!r}", code="bad-node", fix=fix)
    found = [kind for kind in NODE_KINDS if kind in raw]
    if len(found) > 1:
        message = f"a node is exactly one of {listed}; this one is {' and '.join(found)}"
        raise Fault(message, code="several-kinds", fix="make a node of each, with an edge between them")
    if not found and "set" not in raw and "write" not in raw:
        for key in raw:
            if closest(str(key), NODE_KINDS):
                raise unknown_word("key", key, (*NODE_KINDS, "set"), path=(key,))
        raise Fault(
            f"a node is one of {listed}; this one is none",
            code="no-kind",
            fix="add 'role: NAME' (or another)",
        )
    return raw


Node = Annotated[
    Annotated[RoleNode, Tag("<role>")]
    | Annotated[ToolNode, Tag("<tool>")]
    | Annotated[CallNode, Tag("<call>")]
    | Annotated[WorkflowNode, Tag("<workflow>")]
    | Annotated[HumanNode, Tag("<human>")]
    | Annotated[SetNode, Tag("<set>")],
    Discriminator(_node_kind),
    BeforeValidator(_one_kind),
]


def _rewards(rewards: tuple[Reward, ...]) -> tuple[Reward, ...]:
    names = [reward.name for reward in rewards]
    faults = [
        Fault(
            f"two rewards are named '{name}'",
            code="duplicate-name",
            fix="rename one of them",
            path=(i, "name"),
        )
        for i, name in enumerate(names)
        if name in names[:i]
    ]
    if faults:
        raise Faults(faults)
    return rewards


def _workflow_name(value: object) -> object:
    if isinstance(value, str) and not re.match(r"[A-Za-z_][\w-]*\Z", value):
        near = re.sub(r"[^A-Za-z0-9_]+", "_", value).strip("_0123456789")
        raise Fault(
            f"workflow name '{value}' isn't a word", code="bad-name", fix=f"write '{near or 'my_workflow'}'"
        )
    return value


class Workflow(Spec):
    """A whole workflow."""

    name: Annotated[str, BeforeValidator(_workflow_name)]
    summary: str = ""
    task: Annotated[dict[str, TaskField], check_names("task field", reserved=True)] = Field(
        default_factory=dict
    )
    params: Annotated[dict[str, JsonValue], check_names("param")] = Field(default_factory=dict)
    state: Annotated[dict[str, StateField], check_names("state field")] = Field(default_factory=dict)
    roles: Annotated[dict[str, Role], check_names("role")] = Field(default_factory=dict)
    tools: Annotated[dict[str, Tool], check_names("tool")] = Field(default_factory=dict)
    workflows: Annotated[
        dict[str, Annotated[Annotated[str, Tag("<name>")] | Annotated[Workflow, Tag("<inline>")], Either]],
        check_names("workflow"),
    ] = Field(default_factory=dict)
    nodes: Annotated[dict[str, Node], check_names("node", reserved=True, some=True)]
    edges: Edges
    output: Annotated[dict[str, JsonValue], check_names("output field")] = Field(default_factory=dict)
    rewards: Annotated[tuple[Reward, ...], AfterValidator(_rewards)] = ()
    credit: Literal["own", "return_to_go"] = "own"
    discount: float = Field(default=1.0, ge=0, le=1)
    """Per superstep, with `credit: return_to_go`."""
    limits: Limits = Limits()
    outcomes: dict[str, Literal["train", "mask", "drop_episode"]] = Field(default_factory=dict)
    """Changes of the default training policy of an outcome."""

    hints: ClassVar[dict[str, str]] = {
        "agents": "roles",
        "inputs": "task",
        "graph": "edges",
        "reward": "rewards",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        outcomes = data.get("outcomes")
        for name in outcomes if isinstance(outcomes, dict) else ():
            if name not in DEFAULT_POLICY:
                yield unknown_word("outcome", name, tuple(DEFAULT_POLICY), path=("outcomes", name))


NodeBase.model_rebuild()
WorkflowNode.model_rebuild()
