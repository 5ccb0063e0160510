"""Rules of who is named where: roles, members, tools, prompts, sub-workflows; and what nobody uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from masflow.compiler.graph import Graph, Node, RoleIR
from masflow.compiler.team import speakers_of, used_roles
from masflow.errors import Problem, Where, unknown
from masflow.spec.replies import fields_of, needed_fields

__all__ = ["below", "member_problems", "usage_problems"]


def usage_problems(graph: Graph, graphs: Mapping[str, Graph]) -> Iterator[Problem]:
    roles = {role.name: role for role in graph.roles}
    tools = {tool.name for tool in graph.tools}
    for node in graph.nodes:
        if node.kind == "role":
            yield from _role_node_problems(node, roles)
        if node.kind == "tool" and node.tool not in tools:
            yield unknown(below(node.where, "tool"), "tool", node.tool, tools)
        if node.human and isinstance(node.human.in_training, dict):
            stand_in = node.human.in_training.get("role")
            if stand_in is not None and stand_in not in roles:
                yield unknown(below(node.where, "human.in_training.role"), "role", stand_in, roles)
            elif stand_in is not None:
                yield from _stand_in_problems(node, roles[str(stand_in)])
    for role in graph.roles:
        for name in role.tools:
            if name not in tools:
                yield unknown(below(role.where, "tools"), "tool", name, tools)
        if role.approve and not role.tools:
            message = f"role '{role.name}' asks for approval of its tool calls and has no tools"
            yield Problem.at(
                below(role.where, "approve"), "useless-key", message, "add tools, or remove 'approve'"
            )
    yield from member_problems(graph)
    yield from _unused_problems(graph)


def _stand_in_problems(node: Node, role: RoleIR) -> Iterator[Problem]:
    """A role that answers for a person gives what the person would."""
    assert node.human is not None
    wanted, given = needed_fields(node.human.reply), fields_of(role.reply)
    missing = [name for name in wanted if name not in given]
    if missing:
        message = (
            f"a person's answer has '{missing[0]}', and role '{role.name}' answers with {', '.join(given)}"
        )
        fix = f"give role '{role.name}' and the person the same reply"
        yield Problem.at(below(node.where, "human.in_training.role"), "stand-in-reply", message, fix)


def below(where: Where, key: str) -> Where:
    """The place of a key inside a value, on the value's line."""
    return Where(where.file, where.line, f"{where.path}.{key}" if where.path else key)


def _role_node_problems(node: Node, roles: Mapping[str, RoleIR]) -> Iterator[Problem]:
    for name in speakers_of(node):
        role = roles.get(name)
        if role is None:
            yield unknown(below(node.where, "among" if node.among else "role"), "role", name, roles)
            continue
        if node.prompt is None and role.prompt is None and role.system is None:
            message = f"'{node.name}' has no prompt, and neither has role '{name}'"
            yield Problem.at(node.where, "no-prompt", message, f"give role '{name}' or the node a 'prompt'")
        if role.is_family and not node.speaker:
            message = f"role '{name}' is a family, so '{node.name}' must say which member speaks"
            fix = f'add e.g. speaker: "params.team[0]"; members: {", ".join(role.members)}'
            yield Problem.at(node.where, "no-speaker", message, fix)
        if node.foreach is not None and role.members and not role.is_family:
            message = f"'{node.name}' runs once an item, and role '{name}' has copies that speak at once"
            fix = "give foreach a sub-workflow in which the copies speak, or use a role without copies"
            yield Problem.at(below(node.where, "foreach"), "foreach-over-copies", message, fix)
        if node.speaker and not role.is_family:
            message = f"'speaker' chooses a member of a family, and role '{name}' has no 'names'"
            yield Problem.at(
                below(node.where, "speaker"), "useless-key", message, "remove it, or give the role names"
            )
        if node.next_prompt is not None and role.conversation == "none":
            message = f"'next_prompt' belongs to a conversation, and role '{name}' has none"
            yield Problem.at(
                below(node.where, "next_prompt"),
                "useless-key",
                message,
                "add 'conversation: role' to the role",
            )


def member_problems(graph: Graph) -> Iterator[Problem]:
    taken = {role.name: role.name for role in graph.roles}
    for role in graph.roles:
        for member in role.members:
            if member in taken:
                message = (
                    f"member '{member}' of role '{role.name}' has a name that role '{taken[member]}' takes"
                )
                yield Problem.at(role.where, "name-clash", message, "rename one of them")
            taken.setdefault(member, role.name)


def _unused_problems(graph: Graph) -> Iterator[Problem]:
    used = used_roles(graph)
    for role in graph.roles:
        if role.name not in used:
            message = f"no node speaks as role '{role.name}'"
            yield Problem.at(
                role.where, "warn-unused-role", message, f"add a node with 'role: {role.name}', or remove it"
            )
    tools = {n.tool for n in graph.nodes if n.tool} | {t for role in graph.roles for t in role.tools}
    for tool in graph.tools:
        if tool.name not in tools:
            message = f"nothing uses tool '{tool.name}'"
            yield Problem.at(
                tool.where, "warn-unused-tool", message, "use it in a node or a role, or remove it"
            )
