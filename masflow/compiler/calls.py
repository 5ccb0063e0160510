"""What the text of a workflow's function says of its calls: names that don't exist, values nobody reads.

Only calls that are written out, `agents.NAME(…)`, `ctx.tool("NAME", …)`, `ctx.run("NAME", …)`, are looked at;
what reaches a role, a tool or a workflow in another way is known only when it is played.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from masflow.compiler.analysis import references
from masflow.compiler.graph import Graph, RoleIR
from masflow.compiler.repeats import unrepeatable
from masflow.errors import Problem, Where, closest, unknown
from masflow.project import display_path

__all__ = ["call_problems"]

OF_CALL = ("key", "prompt", "thread", "member")
"""Words of a call that are no values of its prompt."""
KNOWN = ("task", "params", "me", "memory", "visit", "key", "loop", "range", "dict", "namespace")
"""Names that a prompt has without being given them."""


def call_problems(graph: Graph) -> Iterator[Problem]:
    """Problems of the calls that stand in the function of a graph, at their lines."""
    assert graph.program is not None
    path, _, name = graph.program.function.ref.rpartition(":")
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    function = next((f for f in tree.body if isinstance(f, ast.AsyncFunctionDef) and f.name == name), None)
    names = [a.arg for a in function.args.args] if function is not None else []
    if function is None or len(names) < 3:
        return
    agents, context = names[1], names[2]
    for line, message, fix in unrepeatable(tree, function):
        yield Problem.at(Where(display_path(Path(path)), line), "warn-not-repeatable", message, fix)
    for node in ast.walk(function):
        where = Where(display_path(Path(path)), getattr(node, "lineno", 0))
        role = _attribute(node, agents)
        if role is not None and role not in {r.name for r in graph.roles}:
            yield unknown(where, "role", role, [r.name for r in graph.roles])
        if isinstance(node, ast.Call):
            yield from _call(node, where, graph, agents, context)


def _attribute(node: ast.AST, of: str) -> str | None:
    """NAME of `of.NAME`."""
    mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == of
    return node.attr if mine and isinstance(node, ast.Attribute) else None


def _call(node: ast.Call, where: Where, graph: Graph, agents: str, context: str) -> Iterator[Problem]:
    kind = {"tool": "tool", "run": "workflow"}.get(_attribute(node.func, context) or "")
    first = node.args[0] if node.args else None
    if kind is not None and isinstance(first, ast.Constant) and isinstance(first.value, str):
        known = [n.name for n in graph.nodes if n.kind == kind]
        if first.value not in known:
            yield unknown(where, kind, first.value, known)
    callee = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    role = next((r for r in graph.roles if r.name == _attribute(callee, agents)), None)
    if role is not None and all(k.arg is not None for k in node.keywords):
        yield from _values(node, where, graph, role, agents)


def _values(node: ast.Call, where: Where, graph: Graph, role: RoleIR, agents: str) -> Iterator[Problem]:
    """Warns of values that no prompt reads, and of names that a prompt prints and the call doesn't give."""
    given = [k.arg for k in node.keywords if k.arg is not None and k.arg not in OF_CALL]
    texts = [role.system, role.prompt, role.next_prompt]
    for keyword in node.keywords:
        if keyword.arg == "prompt":
            if not (isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)):
                return
            texts[1] = keyword.value.value
    if role.reply.format == "choice" and isinstance(role.reply.choice, str):
        texts.append("{{ (" + role.reply.choice + ") is defined }}")
    found = [reference for text in texts if text for reference in references(text, "template")]
    read = list(dict.fromkeys(str(reference.path[0]) for reference in found))
    for name in given:
        if name not in read:
            near = closest(name, [n for n in read if n not in given])
            message = f"no prompt of role '{role.name}' reads '{name}'"
            fix = f"write '{near}'" if near else f"remove '{name}', or name it in the prompt"
            yield Problem.at(where, "warn-unread-value", message, fix)
    fields = {f.name for f in graph.task}
    for name in read:
        head = next(reference for reference in found if reference.path[0] == name)
        needed = head.printed if len(head.path) == 1 else not head.guarded
        if needed and name not in given and name not in fields and name not in KNOWN:
            message = f"the prompt of role '{role.name}' prints '{name}', and this call doesn't give it"
            fix = f"write {agents}.{role.name}({name}=…), or guard it in the prompt"
            yield Problem.at(where, "warn-missing-value", message, fix)
