"""The workflow document as objects: roles, tools, state, nodes, edges, rewards. One object is valid in itself;
whatever spans objects is the compiler's business."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from masflow.errors import closest
from masflow.spec.base import Fault, Faults, JsonValue, Spec, by_shape, unknown_word
from masflow.spec.edges import Edges
from masflow.spec.names import AsName, Expression, NameList, check_names
from masflow.spec.replies import HasReply
from masflow.spec.types import TypeField, mismatch, parse_type

Templates = Annotated[dict[str, JsonValue], check_names("name")]
"""Names to values; a string that is exactly one `{{ }}` keeps its type, other strings render to text."""
MERGES = ("replace", "append", "extend", "add", "union", "update")
FUNCTION = re.compile(r"[^\s:]+:[A-Za-z_]\w*\Z")
Either = Discriminator(by_shape("<inline>", "<name>"))


class TaskField(Spec):
    """One field of a data row."""

    type: TypeField
    hidden: bool = False
    """Rewards, tools and calls may read it; in a prompt or condition it is a compile error."""
    source: str | None = Field(None, alias="from")
    """The column's name in the data, where it differs."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return _typed(data, ("type", "hidden", "from"))


def _typed(data: Any, keys: tuple[str, ...]) -> Any:
    """A field in long form; a bare type, or a record that isn't the long form, is its type."""
    if isinstance(data, Spec):
        return data
    if not isinstance(data, dict):
        return {"type": data}
    others = [key for key in data if key not in keys]
    if "type" not in data:
        return data if len(others) < len(data) and len(data) > 0 and not _is_type(data) else {"type": data}
    odd = any(
        closest(str(key), keys) or isinstance(data[key], (bool, int, float, type(None))) for key in others
    )
    return {"type": data} if others and not odd else data


def _is_type(data: object) -> bool:
    try:
        parse_type(data)
    except (Fault, Faults):
        return False
    return True


class StateField(Spec):
    """One entry of the blackboard."""

    type: TypeField
    default: JsonValue | None = None
    merge: str = "replace"
    """How concurrent writes meet: replace, append, extend, add, union, update or `file.py:fn`."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return _typed(data, ("type", "default", "merge"))

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        merge, default = data.get("merge", "replace"), data.get("default")
        if isinstance(merge, str) and merge not in MERGES and not FUNCTION.match(merge):
            yield unknown_word("merge rule", merge, (*MERGES, "file.py:fn"), path=("merge",))
        if not _is_type(data.get("type")):
            return
        type_ = parse_type(data["type"])
        if default is not None and not (isinstance(default, str) and "{{" in default):
            why = mismatch(default, type_)
            if why:
                yield Fault(
                    f"the default doesn't fit: {why}",
                    code="wrong-type",
                    fix=f"write a {type_}",
                    path=("default",),
                )
        needs = {
            "append": ("list",),
            "extend": ("list",),
            "union": ("list",),
            "add": ("int", "float"),
            "update": ("record",),
        }
        if merge in needs and type_.kind not in (*needs[merge], "any"):
            message = f"merge rule '{merge}' needs a {' or '.join(needs[merge])}; the type is {type_}"
            yield Fault(message, code="wrong-merge", fix="choose another merge rule or type", path=("merge",))


class Sampling(Spec):
    """How tokens are drawn; a field left out takes the algorithm's, or the engine's, default."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] | None = (
        None
    )
    """Strings that end a reply; they are cut from its text."""


class RoleSampling(Spec):
    """Sampling of one role, apart for training and evaluation."""

    hints = {name: f"train: {{{name}: …}}" for name in ("temperature", "top_p", "top_k", "stop")}

    train: Sampling = Sampling()
    eval: Sampling = Sampling()


class Handoff(Spec):
    """The role may hand the floor to others: the chosen name is pushed on a stack in state."""

    push: Annotated[
        Annotated[str, Tag("<name>")] | Annotated[NameList, Tag("<list>")],
        Discriminator(by_shape("<name>", "<name>", "<list>")),
    ]
    to: str

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        to = data.get("to")
        if isinstance(to, str) and not re.match(r"state\.[A-Za-z_]\w*\Z", to):
            yield Fault(
                f"'{to}' isn't a field of state",
                code="bad-handoff",
                fix="write 'to: state.NAME'",
                path=("to",),
            )


def _count(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, int) and not 1 <= value <= 1000):
        raise Fault(
            f"'copies' is {value}; it must be from 1 to 1000",
            code="out-of-bounds",
            fix="write how many speak",
        )
    if isinstance(value, str) and "{{" not in value:
        raise Fault(
            f"'copies' is a number; got '{value}'",
            code="wrong-type",
            fix=f'write "{{{{ {value} }}}}" or a number',
        )
    return value


def _family(value: object) -> object:
    if isinstance(value, str):
        if "{{" not in value:
            fix = f"write [{value}, …], or a template"
            raise Fault(f"'names' is a list; got '{value}'", code="wrong-type", fix=fix)
        return value
    if isinstance(value, (list, tuple)):
        if not value:
            raise Fault("'names' is empty", code="empty", fix="name at least one member")
        check_names("member").func({str(v): None for v in value})
    return value


class Role(HasReply):
    """One voice of the team: a prompt and a reply format."""

    prompt: str | None = None
    """A file, or the template itself when it holds a line break, a blank or `{{`."""
    system: str | None = None
    sampling: RoleSampling = RoleSampling()
    conversation: Literal["none", "role", "node"] = "none"
    next_prompt: str | None = None
    """The user message from the second visit of a conversation on."""
    tools: NameList = ()
    max_calls: int = Field(4, ge=1)
    """Tool calls of one visit of a ReAct role at most; the last call of the model offers no tools."""
    approve: Literal["human"] | None = None
    handoff: Handoff | None = None
    copies: Annotated[int | str, BeforeValidator(_count)] | None = None
    """N mappable members NAME_0 … NAME_{N-1} that speak concurrently; a template over params is allowed."""
    names: Annotated[tuple[str, ...] | str, BeforeValidator(_family)] | None = None
    """A family: one mappable member a name; `me` in its prompt is the member's name."""

    hints: ClassVar[dict[str, str]] = {
        "model": "a mapping's models",
        "temperature": "sampling: {train: {temperature: …}}",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("copies") is not None and data.get("names") is not None:
            message = "a role has 'copies' (all speak at once) or 'names' (one speaks), not both"
            yield Fault(message, code="copies-and-names", fix="remove one of them", path=("names",))
        if "max_calls" in data and not data.get("tools"):
            message = "'max_calls' bounds calls of tools, and this role has none"
            yield Fault(
                message,
                code="useless-key",
                fix="add 'tools: [NAME]', or remove 'max_calls'",
                path=("max_calls",),
            )
        if data.get("next_prompt") is not None and data.get("conversation", "none") == "none":
            message = "'next_prompt' belongs to a conversation, and this role has none"
            yield Fault(
                message, code="useless-key", fix="add 'conversation: role' (or node)", path=("next_prompt",)
            )


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
    as_: AsName | None = Field(None, alias="as")
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
        both = [name for name in data.get("write") or {} if name in (data.get("set") or {})]
        for name in both:
            message = f"'{name}' is both merged ('write') and replaced ('set')"
            yield Fault(message, code="write-and-set", fix="keep one of the two", path=("set", name))


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
    among: NameList | None = None
    """The roles that a `{{ }}` in `role` may choose."""
    speaker: Expression | None = None
    """A bare expression giving the member of a family who speaks."""
    prompt: str | None = None
    next_prompt: str | None = None

    hints: ClassVar[dict[str, str]] = {"args": "with"}

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
            yield Fault(message, code="among-and-speaker", fix="remove one of them", path=("speaker",))


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


def _listed(value: object) -> object:
    """One name stands for a list of one; an empty list names nothing."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and not value:
        raise Fault("the list is empty", code="empty", fix="name at least one, or leave the key out")
    return value


class Measure(Spec):
    """A quantity measured after some nodes."""

    after: Annotated[NameList, BeforeValidator(_listed)]
    args: Templates = Field(default_factory=dict)
    start: float = 0.0


def _reward(value: object) -> object:
    if isinstance(value, str) and value != "well_formed" and not FUNCTION.match(value):
        near = closest(value, ["well_formed"])
        message = f"unknown reward '{value}'; known: well_formed, file.py:name, module:name, role:NAME"
        fix = (
            "write 'well_formed'"
            if near
            else f"write '{value if value.endswith('.py') else 'rewards/qa.py'}:NAME'"
        )
        raise Fault(message, code="unknown-reward", fix=fix)
    return value


class Reward(Spec):
    """Who is paid what: a function of its arguments, at one of three levels."""

    name: str
    use: Annotated[str, BeforeValidator(_reward)]
    """`file.py:fn`, `module:fn`, a built-in (`well_formed`), or a frozen role as a judge (`role:NAME`)."""
    level: Literal["turn", "role", "trajectory"] | None = None
    """Default: `trajectory`; a `measure` pays turns."""
    args: Templates = Field(default_factory=dict)
    roles: Annotated[NameList, BeforeValidator(_listed)] | None = None
    nodes: Annotated[NameList, BeforeValidator(_listed)] | None = None
    when: Expression | None = None
    weight: float = 1.0
    """0 makes it a metric: reported, never trained on."""
    to: Annotated[NameList, BeforeValidator(_listed)] | None = None
    otherwise: float | None = None
    measure: Measure | None = None
    pay: dict[str, Literal["value", "gain"]] | None = None
    """Role to what it is paid of the measurement."""
    timeout_s: float = Field(30.0, gt=0)

    hints: ClassVar[dict[str, str]] = {
        "function": "use",
        "fn": "use",
        "role": "roles",
        "node": "nodes",
        "scale": "weight",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        measured = data.get("measure") is not None
        if measured != (data.get("pay") is not None):
            have, need = ("measure", "pay") if measured else ("pay", "measure")
            fix = "add 'pay: {ROLE: gain}'" if measured else "add 'measure: {after: [NODE], args: {…}}'"
            yield Fault(f"'{have}' needs '{need}'", code="measure-and-pay", fix=fix, path=(have,))
        if measured:
            yield from cls._measured(data)
        elif data.get("level", "trajectory") in ("trajectory", None):
            for key in ("roles", "nodes"):
                if data.get(key) is not None:
                    message = (
                        f"'{key}' belongs to a reward of level turn or role; this one is of the trajectory"
                    )
                    fix = "write 'to', or add 'level: role'" if key == "roles" else "add 'level: turn'"
                    yield Fault(message, code="useless-key", fix=fix, path=(key,))
        elif data.get("to") is not None:
            message = f"'to' belongs to a trajectory's reward; this one is of level {data['level']}"
            yield Fault(message, code="useless-key", fix="write 'roles'", path=("to",))

    @classmethod
    def _measured(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("level") not in (None, "turn"):
            message = f"a measured reward pays turns; 'level' is {data['level']}"
            yield Fault(message, code="measure-and-pay", fix="remove 'level'", path=("level",))
        if data.get("pay") == {}:
            yield Fault("'pay' names nobody", code="empty", fix="write {ROLE: gain}", path=("pay",))
        for key, fix in (
            ("args", "move it into 'measure'"),
            ("to", "name roles in 'pay'"),
            ("roles", "name roles in 'pay'"),
        ):
            if data.get(key) is not None:
                yield Fault(f"'{key}' isn't read beside 'measure'", code="useless-key", fix=fix, path=(key,))


OUTCOMES = (
    "ok",
    "malformed",
    "truncated",
    "prompt_too_long",
    "tool_error",
    "timeout",
    "limit",
    "cancelled",
    "paused",
    "engine_error",
)


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
        near = re.sub(r"\W+", "_", value).strip("_")
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
    discount: float = Field(1.0, ge=0, le=1)
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
            if name not in OUTCOMES:
                yield unknown_word("outcome", name, OUTCOMES, path=("outcomes", name))


NodeBase.model_rebuild()
WorkflowNode.model_rebuild()
