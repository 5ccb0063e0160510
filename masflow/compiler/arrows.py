"""Edges as written → the ordered arrows of each node. Knows names and order, no regions."""

from __future__ import annotations

from dataclasses import dataclass, field

from masflow.compiler.documents import Doc
from masflow.compiler.graph import END, START, Arrow
from masflow.errors import Problem, Where, unknown
from masflow.spec.edges import Edge

__all__ = ["Arrows", "lower_edges"]


@dataclass
class Arrows:
    """The arrows that leave each node, the switch of those that have one, and whether every name was
    known.
    """

    out: dict[str, list[Arrow]] = field(default_factory=dict)
    switch: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    def of(self, name: str) -> tuple[Arrow, ...]:
        """In the order in which they are tried: the unconditional one last."""
        found = self.out.get(name, [])
        return tuple(sorted(found, key=lambda a: a.when is None and a.case is None))


def lower_edges(doc: Doc, problems: list[Problem]) -> Arrows:
    """Every edge as arrows; unknown names are problems and leave `complete` False."""
    arrows = Arrows()
    known = set(doc.spec.nodes)
    for edge in doc.spec.edges:
        where = doc.where("edges", edge.entry)
        found = _name_problems(edge, known, where)
        problems.extend(found)
        if found:
            arrows.complete = False
            continue
        for source in edge.sources:
            _add(arrows, source, edge, where, problems)
    return arrows


def _add(arrows: Arrows, source: str, edge: Edge, where: Where, problems: list[Problem]) -> None:
    out = arrows.out.setdefault(source, [])
    if edge.switch is None:
        out.append(Arrow(edge.targets, edge.when, where=where))
        return
    if source in arrows.switch:
        message = f"'{source}' has two switches"
        problems.append(Problem.at(where, "two-switches", message, "write one switch with all its cases"))
        return
    arrows.switch[source] = edge.switch
    out.extend(Arrow(targets, case=case, where=where) for case, targets in edge.cases)


def _name_problems(edge: Edge, known: set[str], where: Where) -> list[Problem]:
    found = []
    groups = [edge.targets] if edge.switch is None else [targets for _, targets in edge.cases]
    for source in edge.sources:
        if source not in known | {START}:
            found.append(unknown(where, "node", source, known | {START}))
    for target in (t for targets in groups for t in targets):
        if target not in known | {END}:
            found.append(unknown(where, "node", target, known | {END}))
    for targets in groups:
        if len(targets) > 1 and len(edge.sources) > 1:
            message = f"'{' & '.join(edge.sources)} -> {' & '.join(targets)}' joins and fans out at once"
            fix = "put a node between them, e.g. 'gather: {set: {}}'"
            found.append(Problem.at(where, "many-to-many", message, fix))
    return found
