"""Tool calls of ReAct roles: what is offered, how it is described to a model, and whether its call fits.

In dialect `text` the system message describes the tools and a call is
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; it needs no chat template. In the others the schemas
go with the conversation's first message, for the chat template to describe. One call a turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from masflow.compiler.graph import RoleIR, ToolIR
from masflow.models.dialects import CLOSING, OPENING, dialect_named
from masflow.spec.replies import fields_of
from masflow.spec.types import Type, mismatch, unwritable

HANDOFF = "handoff"
NO_CALLS_LEFT = "(No tool calls are left: give the final answer now.)"


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply; `reason` says why it is malformed."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    reason: str = ""


def has_call(text: str, dialect: str = "text") -> bool:
    return dialect_named(dialect).has(text)


def parse_call(
    text: str, tools: dict[str, dict[str, Type]], stop: Sequence[str] = (), dialect: str = "text"
) -> ToolCall:
    """Read the one tool call of a reply.

    Args:
        tools: parameters of each tool offered, by tool.
        stop: stop strings; a closing tag among them counts as written.
        dialect: the form that the model writes (`masflow.models.dialects`).
    """
    found = dialect_named(dialect).read(text, stop)
    if found.reason:
        return ToolCall(reason=found.reason)
    name, arguments = found.name, found.arguments
    if name not in tools:
        return ToolCall(reason=f"unknown tool {name!r}; known: {', '.join(tools) or '(none)'}")
    if not isinstance(arguments, dict):
        return ToolCall(reason=f"the arguments of {name} aren't an object")
    odd = unwritable(arguments)
    if odd:
        return ToolCall(reason=f"an argument of {name} {odd}")
    problem = mismatch(arguments, Type("record", fields=tuple(tools[name].items())), name)
    return ToolCall(reason=problem) if problem else ToolCall(name, arguments)


def translated(text: str, dialect: str) -> str:
    """A demonstrated reply in the form that the model writes; demonstrations may be written in masflow's own,
    whichever model learns from them. What holds no readable call stays as it is."""
    plain = dialect_named("text")
    if dialect == "text" or not plain.has(text):
        return text
    found = plain.read(text)
    if found.reason or not isinstance(found.arguments, dict):
        return text
    return dialect_named(dialect).write(found.before, found.name, found.arguments)


def offered(role: RoleIR, tools: dict[str, ToolIR]) -> dict[str, dict[str, Type]]:
    """Parameters of every tool that a role may call; a handoff that is no reply field is one of them."""
    found = {name: _parameters(tools[name]) for name in role.tools}
    if hands_off_by_call(role):
        found[HANDOFF] = {"to": Type("choice", choices=pushes(role))}
    return found


def _parameters(tool: ToolIR) -> dict[str, Type]:
    """Types by parameter; one that the function doesn't require may be left out, no other one, whatever its
    type."""
    function = tool.function
    required = function.required if function.params else tuple(tool.parameters)
    found = {}
    for name, type_ in tool.parameters.items():
        may_be_null = name not in required or (type_.nullable and type_.kind != "any")
        found[name] = replace(type_, nullable=may_be_null)
    return found


def pushes(role: RoleIR) -> tuple[str, ...]:
    push = role.handoff.push if role.handoff else ()
    return (push,) if isinstance(push, str) else tuple(push)


def hands_off_by_call(role: RoleIR) -> bool:
    return role.handoff is not None and not set(pushes(role)) <= set(fields_of(role.reply))


def schemas(parameters: dict[str, dict[str, Type]], tools: dict[str, ToolIR]) -> tuple[dict[str, Any], ...]:
    """The tools as JSON Schemas, as chat templates take them."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": tools[name].summary if name in tools else "Hand the floor to another.",
                "parameters": {
                    "type": "object",
                    "properties": {key: json_schema(type_) for key, type_ in fields.items()},
                    "required": [key for key, type_ in fields.items() if not type_.nullable],
                },
            },
        }
        for name, fields in parameters.items()
    )


def json_schema(type_: Type) -> dict[str, Any]:
    names = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
    if type_.kind == "list":
        assert type_.item is not None
        return {"type": "array", "items": json_schema(type_.item)}
    if type_.kind == "record":
        return {"type": "object", "properties": {name: json_schema(inner) for name, inner in type_.fields}}
    if type_.kind == "choice":
        return {"enum": list(type_.choices)}
    return {"type": names[type_.kind]} if type_.kind in names else {}


def description(tool_schemas: Sequence[dict[str, Any]]) -> str:
    """What the system message says about the tools."""
    lines = [json.dumps(schema["function"], ensure_ascii=False) for schema in tool_schemas]
    example = f'{OPENING}{{"name": "TOOL", "arguments": {{"PARAMETER": "VALUE"}}}}{CLOSING}'
    return "\n".join(["You may call a tool, one in a reply, by writing", example, "Tools:", *lines])


def tools_text(tool_schemas: Sequence[dict[str, Any]]) -> str:
    """The schemas as a conversation's first message carries them (`Message.tools`)."""
    return json.dumps(list(tool_schemas), ensure_ascii=False)


def result_text(value: Any) -> str:
    """A tool's value as the text of its message: text itself, the `text` field of a record, or JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return json.dumps(value, ensure_ascii=False)
