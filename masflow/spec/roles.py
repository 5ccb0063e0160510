"""Roles and tools: the voices of a team and what they may use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from masflow.spec.base import Fault, Faults, Spec, by_shape
from masflow.spec.names import NameList, name_fault
from masflow.spec.replies import COMMON, FORMATS, HasReply
from masflow.spec.types import TypeField


class Sampling(Spec):
    """How tokens are drawn; a field left out takes the algorithm's, or the engine's, default."""

    temperature: float | None = Field(default=None, ge=0, le=1e3)
    """0 is greedy; above it at least 0.001."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] | None = (
        None
    )
    """Strings that end a reply; they are cut from its text."""

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        said = data.get("temperature")
        if isinstance(said, (int, float)) and 0 < said < 1e-3:
            message = f"'temperature' is {said:g}; it must be 0 (greedy) or at least 0.001"
            yield Fault(
                message, code="out-of-bounds", fix="write 0, or a larger number", path=("temperature",)
            )


class RoleSampling(Spec):
    """Sampling of one role, apart for training and evaluation."""

    hints: ClassVar[dict[str, str]] = {
        name: f"train: {{{name}: …}}" for name in ("temperature", "top_p", "top_k", "stop", "max_tokens")
    }

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
    if not isinstance(value, (int, str, type(None))):
        message = f"'copies' is a number; got {value!r}"
        raise Fault(message, code="wrong-type", fix="write how many speak")
    if isinstance(value, str) and "{{" not in value:
        raise Fault(
            f"'copies' is a number; got '{value}'",
            code="wrong-type",
            fix=f'write "{{{{ {value} }}}}" or a number',
        )
    return value


def _family(value: object) -> object:
    if value is None:
        return value
    if isinstance(value, str):
        if "{{" not in value:
            fix = f"write [{value}, …], or a template"
            raise Fault(f"'names' is a list; got '{value}'", code="wrong-type", fix=fix)
        return value
    if not isinstance(value, (list, tuple)):
        message = f"'names' is a list of names; got {value!r}"
        raise Fault(message, code="wrong-type", fix="write [NAME, NAME]")
    if not value:
        raise Fault("'names' is empty", code="empty", fix="name at least one member")
    faults = [f.below(i) for i, name in enumerate(value) if (f := name_fault(name, "member", reserved=False))]
    if faults:
        raise Faults(faults)
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
    max_calls: int = Field(default=4, ge=1)
    """Tool calls of one visit of a ReAct role at most; the last call of the model offers no tools."""
    approve: Literal["human"] | None = None
    handoff: Handoff | None = None
    copies: Annotated[int | str, BeforeValidator(_count)] | None = None
    """N mappable members NAME_0 … NAME_{N-1} that speak concurrently; a template over params is allowed."""
    names: (
        Annotated[
            Annotated[str, Tag("<template>")] | Annotated[NameList, Tag("<list>")],
            Discriminator(by_shape("<template>", "<template>", "<list>")),
            BeforeValidator(_family),
        ]
        | None
    ) = None
    """A family: one mappable member a name; `me` in its prompt is the member's name."""

    hints: ClassVar[dict[str, str]] = {
        "model": "a mapping's models",
        "temperature": "sampling: {train: {temperature: …}}",
        **{key: f"reply: {{{key}: …}}" for key in (*FORMATS, *COMMON)},
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        for key in ("prompt", "system", "next_prompt"):
            if isinstance(data.get(key), str) and not data[key].strip():
                yield Fault(
                    f"'{key}' is empty", code="empty", fix="name a file or write a template", path=(key,)
                )
        if data.get("copies") is not None and data.get("names") is not None:
            message = "a role has 'copies' (all speak at once) or 'names' (one speaks), not both"
            yield Fault(message, code="copies-and-names", fix="remove one of them", path=("names",))
        if cls.says(data, "max_calls") and not data.get("tools"):
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

    model_config = ConfigDict(extra="allow")

    use: str
    scope: Literal["shared", "episode"] = "shared"
    approve: Literal["human"] | None = None
    summary: str | None = None
    parameters: dict[str, TypeField] | None = None
    """What a ReAct role may pass; read from the function's signature when left out."""
    bind: dict[str, Any] = Field(default_factory=dict)
    """Arguments that every call gets from the task, as values or templates over the task's fields, hidden
    ones too, and params: what one task's functions are, what they return, which tests judge a program. No
    role or node passes them, and no prompt shows them."""
    timeout_s: float = Field(default=30.0, gt=0, le=1e6)
    at_once: int | None = Field(default=None, ge=1, le=1024)
    """Calls that may run beside each other in one process: of a `foreach`'s items, of branches, of other
    episodes. Default: 8, `python` 4, `http` what it permits, tools that only compute 1. Write
    1 for a function that isn't safe in several threads."""

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("scope") == "episode" and cls.says(data, "at_once"):
            message = "a tool of scope 'episode' has a state, which its calls change one after another"
            yield Fault(message, code="useless-key", fix="remove 'at_once'", path=("at_once",))

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})
