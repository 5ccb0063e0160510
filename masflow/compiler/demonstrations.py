"""Demonstration files: each line is a task and the turns of one episode; checked as far as text goes.

Whether a demonstration replays to its end is the player's to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from masflow.compiler.graph import Graph
from masflow.compiler.plan import SourceIR
from masflow.compiler.rows import MAX_REPORTED, checked_rows, data_problem, field_problem, glance
from masflow.errors import Problem, closest
from masflow.spec.types import MAX_LEVELS, is_easy, unwritable

__all__ = ["demonstration_problems"]


def demonstration_problems(
    source: SourceIR, graph: Graph, rows: Iterable[dict[str, Any]] | None = None
) -> list[Problem]:
    """Everything wrong with a file of demonstrations, at most three lines of it named.

    Args:
        rows: of a hub id, once it is loaded; before that nothing is known of it.
    """
    if not source.is_file and rows is None:
        return []
    kinds = {node.name: node.kind for node in graph.nodes}
    right = glance(graph.task)
    found: list[Problem] = []
    for line, row in checked_rows(source) if rows is None else enumerate(rows, 1):
        wrong = (
            None if isinstance(row, Problem) or _is_plain(row, kinds, right) else _wrong(row, kinds, graph)
        )
        if isinstance(row, Problem):
            found.append(row)
        elif wrong:
            fix = 'write {"task": {…}, "turns": [{"node": "…", "reply": "…"}, …]}'
            found.append(data_problem(source.path, line, wrong[0], "bad-demonstration", wrong[1], fix))
        if len(found) == MAX_REPORTED:
            break
    return found


def _is_plain(row: dict[str, Any], kinds: dict[str, str], right: Callable[[dict[str, Any]], bool]) -> bool:
    """A right task, and turns of a known node with a reply in ASCII or a plain value, as nearly all are: seen
    at a glance."""
    task, turns = row.get("task"), row.get("turns")
    if type(task) is not dict or type(turns) is not list or not right(task):
        return False
    for turn in turns:
        if type(turn) is not dict or len(turn) != 2:
            return False
        node, reply = turn.get("node"), turn.get("reply")
        if type(node) is not str or node not in kinds:
            return False
        if type(reply) is str:
            if not reply.isascii():
                return False
        elif kinds[node] == "role" or not is_easy(turn.get("value"), MAX_LEVELS):
            return False
    return True


def _callers(graph: Graph) -> set[str]:
    """Nodes whose roles call tools: a turn of theirs may be what a tool returned."""
    calling = {role.name for role in graph.roles if role.tools}
    return {node.name for node in graph.nodes if calling & {node.role, *node.among}}


def _wrong(row: dict[str, Any], kinds: dict[str, str], graph: Graph) -> tuple[str, str] | None:
    if not isinstance(row.get("task"), dict) or not isinstance(row.get("turns"), list):
        return "", f"a demonstration has 'task' and 'turns', got {', '.join(map(str, row)) or 'nothing'}"
    bad = field_problem(row["task"], graph.task)
    if bad:
        return f"task.{bad[0]}", bad[2]
    odd = unwritable(row["turns"])
    if odd:
        return "turns", f"'turns' {odd}"
    for i, turn in enumerate(row["turns"]):
        where = f"turns[{i}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("node"), str):
            return where, "a turn names its node"
        name = turn["node"].split("/")[0]
        if name not in kinds:
            near = closest(name, kinds)
            return f"{where}.node", f"unknown node '{name}'; " + (
                f"did you mean '{near}'?" if near else f"known: {', '.join(kinds)}"
            )
        if "/" in turn["node"] or kinds[name] != "role" or isinstance(turn.get("reply"), str):
            continue
        if "value" not in turn or "reply" in turn or name not in _callers(graph):
            return f"{where}.reply", f"node '{name}' is a role's, so its turn needs the text of its 'reply'"
    return None
