"""`@workflow`: an async function as a workflow. The decorator only remembers; the compiler asks for the data.

What it declares is the same data as a YAML workflow's, read by the same reader; every value keeps its line.
Knows no graph.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from masflow.as_data import plain_data, type_data
from masflow.decorators import lines_of
from masflow.errors import Problem, SpecError, Where, boundary

__all__ = ["workflow"]

F = TypeVar("F", bound=Callable[..., Any])
PARAMETERS = ("task", "agents", "ctx")
NOT_DECLARED = {
    "state": "the function has variables of its own",
    "nodes": "the function makes its calls itself",
    "edges": "the function is the order of its calls",
    "function": "it is the one below",
}
"""Keys of a YAML workflow that a function does without, and why."""


def workflow(function: Any = None, /, **settings: Any) -> Any:
    """Make an `async def f(task, agents, ctx)` a workflow; the function itself stays as it is.

    Args:
        settings: the keys of a YAML workflow: `task` (fields by name, or a dataclass), `roles`, `tools`,
            `rewards`, `params`, `limits`, `output`, `credit`, `discount`, `outcomes`, `summary`; and
            `workflows` (name → another such function, a file, or {use, params, rewards}), which the function
            may run and its roles may call like tools; and `timeout_s`.
    """

    def declare(function: F) -> F:
        function.__masflow_workflow__ = lambda: _Declared(function, settings).data()  # type: ignore[attr-defined]
        return function

    return declare if function is None else declare(function)


class _Declared:
    """One decorated function on its way to data."""

    def __init__(self, function: Any, settings: dict[str, Any]):
        self.function, self.settings = function, settings
        self.name = getattr(function, "__name__", "workflow")
        self.file = Path(function.__code__.co_filename)
        self.lines = lines_of(self.file, self.name)
        self.problems: list[Problem] = []

    def data(self) -> dict[str, Any]:
        """`{data, lines, problems}` as JSON data."""
        self._check()
        summary = (inspect.getdoc(self.function) or "").strip().split("\n\n")[0].replace("\n", " ")
        data: dict[str, Any] = {"name": self.name, "function": f"{self.file}:{self.name}"}
        if summary:
            data["summary"] = summary
        for key, value in self.settings.items():
            if key in NOT_DECLARED:
                why = NOT_DECLARED[key]
                self._problem((key,), "not-declared", f"'{key}' isn't declared: {why}", f"remove '{key}'")
            elif key != "workflows":
                data[key] = self._converted(key, value)
        data["nodes"] = self._nodes(data)
        lines = [[list(path), line] for path, line in self.lines.items()]
        return {"data": data, "lines": lines, "problems": [asdict(p) for p in self.problems]}

    def _check(self) -> None:
        if not inspect.iscoroutinefunction(self.function):
            yields = inspect.isasyncgenfunction(self.function)
            message = f"'{self.name}' is no async function, so it can't wait for agents"
            if yields:
                message = f"'{self.name}' yields values; a workflow returns one"
            self._problem((), "not-async", message, f"write 'async def {self.name}(task, agents, ctx)'")
            return
        try:
            inspect.signature(self.function).bind(*PARAMETERS)
        except TypeError as error:
            message = f"'{self.name}' is called with task, agents and ctx: {error}"
            self._problem((), "wrong-signature", message, f"write 'async def {self.name}(task, agents, ctx)'")

    def _converted(self, key: str, value: Any) -> Any:
        made: Any = {}
        with boundary(key) as caught:
            try:
                made = self._made(key, value)
            except SpecError as error:
                self.problems += [self._placed(problem, key) for problem in error.problems]
        if caught.error is not None:
            message = f"can't be read: {caught.error.removeprefix(f'{key}: ')}"
            self._problem((key,), "bad-value", message, f"write '{key}' as plain data, as in a YAML file")
        odd = _odd(made, (key,))
        if odd is None:
            return made
        path, what = odd
        self._problem(path, "bad-value", what, "write text, numbers, lists and mappings, as in a YAML file")
        return {}

    def _made(self, key: str, value: Any) -> Any:
        if key == "task":
            return _task(value)
        if key == "roles" and isinstance(value, dict):
            return {name: self._role(role) for name, role in value.items()}
        if key == "tools" and isinstance(value, dict):
            return {name: self._tool(tool) for name, tool in value.items()}
        return self._plain(value, key)

    def _role(self, role: Any) -> Any:
        if not isinstance(role, dict):
            return self._plain(role, "roles")
        role, reply = dict(role), role.get("reply")
        if isinstance(reply, type):
            role["reply"] = {"json": type_data(reply)}
        elif isinstance(reply, dict):
            role["reply"] = {k: type_data(v) if k in ("tags", "json") else v for k, v in reply.items()}
        return self._plain(role, "roles")

    def _tool(self, tool: Any) -> Any:
        tool = dict(tool) if isinstance(tool, dict) else {"use": tool}
        if isinstance(tool.get("parameters"), dict):
            tool["parameters"] = {name: type_data(kind) for name, kind in tool["parameters"].items()}
        return self._plain(tool, "tools")

    def _nodes(self, data: dict[str, Any]) -> dict[str, Any]:
        """A node for everything that the function may call."""
        nodes: dict[str, Any] = {}
        for section, kind in (("roles", "role"), ("tools", "tool")):
            entries = data.get(section)
            for name in entries if isinstance(entries, dict) else ():
                self._add(nodes, section, name, {kind: name})
        inner = self.settings.get("workflows", {})
        if not isinstance(inner, dict):
            message = f"'workflows' is a mapping of names to workflows; got {inner!r}"
            self._problem(("workflows",), "wrong-type", message, "write {NAME: FUNCTION}")
            return nodes
        for name, entry in inner.items():
            entry = dict(entry) if isinstance(entry, dict) else {"use": entry}
            if "use" not in entry:
                message = f"workflow '{name}' doesn't say which"
                self._problem(("workflows", name), "missing-key", message, "add 'use': FUNCTION or FILE")
                continue
            entry["workflow"] = entry.pop("use")
            self._add(nodes, "workflows", name, self._plain(entry, "workflows"))
        return nodes

    def _add(self, nodes: dict[str, Any], section: str, name: str, node: Any) -> None:
        if name in nodes:
            message = f"'{name}' names two of roles, tools and workflows"
            self._problem((section, name), "name-clash", message, "rename one of them")
        nodes[name] = node
        for path, line in list(self.lines.items()):
            if path[:2] == (section, name):
                self.lines[("nodes", name, *path[2:])] = line

    def _plain(self, value: Any, key: str) -> Any:
        return plain_data(value, self.problems, self._where(key))

    def _where(self, *path: str | int) -> Where:
        near = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)
        line = 0 if near is None else self.lines[near]
        return Where(str(self.file), line, ".".join(map(str, path)))

    def _problem(self, path: tuple[str | int, ...], code: str, message: str, fix: str) -> None:
        self.problems.append(Problem.at(self._where(*path), code, message, fix))

    def _placed(self, problem: Problem, key: str) -> Problem:
        where = self._where(key)
        return Problem.at(where, problem.code, problem.message, problem.fix)


def _odd(value: Any, path: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], str] | None:
    """(path, what it is) of the first thing inside that a document can't hold."""
    if isinstance(value, dict):
        keys = [key for key in value if not isinstance(key, str)]
        if keys:
            return path, f"a name is text; got {keys[0]!r} ({type(keys[0]).__name__})"
        return next((odd for key, inner in value.items() if (odd := _odd(inner, (*path, key)))), None)
    if isinstance(value, list):
        return next((odd for i, inner in enumerate(value) if (odd := _odd(inner, (*path, i)))), None)
    if value is None or isinstance(value, (str, bool, int)):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, f"{value} isn't a finite number")
    return path, f"a {type(value).__name__} is no data: {value!r:.60}"


def _task(task: Any) -> Any:
    """Fields by name: of a mapping, or of a class with annotations (a dataclass, a TypedDict, …)."""
    if not isinstance(task, type):
        return {n: type_data(v) for n, v in task.items()} if isinstance(task, dict) else plain_data(task)
    hidden = {f.name for f in fields(task) if f.metadata.get("hidden")} if is_dataclass(task) else set()
    found = {}
    for name, kind in typing.get_type_hints(task, include_extras=True).items():
        words = getattr(kind, "__metadata__", ())
        written = type_data(kind.__origin__ if words else kind)
        found[name] = {"type": written, "hidden": True} if name in hidden or "hidden" in words else written
    return found
