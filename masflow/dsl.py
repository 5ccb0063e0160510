"""The Python builder: the same documents as YAML, written as calls. Every call remembers its file and line.

    team = Workflow("ask", task={"question": str})
    solver = team.role("solver", prompt="Answer {{ question }}", reply={"tag": "answer"})
    solve = team.node("solve", role=solver)
    team.start >> solve >> team.end
    loaded = team.build()

Knows no graph: it makes plain data and hands it to the same reader as a file's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from masflow.as_data import DOCUMENTS, plain_data, type_data
from masflow.errors import Problem, SpecError, Where
from masflow.project import Loaded, Source, display_path, find_root, load_data

__all__ = [
    "Group",
    "Name",
    "NodeName",
    "Workflow",
    "experiment",
    "field",
    "mapping",
    "runtime",
]

DocumentPath = tuple[str | int, ...]


class Name(str):
    """The name of a role or tool; a plain string to everything else."""


class NodeName(str):
    """The name of a node that edges are drawn from with `>>`, and joined to others with `&`."""

    _team: Workflow

    def __new__(cls, name: str, team: Workflow) -> NodeName:
        made = super().__new__(cls, name)
        made._team = team
        return made

    def __rshift__(self, other: NodeName | Group) -> Group:
        return Group(self._team, (self,)) >> other

    def __and__(self, other: NodeName | Group) -> Group:
        return Group(self._team, (self,)) & other

    def when(self, condition: str) -> Group:
        """The way out that is taken when a bare expression holds: `search.when("…") >> team.end`."""
        return Group(self._team, (self,), condition)

    def switch(self, expression: str, to: dict[Any, str | Sequence[str]]) -> None:
        """Go on at the node that a value of a bare expression names: `{from, switch, to}` of the language."""
        self._team._edge({"from": str(self), "switch": expression, "to": plain_data(to)}, _caller())


class Group:
    """Nodes side by side: the two ends of a fan-out, or one node with a condition."""

    def __init__(self, team: Workflow, names: tuple[str, ...], condition: str | None = None):
        self._team, self._names, self._condition = team, names, condition

    def __and__(self, other: NodeName | Group) -> Group:
        return Group(self._team, (*self._names, *_names_of(other)))

    def __rshift__(self, other: NodeName | Group) -> Group:
        target = other if isinstance(other, Group) else Group(self._team, (other,))
        edge = f"{' & '.join(self._names)} -> {' & '.join(target._names)}"
        self._team._edge(edge if self._condition is None else f"{edge} when {self._condition}", _caller())
        return target


def _names_of(other: NodeName | Group) -> tuple[str, ...]:
    return other._names if isinstance(other, Group) else (other,)


class Workflow:
    """A workflow that is being written; `build` gives what `load` gives for its YAML."""

    def __init__(
        self,
        name: str,
        *,
        task: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        state: dict[str, Any] | None = None,
        **settings: Any,
    ):
        """Begin a workflow.

        Args:
            task, state: fields by name; a type is a type of the language or Python's (`str`, `list[str]`,
                `int | None`, `Literal["a", "b"]`, a dataclass), or the long form made by `field`.
            settings: further keys: `summary`, `limits`, `credit`, `discount`, `outcomes`, `output`.
        """
        self._here = _caller()
        self._data: dict[str, Any] = {"name": name}
        self._places: dict[DocumentPath, Where] = {(): self._here}
        self._problems: list[Problem] = []
        for key, entries in (("task", task), ("state", state)):
            if entries is not None:
                self._data[key] = {entry: type_data(value, _caller()) for entry, value in entries.items()}
        if params is not None:
            self._data["params"] = plain_data(params)
        self._data |= {key: plain_data(value) for key, value in settings.items()}
        self.start = NodeName("start", self)
        self.end = NodeName("end", self)

    def role(self, name: str, **settings: Any) -> Name:
        """Add a role; settings are its keys: `prompt`, `reply`, `sampling`, `conversation`, `tools`, …"""
        reply = settings.get("reply")
        if isinstance(reply, dict):
            settings["reply"] = {
                k: type_data(v, _caller()) if k in ("tags", "json") else v for k, v in reply.items()
            }
        return Name(self._add("roles", name, settings))

    def tool(self, name: str, use: str | Callable[..., Any], **settings: Any) -> Name:
        """Add a tool: a built-in's name, a reference or the function itself, and its settings."""
        if "parameters" in settings:
            settings["parameters"] = {k: type_data(v, _caller()) for k, v in settings["parameters"].items()}
        return Name(self._add("tools", name, {"use": use, **settings}))

    def workflow(self, name: str, definition: str | Workflow) -> Name:
        """Name a sub-workflow: a file, or another builder."""
        return Name(self._add("workflows", name, definition))

    def node(self, name: str, **settings: Any) -> NodeName:
        """Add a node; settings are its keys, with `with_` and `as_` for the two words that Python keeps."""
        return NodeName(self._add("nodes", name, settings), self)

    def edge(self, edge: str | dict[str, Any]) -> None:
        """Add edges as the language writes them: a chain, or the long form."""
        self._edge(plain_data(edge), _caller())

    def reward(self, name: str, use: str | Callable[..., Any], **settings: Any) -> Name:
        """Add a reward: a reference, `well_formed` or the function itself, and its keys."""
        entries = self._data.setdefault("rewards", [])
        here = _caller()
        data = plain_data({"name": name, "use": use, **settings}, self._problems, here)
        self._places[("rewards", len(entries))] = here
        entries.append(data)
        return Name(name)

    def output(self, **fields: Any) -> None:
        """Say what the workflow gives."""
        self._data.setdefault("output", {}).update(plain_data(fields))
        self._places.setdefault(("output",), _caller())

    def build(self) -> Loaded[Any]:
        """The workflow as `masflow.project.load` gives it.

        Raises:
            SpecError: every problem, at the file and line of the call that wrote it.
        """
        if self._problems:
            raise SpecError(self._problems)
        return _load(self._data, self._places, "workflow", self._here)

    def _add(self, section: str, name: str, settings: Any) -> str:
        here = _caller()
        entries = self._data.setdefault(section, {})
        if name in entries:
            first = self._places[(section, name)]
            message = f"{section[:-1]} '{name}' is written twice; first at {first.file}:{first.line}"
            problem = Problem.at(
                _at(here, section, name), "duplicate-name", message, "keep one, or rename one"
            )
            self._problems.append(problem)
        if isinstance(settings, dict) and isinstance(settings.get("workflow"), Workflow):
            self._nest(settings["workflow"], section, name, "workflow")
        if isinstance(settings, Workflow):
            self._nest(settings, section, name)
        self._places[(section, name)] = here
        entries[name] = plain_data(settings, self._problems, here)
        return name

    def _nest(self, inner: Workflow, *path: str) -> None:
        self._problems += inner._problems
        self._places |= {(*path, *below): place for below, place in inner._places.items()}

    def _edge(self, edge: str | dict[str, Any], here: Where) -> None:
        edges = self._data.setdefault("edges", [])
        self._places[("edges", len(edges))] = here
        edges.append(edge)


def field(type_: Any, **settings: Any) -> dict[str, Any]:
    """A field of the task (`hidden`, `from_`) or of state (`default`, `merge`) in long form."""
    made: dict[str, Any] = {"type": type_data(type_, _caller())}
    return made | plain_data(settings)


def mapping(models: dict[str, Any]) -> Loaded[Any]:
    """A mapping document.

    Raises:
        SpecError: every problem, at the line of this call.
    """
    return _document("mapping", {"models": models}, _caller())


def runtime(**settings: Any) -> Loaded[Any]:
    """A runtime document.

    Raises:
        SpecError: every problem, at the line of this call.
    """
    return _document("runtime", settings, _caller())


def experiment(
    workflow: str | Workflow | Callable[..., Any],
    mapping: str | Loaded[Any],
    *,
    params: dict[str, Any] | None = None,
    **settings: Any,
) -> Loaded[Any]:
    """An experiment document over a builder, a file, or a function that `@workflow` decorates.

    Args:
        mapping: a file, or what `mapping` gave; so is `runtime` among the settings.
        params: of the workflow.
        settings: further keys of the document: `data`, `algorithm`, `passes`, `train`, `warm_start`, …
    Raises:
        SpecError: every problem, at the file and line of the call that wrote it.
    """
    here = _caller()
    use: Any = {"use": workflow} | ({"params": params} if params is not None else {})
    data = {"workflow": workflow if isinstance(workflow, str) and params is None else use, "mapping": mapping}
    places: dict[DocumentPath, Where] = {(): here}
    if isinstance(workflow, Workflow):
        if workflow._problems:
            raise SpecError(workflow._problems)
        places |= {("workflow", "use", *path): place for path, place in workflow._places.items()}
    for key, document in [("mapping", mapping), *settings.items()]:
        if isinstance(document, Loaded):
            at_lines = {(key, *path): document.source.where(*path) for path in document.source.lines}
            places |= at_lines
    return _load(plain_data({**data, **settings}, [], here), places, "experiment", here)


def _document(kind: str, data: dict[str, Any], here: Where) -> Loaded[Any]:
    return _load(plain_data(data, [], here), {(): here}, kind, here)


def _load(data: dict[str, Any], places: dict[DocumentPath, Where], kind: str, here: Where) -> Loaded[Any]:
    lines = {path: place.line for path, place in places.items()}
    files = {path: place.file for path, place in places.items() if place.file != here.file}
    script = Path(here.file)
    root = find_root(script if script.exists() else Path.cwd())
    return load_data(
        data, Source(here.file, lines, files), kind, root, path=script if script.exists() else None
    )


def _caller() -> Where:
    """The nearest call from outside this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return Where(display_path(Path(frame.f_code.co_filename)), frame.f_lineno)


def _at(where: Where, *path: str) -> Where:
    return Where(where.file, where.line, ".".join(path))


DOCUMENTS[Workflow] = lambda made: made._data
DOCUMENTS[Loaded] = lambda loaded: loaded.spec
