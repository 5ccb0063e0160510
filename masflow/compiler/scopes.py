"""Which names exist where in a workflow, of what type, and why one may be null or can't be named there.

Asks `Regions` who has run before whom. Knows no texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from masflow.compiler.analysis import analyse
from masflow.compiler.findings import Found, Scope
from masflow.compiler.graph import END, START, Graph, Node, TaskFieldIR
from masflow.compiler.guards import VISITED_BEFORE, Facts, ran, went_well
from masflow.compiler.inference import (
    BOOL,
    INT,
    STR,
    UNKNOWN,
    declared,
    join,
    list_of,
    nullable,
    record,
    type_of,
)
from masflow.compiler.regions import Regions
from masflow.compiler.templates import GLOBALS
from masflow.compiler.values import NodeValue, node_value
from masflow.errors import closest
from masflow.spec.types import Type

__all__ = ["AnyScope", "CallScope", "ClosedScope", "EndScope", "GraphNames", "NodeScope", "raw_type"]

CONTAINERS = {
    "task": "task field",
    "nodes": "node",
    "state": "state field",
    "params": "param",
    "visits": "node",
    "history": "node",
    "ok": "node",
    "raw": "node",
}
"""Names that hold others, and what these are called."""
ELSEWHERE = {
    "item": "in a node with 'foreach'",
    "index": "in a node with 'foreach' or of a role with copies",
    "others": "in a node with 'foreach' or of a role with copies",
    "me": "in a node of a role with copies or names, and in items",
    "result": "in 'set' and 'write', and in rewards of level turn",
    "visit": "in a node's own fields and edges",
    "memory": "in prompts",
}
"""Names that exist in some places only."""


class GraphNames:
    """One graph with the types of all its names."""

    def __init__(self, graph: Graph, graphs: Mapping[str, Graph], regions: Regions | None = None):
        self.graph = graph
        self.graphs = graphs
        self.regions = regions if regions is not None else Regions.of(graph)
        self.nodes = {node.name: node for node in graph.nodes}
        self.task = {entry.name: entry for entry in graph.task}
        self.hidden = [entry.name for entry in graph.task if entry.hidden]
        self.state = {entry.name: _state_type(entry.type, entry.default) for entry in graph.state}
        self.params = {name: _param_type(value) for name, value in graph.params.items()}
        self._values: dict[str, NodeValue] = {}
        self._outputs: dict[str, Type] = {}

    def value_of(self, name: str) -> NodeValue:
        if name not in self._values:
            self._values[name] = node_value(self.nodes[name], self.graph, self._output)
        return self._values[name]

    def _output(self, key: str) -> Type:
        """Type of a sub-workflow's output."""
        if key not in self._outputs:
            self._outputs[key] = UNKNOWN  # until it is known, and where workflows call each other
            child = self.graphs.get(key)
            if child is not None and child.nodes:
                names = GraphNames(child, self.graphs)
                names._outputs = self._outputs
                scope = NodeScope(names, END, shows_hidden=True)
                self._outputs[key] = record(**{n: raw_type(raw, scope) for n, raw in child.output.items()})
        return self._outputs[key]


def _state_type(type_: Type, default: Any) -> Type:
    found = declared(type_)
    return nullable(found) if default is None and found != UNKNOWN else found


def _param_type(value: Any) -> Type:
    found = type_of(value)
    return UNKNOWN if value is None else found


def raw_type(raw: Any, scope: Scope) -> Type:
    """Type of a value with templates anywhere in it."""
    if isinstance(raw, str):
        return analyse(raw, "value", scope).type if "{" in raw else STR
    if isinstance(raw, Mapping):
        return Type("record", fields=tuple((str(key), raw_type(item, scope)) for key, item in raw.items()))
    if isinstance(raw, (list, tuple)):
        found = [raw_type(item, scope) for item in raw]
        item = found[0] if found else UNKNOWN
        for other in found[1:]:
            item = join(item, other)
        return list_of(item)
    return type_of(raw)


@dataclass(frozen=True)
class NodeScope:
    """What the texts of one node see, before or after it runs; `end` is where output and rewards stand."""

    names: GraphNames
    place: str
    after: bool = False
    """The node's visit is over: its edges are looked at."""
    writing: bool = False
    """Its value is there as `result`, and not yet under its name."""
    shows_hidden: bool = False
    own: Mapping[str, Found] = field(default_factory=dict)
    """Names of this place alone, `visit` and the like."""

    def container(self, name: str) -> str:
        return "" if name in self.own else CONTAINERS.get(name, "")

    def known(self, container: str = "") -> Iterable[str]:
        names = self.names
        if container == "task":
            return list(names.task)
        if container in ("state", "params"):
            return list(names.state if container == "state" else names.params)
        if container:
            return list(names.nodes)
        return [*self.own, *names.task, *names.nodes, *CONTAINERS]

    def find(self, name: str, entry: str | None = None) -> Found | None:
        if entry is not None:
            return self._entry(name, entry)
        if name in self.own:
            return self.own[name]
        if name in CONTAINERS:
            return self._container(name)
        if name in self.names.task:
            return self._task_field(self.names.task[name])
        if name in self.names.nodes:
            return self._node(self.names.nodes[name])
        if name in ELSEWHERE:
            message = f"'{name}' doesn't exist here; it does {ELSEWHERE[name]}"
            return Found(UNKNOWN, fault=("name-not-here", message, "use a name that exists here"))
        return None

    def _container(self, name: str) -> Found:
        if name == "task" and self.names.hidden and not self.shows_hidden:
            fix = "name the fields that are needed"
            message = f"'task' as a whole holds the hidden field '{self.names.hidden[0]}'"
            return Found(UNKNOWN, fault=("hidden-field", message, fix))
        if name in ("state", "params"):
            return Found(record(**(self.names.state if name == "state" else self.names.params)))
        return Found(UNKNOWN)

    def _entry(self, container: str, name: str) -> Found | None:
        names = self.names
        if container == "task":
            return self._task_field(names.task[name]) if name in names.task else None
        if container in ("state", "params"):
            found = (names.state if container == "state" else names.params).get(name)
            if found is None:
                return None
            return Found(
                found, f"state.{name} has no default" if found.nullable and container == "state" else ""
            )
        if name not in names.nodes:
            return None
        value = names.value_of(name)
        if container == "nodes":
            return self._node(names.nodes[name])
        if container == "visits":
            return Found(INT)
        if container == "history":
            return Found(list_of(value.type))
        one = BOOL if container == "ok" else STR
        found = list_of(nullable(one)) if value.is_list else one
        has_run = (self.after and name == self.place) or names.regions.must_precede(name, self.place)
        if has_run and names.nodes[name].when is None and names.nodes[name].kind == "role":
            return Found(found)
        return Found(nullable(found), f"node '{name}' may not have run")

    def _task_field(self, entry: TaskFieldIR) -> Found:
        found = declared(entry.type)
        if entry.hidden and not self.shows_hidden:
            message = f"the hidden field '{entry.name}' may be read by rewards, tools and calls only"
            fix = f"leave '{entry.name}' out, or remove 'hidden: true'"
            return Found(found, fault=("hidden-field", message, fix))
        return Found(found, f"the task field '{entry.name}' may be null")

    def _node(self, node: Node) -> Found:
        """The value of a node's last visit, as this place sees it."""
        name, place, regions = node.name, self.place, self.names.regions
        value = self.names.value_of(name)
        well: Facts = frozenset((went_well(name),))
        if self.writing and name == place:
            message = f"'{name}' is the node itself, whose new value is 'result' here"
            fix = f"write 'result', or 'history.{name}' for earlier visits"
            return Found(value.type, fault=("own-name", message, fix))
        if (self.after and name == place) or (place != START and regions.must_precede(name, place)):
            if node.when is not None:
                return Found(nullable(value.type), f"node '{name}' may be skipped", guards=well)
            return Found(value.type, value.note, guards=well)
        if place != START and regions.may_precede(name, place):
            guards = well if node.when is not None or value.type.nullable else well | {ran(name)}
            if name == place:
                guards = guards | {VISITED_BEFORE}
                return Found(nullable(value.type), "a first visit has no earlier value", guards=guards)
            return Found(nullable(value.type), f"node '{name}' may not have run", guards=guards)
        return Found(value.type, fault=self._unknown_yet(name))

    def _unknown_yet(self, name: str) -> tuple[str, str, str]:
        place, regions = self.place, self.names.regions
        if place not in (START, END) and name != place and regions.concurrent(name, place):
            message = f"'{name}' runs beside '{place}', in another branch; its value can't be seen from here"
            return "sibling-node", message, "read it after the branches have met"
        if name == place:
            message = f"'{name}' has no value before it has run, and is visited once"
            return "not-known-yet", message, "leave it out, or loop back to the node"
        where = "at the start" if place == START else f"when '{place}' runs"
        message = f"'{name}' can't be known {where}: no path leads from it to there"
        return "not-known-yet", message, "name a node that runs before, or change the edges"


@dataclass(frozen=True)
class AnyScope:
    """Several places at once, of which a name has to exist in one: a reward that looks at several nodes."""

    scopes: tuple[NodeScope, ...]

    def container(self, name: str) -> str:
        return self.scopes[0].container(name)

    def known(self, container: str = "") -> Iterable[str]:
        return self.scopes[0].known(container)

    def find(self, name: str, entry: str | None = None) -> Found | None:
        found = [scope.find(name, entry) for scope in self.scopes]
        good = [f for f in found if f is not None and f.fault is None]
        if not good:
            return next((f for f in found if f is not None), None)
        type_ = good[0].type
        for other in good[1:]:
            type_ = join(type_, other.type)
        return Found(type_)


@dataclass(frozen=True)
class CallScope:
    """What prompts of a workflow that is a function see: the task, `params`, and whatever a call gives."""

    names: GraphNames

    def container(self, name: str) -> str:
        return CONTAINERS.get(name, "") if name in ("task", "params") else ""

    def known(self, container: str = "") -> Iterable[str]:
        return self._inner.known(container) if container else [*self.names.task, "params", "task"]

    @property
    def _inner(self) -> NodeScope:
        return NodeScope(self.names, END)

    def find(self, name: str, entry: str | None = None) -> Found | None:
        if entry is not None or name in ("task", "params") or name in self.names.task:
            return self._inner.find(name, entry)
        return None if name in GLOBALS else Found(UNKNOWN)


@dataclass(frozen=True)
class BindScope(CallScope):
    """What a tool may bind: the task's fields, hidden ones too, and `params`."""

    @property
    def _inner(self) -> NodeScope:
        return NodeScope(self.names, END, shows_hidden=True)

    def find(self, name: str, entry: str | None = None) -> Found | None:
        is_known = entry is not None or name in ("task", "params") or name in self.names.task
        return self._inner.find(name, entry) if is_known else None


@dataclass(frozen=True)
class EndScope:
    """What outputs and rewards of a workflow that is a function see; any role may not have been asked."""

    names: GraphNames
    own: Mapping[str, Found] = field(default_factory=dict)

    def container(self, name: str) -> str:
        return "" if name in self.own else CONTAINERS.get(name, "")

    def known(self, container: str = "") -> Iterable[str]:
        return [*self.own, *self._inner.known(container)] if not container else self._inner.known(container)

    @property
    def _inner(self) -> NodeScope:
        return NodeScope(self.names, END, shows_hidden=True)

    def find(self, name: str, entry: str | None = None) -> Found | None:
        if entry is None and name in self.own:
            return self.own[name]
        node = entry if name in ("nodes", "history", "ok", "raw") else name if entry is None else None
        if node is not None and node in self.names.nodes:
            return Found(UNKNOWN)
        return self._inner.find(name, entry)


@dataclass(frozen=True)
class ClosedScope:
    """A few names and no others."""

    own: Mapping[str, Found]
    what: str = "name"
    """What every name is, for messages."""

    def container(self, name: str) -> str:
        return ""

    def known(self, container: str = "") -> Iterable[str]:
        return self.own

    def find(self, name: str, entry: str | None = None) -> Found | None:
        if name in self.own or name in GLOBALS:
            return self.own.get(name)
        message = f"'{name}' isn't {self.what}; known: {', '.join(self.own)}"
        near = closest(name, self.own)
        fix = f"write '{near}'" if near else f"add '{name}: …' to args"
        return Found(UNKNOWN, fault=("unknown-name", message, fix))
