"""Types of what nodes give: replies by their format, sub-workflows by their output, lists by their items.

A tool's and a call's result is unknown. Knows no places: whether a node has run is `scopes`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from masflow.compiler.expressions import TemplateProblem, value
from masflow.compiler.graph import Graph, Node, RoleIR
from masflow.compiler.inference import (
    NULL,
    STR,
    UNKNOWN,
    declared,
    join,
    list_of,
    non_null,
    nullable,
    record,
    type_of,
)
from masflow.compiler.team import speakers_of
from masflow.spec import patterns, replies
from masflow.spec.types import Type

__all__ = ["NodeValue", "node_value", "reply_type"]

_SCHEMA_KINDS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}


@dataclass(frozen=True)
class NodeValue:
    """What a visit of a node leaves, once it has run."""

    type: Type
    item: Type
    """Of one item or copy; the type itself where the value is no list."""
    note: str = ""
    """Why it may be null."""

    @property
    def is_list(self) -> bool:
        return self.type is not self.item


def reply_type(reply: replies.Reply, params: Mapping[str, Any]) -> Type:
    """Type of a well-formed reply's value."""
    if isinstance(reply, replies.TextReply):
        return record(text=STR)
    if isinstance(reply, replies.TagReply):
        return record(**{reply.tag: STR})
    if isinstance(reply, replies.TagsReply):
        return declared(Type("record", fields=tuple(reply.tags.items())))
    if isinstance(reply, replies.ChoiceReply):
        return record(choice=_choice(reply, params))
    if isinstance(reply, replies.CodeReply):
        return record(code=STR)
    if isinstance(reply, replies.RegexReply):
        groups = patterns.groups(reply.regex)
        return record(**{name: STR if always else nullable(STR) for name, always in groups.items()})
    if isinstance(reply, replies.JsonReply) and reply.fields is not None:
        return declared(Type("record", fields=tuple(reply.fields.items())))
    if isinstance(reply, replies.JsonReply):
        return _schema(reply.json_schema or {})
    return UNKNOWN


def _choice(reply: replies.ChoiceReply, params: Mapping[str, Any]) -> Type:
    """The words themselves where they stand in the file or in params alone, else text."""
    if not isinstance(reply.choice, str):
        return Type("choice", choices=tuple(reply.choice))
    try:
        words = value(reply.choice, {"params": dict(params)}) if "params" in reply.choice else None
    except TemplateProblem:
        return STR
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return Type("choice", choices=tuple(words))
    return STR


def _schema(schema: Any) -> Type:
    """What a JSON Schema says of types; unknown where it says little."""
    if not isinstance(schema, dict):
        return UNKNOWN
    kind, properties = schema.get("type"), schema.get("properties")
    if isinstance(schema.get("enum"), list) and all(isinstance(word, str) for word in schema["enum"]):
        return Type("choice", choices=tuple(schema["enum"]))
    if kind == "object" and isinstance(properties, dict) and schema.get("additionalProperties") is False:
        required = schema.get("required") or ()
        found = {name: _schema(inner) for name, inner in properties.items()}
        return record(**{name: t if name in required else nullable(t) for name, t in found.items()})
    if kind == "array":
        return list_of(_schema(schema.get("items")))
    return Type(_SCHEMA_KINDS[kind]) if isinstance(kind, str) and kind in _SCHEMA_KINDS else UNKNOWN


def node_value(node: Node, graph: Graph, output_of: Callable[[str], Type]) -> NodeValue:
    """Args: output_of: type of the output of a sub-workflow, by the key of its graph."""
    roles = [role for role in graph.roles if role.name in speakers_of(node)]
    is_list = node.foreach is not None or any(role.members and not role.is_family for role in roles)
    item, note = _item(node, graph, roles, is_list, output_of)
    if is_list:
        return NodeValue(list_of(item), item)
    return NodeValue(item, item, note)


def _item(
    node: Node, graph: Graph, roles: list[RoleIR], is_list: bool, output_of: Callable[[str], Type]
) -> tuple[Type, str]:
    if node.kind == "role" and roles:
        found, note = _role_value(roles[0], graph, is_list)
        for role in roles[1:]:
            other, other_note = _role_value(role, graph, is_list)
            found, note = join(found, other), note or other_note
        return found, note
    if node.kind == "workflow" and node.workflow is not None:
        output = output_of(node.workflow)
        return (nullable(output) if is_list else output), ""
    if node.kind == "human" and node.human is not None:
        return _human_value(node, graph)
    if node.kind == "set":
        return NULL, f"'{node.name}' only computes and has no value"
    return UNKNOWN, ""


def _role_value(role: RoleIR, graph: Graph, is_list: bool) -> tuple[Type, str]:
    found = reply_type(role.reply, graph.params)
    if role.reply.default is not None:
        found = join(found, type_of(role.reply.default))
    elif role.reply.on_malformed == "continue" or (is_list and role.reply.on_malformed != "end"):
        return nullable(found), f"a malformed reply of '{role.name}' makes it null"
    if role.handoff is not None and not any(name in _fields(found) for name in _pushed(role)):
        return nullable(found), f"a handoff of '{role.name}' leaves it null"
    return found, ""


def _fields(type_: Type) -> list[str]:
    return [name for name, _ in type_.fields]


def _pushed(role: RoleIR) -> tuple[str, ...]:
    push = role.handoff.push if role.handoff else ()
    return (push,) if isinstance(push, str) else tuple(push)


def _human_value(node: Node, graph: Graph) -> tuple[Type, str]:
    human = node.human
    assert human is not None
    found = reply_type(human.reply, graph.params)
    if human.in_training == "skip":
        return nullable(found), f"'{node.name}' is skipped in training"
    if isinstance(human.in_training, dict) and "role" not in human.in_training:
        return UNKNOWN, ""
    return non_null(found), ""
