"""Workflows written as functions: finds them, reads what they declare, and checks what can be known of them.

What a function calls, how often and in which order is known only when it is played; names inside its prompts
that a call may hand over are therefore not judged here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from masflow.compiler.graph import FunctionIR, Graph, ToolIR
from masflow.compiler.usage import below, member_problems
from masflow.decorators import decorated
from masflow.errors import Problem, SpecError, Where, unknown
from masflow.project import Loaded, Source, display_path, find_root, load
from masflow.spec.problems import problems_of
from masflow.spec.program import Program

__all__ = ["AGENT", "agent_tool", "function_of", "load_workflow", "program_problems", "split_ref"]

AGENT = "agent"
"""Stands for the function of a tool that is another workflow."""
UNLIMITED = 1_000_000
"""Visits of a role without `limits.visits`: `limits.turns` bounds them."""
_REF = re.compile(r"(?P<file>.+\.py)(?::(?P<name>[A-Za-z_]\w*))?\Z")


def split_ref(written: str) -> tuple[str, str | None]:
    """`file.py:name` → (`file.py`, `name`); anything else is a file whole."""
    match = _REF.match(written.strip())
    return (match["file"], match["name"]) if match else (written, None)


def load_workflow(path: Path, name: str | None, where: Where) -> Loaded[Any]:
    """A workflow document: a YAML file, or a function of a Python file.

    Args:
        name: of the function; may be left out where a file has only one, or one of its own name.
        where: what names it.
    Raises:
        SpecError: every problem of this document, at its own file and lines.
    """
    if path.suffix != ".py":
        return load(path, "workflow")
    name = name or _only(path, where)
    try:
        found = _declared(f"{path.absolute()}:{name}")
    except SpecError as error:
        raise SpecError(Problem.at(where, p.code, p.message, p.fix) for p in error.problems) from None
    lines = {tuple(place): line for place, line in found["lines"]}
    source = Source(display_path(path), lines)
    if found["problems"]:
        raise SpecError(Problem(**{**p, "file": source.file}) for p in found["problems"])
    try:
        spec = Program.model_validate(found["data"])
    except ValidationError as error:
        raise SpecError(problems_of(error, found["data"], source.where, lines)) from None
    return Loaded("workflow", spec, source, path, find_root(path))


def function_of(ref: str) -> FunctionIR:
    """The function of a workflow that was loaded, with its file's hash."""
    return _declared(ref)["function"]


def _only(path: Path, where: Where) -> str:
    names = list(decorated(path))
    if len(names) == 1 or path.stem in names:
        return path.stem if path.stem in names else names[0]
    if not names:
        _check_syntax(path)
        message, fix = f"'{path.name}' has no function with '@workflow'", "decorate one, or name a YAML file"
        raise SpecError(Problem.at(where, "no-workflow", message, fix))
    message = f"'{path.name}' has several workflows: {', '.join(names)}"
    raise SpecError(Problem.at(where, "ambiguous-workflow", message, f"write '{path.name}:{names[0]}'"))


def _check_syntax(path: Path) -> None:
    """Raises SpecError where a file can't be read as Python, at its own line."""
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        where = Where(display_path(path), error.lineno or 0)
        raise SpecError(
            Problem.at(where, "bad-python", f"no Python: {error.msg}", "mend this line")
        ) from None
    except (OSError, ValueError) as error:
        where = Where(display_path(path))
        raise SpecError(Problem.at(where, "bad-python", f"can't be read: {error}", "mend the file")) from None


def _declared(ref: str) -> dict[str, Any]:
    stat = Path(ref.rpartition(":")[0]).stat()
    return _read(ref, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _read(ref: str, changed_ns: int, size: int) -> dict[str, Any]:
    from masflow.functions import read_program

    return read_program(ref, Where(ref), find_root(Path(ref.rpartition(":")[0])))


def agent_tool(name: str, child: Graph, given: Mapping[str, Any], where: Where) -> ToolIR | Problem:
    """A workflow as a tool of a role: its visible task fields are the parameters, its output the result.

    Args:
        given: fields of the workflow that calls it: a hidden field of the same name is handed on.
    """
    lost = [f.name for f in child.task if f.hidden and not f.type.nullable and f.name not in given]
    if lost:
        message = f"workflow '{name}' has the hidden field '{lost[0]}', which a role can't fill in"
        fix = f"declare '{lost[0]}' in the task of this workflow too; it is handed on"
        return Problem.at(where, "hidden-parameter", message, fix)
    shown = {f.name: f.type for f in child.task if not f.hidden}
    required = tuple(n for n, kind in shown.items() if not kind.nullable)
    function = FunctionIR(AGENT, params=tuple(shown), required=required)
    return ToolIR(name, function, summary=child.summary, parameters=shown, where=where)


def program_problems(graph: Graph) -> Iterator[Problem]:
    """Rules of who is named where, for a workflow that is a function."""
    tools = {tool.name for tool in graph.tools}
    for role in graph.roles:
        for name in role.tools:
            if name not in tools:
                yield unknown(below(role.where, "tools"), "tool", name, tools)
        if role.handoff is not None:
            message = f"role '{role.name}' hands off to a stack in state, and a function has none"
            fix = "let the reply name who is next, and call that role"
            yield Problem.at(below(role.where, "handoff"), "handoff-in-function", message, fix)
        if role.conversation == "node":
            message = f"role '{role.name}' keeps a conversation a node, and a function has none"
            fix = "write conversation: role; a call's thread=… names one of several"
            yield Problem.at(below(role.where, "conversation"), "node-in-function", message, fix)
        if role.approve and not role.tools:
            message = f"role '{role.name}' asks for approval of its tool calls and has no tools"
            fix = "add tools, or remove 'approve'"
            yield Problem.at(below(role.where, "approve"), "useless-key", message, fix)
    for reward in graph.rewards:
        if reward.measure_after:
            names = ", ".join(reward.measure_after)
            message = (
                f"whether a paid turn of '{reward.name}' speaks beside {names} is known only when played"
            )
            fix = "await what is measured before asking the roles that it pays"
            yield Problem.at(below(reward.where, "measure"), "warn-order-unknown", message, fix)
    yield from member_problems(graph)
