"""Rules of a graph's flow: every node is reached and ends, every choice has its else, every fan-out one
join.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from masflow.compiler.graph import END, START, Arrow, Graph, Node
from masflow.compiler.regions import FanOut, Regions
from masflow.errors import Problem, Where, closest
from masflow.spec.replies import ChoiceReply, CodeReply, JsonReply, TagReply, TagsReply, TextReply
from masflow.spec.types import STR, Type

__all__ = ["flow_problems", "switch_type"]

_PATH = re.compile(r"(?:(?P<space>nodes|state|task)\.)?(?P<name>\w+)(?:\.(?P<field>\w+))?\Z")


def flow_problems(graph: Graph, regions: Regions) -> Iterator[Problem]:
    """Everything wrong with the edges of one graph, whose names are all known."""
    if not graph.start:
        message = "no edge leaves 'start'"
        yield Problem.at(graph.where, "no-start", message, f"add 'start -> {graph.nodes[0].name}'")
        return
    yield from _reached_problems(graph, regions)
    yield from _ways_problems(START, graph.start, None, graph)
    for node in graph.nodes:
        yield from _ways_problems(node.name, node.arrows, node, graph)
    for fan_out in regions.fan_outs:
        yield from _fan_out_problems(fan_out, graph, regions)
    yield from _join_problems(graph, regions)


def _reached_problems(graph: Graph, regions: Regions) -> Iterator[Problem]:
    lost = [n for n in graph.nodes if not regions.reachable(n.name)]
    for node in lost:
        message = f"no path leads from start to '{node.name}'"
        yield Problem.at(node.where, "unreachable-node", message, "add an edge to it, or remove the node")
    told: set[str] = set()
    for node in graph.nodes:
        if not node.arrows:
            message = f"no edge leaves '{node.name}'"
            yield Problem.at(node.where, "dead-end", message, f"add '{node.name} -> end'")
        elif not regions.may_precede(node.name, END) and node not in lost and node.name not in told:
            cycle = regions.cycle_of(node.name)
            if cycle:
                told |= cycle
                names = ", ".join(n.name for n in graph.nodes if n.name in cycle)
                message = f"the loop through {names} has no way out"
                fix = f"add an edge out of it, e.g. '{node.name} -> end when visits.{node.name} >= 3'"
                yield Problem.at(node.where, "loop-without-exit", message, fix)


def _ways_problems(
    name: str, arrows: tuple[Arrow, ...], node: Node | None, graph: Graph
) -> Iterator[Problem]:
    plain = [a for a in arrows if a.when is None and a.case is None]
    guarded = [a for a in arrows if a.when is not None]
    cases = [a for a in arrows if a.case is not None]
    if len(plain) > 1:
        first, second = (" & ".join(a.targets) for a in plain[:2])
        message = f"two edges without a condition leave '{name}': to {first} and to {second}"
        fix = f"write '{name} -> {first} & {second}' to go to both, or give one a 'when'"
        yield Problem.at(plain[1].where, "two-unconditional-edges", message, fix)
    if guarded and cases:
        message = f"both a switch and an edge with 'when' leave '{name}'"
        yield Problem.at(guarded[0].where, "switch-and-when", message, "use one of the two")
    if guarded and not plain and not cases:
        message = f"every edge out of '{name}' has a condition, so there may be no way on"
        fix = f"add an edge without one, e.g. '{name} -> end'"
        yield Problem.at(guarded[-1].where, "missing-else", message, fix)
    if node is not None and cases:
        yield from _switch_problems(node, cases, bool(plain), graph)


def _switch_problems(node: Node, cases: list[Arrow], has_else: bool, graph: Graph) -> Iterator[Problem]:
    known = switch_type(graph, node.switch or "")
    where = cases[0].where
    if known is None or known.kind == "any":
        return
    choices = ("True", "False") if known.kind == "bool" else known.choices
    if known.kind not in ("choice", "bool"):
        if not has_else:
            message = f"'{node.switch}' is a {known}, so the cases of the switch can't be all"
            fix = f"make it a choice, or add an edge without a condition, '{node.name} -> …'"
            yield Problem.at(where, "switch-without-else", message, fix)
        return
    for arrow in cases:
        if arrow.case not in choices:
            near = closest(str(arrow.case), choices)
            message = f"'{arrow.case}' isn't a value of '{node.switch}'; known: {', '.join(choices)}"
            yield Problem.at(
                arrow.where, "unknown-case", message, f"write '{near}'" if near else "use a known value"
            )
    missing = [c for c in choices if c not in {a.case for a in cases}]
    if missing and not has_else:
        message = f"the switch on '{node.switch}' has no case for {', '.join(missing)}"
        yield Problem.at(where, "switch-not-exhaustive", message, f"add '{missing[0]}: NODE' to its cases")


def switch_type(graph: Graph, expression: str) -> Type | None:
    """The declared type of a plain `node.field`, `state.x` or `task.x`; None when it isn't as plain as
    that.
    """
    match = _PATH.match(expression.strip())
    if not match:
        return None
    space, name, field = match["space"], match["name"], match["field"]
    if space == "state" or name == "state":
        return next((s.type for s in graph.state if s.name == (name if space else field)), None)
    if space == "task" or name == "task" or any(t.name == name for t in graph.task):
        wanted = field if name == "task" else name
        return next((t.type for t in graph.task if t.name == wanted), None)
    node = next((n for n in graph.nodes if n.name == name), None)
    if node is None or node.foreach or not field:
        return None
    role = next((r for r in graph.roles if r.name == node.role), None)
    reply = node.human.reply if node.human else role.reply if role and not role.members else None
    if isinstance(reply, ChoiceReply) and field == "choice" and not isinstance(reply.choice, str):
        return Type("choice", choices=reply.choice)
    if isinstance(reply, (TextReply, CodeReply)) and field == reply.format:
        return STR
    if isinstance(reply, TagReply) and field == reply.tag:
        return STR
    fields = (
        reply.fields if isinstance(reply, JsonReply) else reply.tags if isinstance(reply, TagsReply) else None
    )
    return (fields or {}).get(field)


def _fan_out_problems(fan_out: FanOut, graph: Graph, regions: Regions) -> Iterator[Problem]:
    arrows = graph.start if fan_out.fork == START else graph.node(fan_out.fork).arrows
    where = arrows[fan_out.arrow].where
    named = f"the fan-out '{fan_out.fork} -> {' & '.join(fan_out.targets)}'"
    if fan_out.join in fan_out.targets:
        message = f"{named} meets at '{fan_out.join}', which is one of its branches"
        fix = f"write '{fan_out.fork} -> OTHERS -> {fan_out.join}'; the fan-in waits for all of them"
        yield Problem.at(where, "empty-branch", message, fix)
        return
    if fan_out.fork in fan_out.nodes:
        for name in sorted(fan_out.nodes - {fan_out.fork}):
            for arrow in graph.node(name).arrows:
                if fan_out.fork in arrow.targets:
                    message = f"'{name} -> {fan_out.fork}' leads out of {named} before its branches have met"
                    fix = f"let the branches meet first, and loop from there back to '{fan_out.fork}'"
                    yield Problem.at(arrow.where, "edge-out-of-region", message, fix)
                    return
    if sum(map(len, fan_out.branches)) == len(fan_out.nodes):
        return
    shared = [n.name for n in graph.nodes if sum(n.name in b for b in fan_out.branches) > 1]
    meet = _first(shared, regions)
    inside = fan_out.nodes - set(regions.between(meet, fan_out.join))
    for name in sorted(inside & {n.name for n in graph.nodes}):
        for arrow in graph.node(name).arrows:
            if fan_out.join in arrow.targets:
                message = f"'{name} -> {fan_out.join}' leaves {named}, whose branches meet at '{meet}'"
                fix = f"lead every path of a branch to '{meet}'"
                yield Problem.at(arrow.where, "edge-out-of-region", message, fix)
                return
    message = f"{named} has branches that share '{meet}' before they meet at '{fan_out.join}'"
    yield Problem.at(
        where, "shared-branch", message, "give each branch nodes of its own, or let them meet earlier"
    )


def _first(names: list[str], regions: Regions) -> str:
    """The one that comes first in the flow."""
    best = names[0]
    for name in names[1:]:
        if regions.may_precede(name, best) and not regions.may_precede(best, name):
            best = name
    return best


def _join_problems(graph: Graph, regions: Regions) -> Iterator[Problem]:
    width: dict[str, int] = {}
    for fan_out in regions.fan_outs:
        width[fan_out.join] = max(width.get(fan_out.join, 0), len(fan_out.targets))
    for node in graph.nodes:
        where = Where(node.where.file, node.where.line, f"{node.where.path}.join")
        if node.join != "all" and node.name not in width:
            message = f"'{node.name}' has 'join: {node.join}', but no fan-out meets there"
            known = ", ".join(n for n in width if n != END) or "none"
            yield Problem.at(
                where, "join-without-fan-out", message, f"move it to the node where branches meet ({known})"
            )
        elif isinstance(node.join, int) and node.join > width.get(node.name, 0):
            message = (
                f"'join: {node.join}' waits for more branches than the {width[node.name]} that meet there"
            )
            yield Problem.at(where, "join-too-wide", message, f"write at most {width[node.name]}")
