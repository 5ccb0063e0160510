"""Rules of state: what is written is declared, and what is written at the same time has a merge rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from masflow.compiler.graph import Graph, Node, StateFieldIR
from masflow.compiler.regions import Regions
from masflow.compiler.team import speakers_of
from masflow.errors import Problem, Where, unknown

__all__ = ["conversation_problems", "self_concurrent", "state_problems"]


@dataclass(frozen=True)
class _Writer:
    node: Node
    how: str

    @property
    def where(self) -> Where:
        return Where(self.node.where.file, self.node.where.line, f"{self.node.where.path}.{self.how}")


def self_concurrent(node: Node, graph: Graph) -> bool:
    """Whether the node's own items or copies run at the same time."""
    copies = any(
        r.members and not r.is_family for name in speakers_of(node) for r in graph.roles if r.name == name
    )
    return copies or (node.foreach is not None and not node.in_order)


def state_problems(graph: Graph, regions: Regions | None) -> Iterator[Problem]:
    """Args: regions: None when the flow is broken; then concurrency isn't judged."""
    declared = {entry.name: entry for entry in graph.state}
    writers: dict[str, list[_Writer]] = {}
    for node in graph.nodes:
        for how, written in (("set", node.set_), ("write", node.write)):
            for name in written:
                if name in declared:
                    writers.setdefault(name, []).append(_Writer(node, how))
                else:
                    yield unknown(_Writer(node, how).where, "state field", name, declared)
    for role in graph.roles:
        if role.handoff and role.handoff.to.removeprefix("state.") not in declared:
            yield unknown(role.where, "state field", role.handoff.to, [f"state.{n}" for n in declared])
    for entry in graph.state:
        if regions is not None:
            yield from _concurrent_problems(entry, writers.get(entry.name, []), graph, regions)


def _concurrent_problems(
    entry: StateFieldIR, writers: list[_Writer], graph: Graph, regions: Regions
) -> Iterator[Problem]:
    for one in writers:
        if one.how == "write" and entry.merge == "replace" and self_concurrent(one.node, graph):
            yield _clash(
                entry,
                one,
                one,
                f"the items of '{one.node.name}'" if one.node.foreach else f"the copies at '{one.node.name}'",
            )
    merged = entry.merge != "replace"
    if merged and all(w.how == "write" for w in writers):
        return
    branched = [w for w in writers if regions.enclosing(w.node.name)]
    for i, one in enumerate(branched):
        for other in branched[i + 1 :]:
            if merged and "set" not in (one.how, other.how):
                continue
            if regions.concurrent(one.node.name, other.node.name):
                yield _clash(entry, one, other, f"'{one.node.name}' and '{other.node.name}'")
                return


def _clash(entry: StateFieldIR, one: _Writer, other: _Writer, who: str) -> Problem:
    setter = next((w for w in (other, one) if w.how == "set"), None)
    if setter and entry.merge != "replace":
        message = (
            f"{who} may write state.{entry.name} at the same time, and 'set' replaces what the others wrote"
        )
        return Problem.at(
            setter.where, "concurrent-writers", message, f"use 'write', which merges by '{entry.merge}'"
        )
    message = f"{who} may write state.{entry.name} at the same time, and it has no merge rule"
    fix = (
        f"give state.{entry.name} 'merge: append' (or extend, add, union, update, file.py:fn) and use 'write'"
    )
    return Problem.at(other.where, "concurrent-writers", message, fix)


def conversation_problems(graph: Graph, regions: Regions) -> Iterator[Problem]:
    """One thread of a role can't go on in two branches at once."""
    for role in graph.roles:
        if role.conversation != "role":
            continue
        nodes = [n for n in graph.nodes if role.name in speakers_of(n)]
        pair = next(
            (
                (a, b)
                for i, a in enumerate(nodes)
                for b in nodes[i + 1 :]
                if regions.concurrent(a.name, b.name)
            ),
            None,
        )
        if pair:
            who = f"'{pair[0].name}' and '{pair[1].name}'"
            message = f"{who} may continue one conversation of '{role.name}' at the same time"
            yield Problem.at(
                pair[1].where, "concurrent-conversation", message, "use conversation: node, or another role"
            )
