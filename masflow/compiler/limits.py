"""Bounds of loops: a bound on `visits.N` in a condition raises the limit of every node in its cycle, and
`turns`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from masflow.compiler.graph import Graph, LimitsIR, Node
from masflow.compiler.regions import Regions
from masflow.spec.replies import Retry
from masflow.spec.workflow import Limits, Workflow

__all__ = ["limits_of", "raise_limits"]

_NUMBER = r"(?P<{0}>\d+|params\.\w+)(?:\s*(?P<{0}_sign>[+-])\s*(?P<{0}_more>\d+))?"
_BOUND = re.compile(
    r"visits\.(?P<node>\w+)\s*(?:<=|>=|==|!=|<|>)\s*" + _NUMBER.format("right")
    + "|" + _NUMBER.format("left") + r"\s*(?:<=|>=|==|!=|<|>)\s*visits\.(?P<node2>\w+)"
)  # fmt: skip


def limits_of(limits: Limits) -> LimitsIR:
    default = LimitsIR()
    return LimitsIR(
        visits=limits.visits or default.visits,
        turns=limits.turns or default.turns,
        items=limits.items or default.items,
        tokens=limits.tokens,
    )


def bounds(text: str, params: dict[str, object]) -> Iterator[tuple[str, int]]:
    """(node, bound) of every comparison of `visits.NODE` with a literal or a parameter, plus or minus a
    literal.
    """
    for match in _BOUND.finditer(text):
        side = "right" if match["node"] else "left"
        raw = match[side]
        value = params.get(raw.removeprefix("params.")) if raw.startswith("params.") else int(raw)
        if isinstance(value, int) and not isinstance(value, bool):
            more = int(match[f"{side}_more"] or 0)
            yield match["node"] or match["node2"], value + (-more if match[f"{side}_sign"] == "-" else more)


def raise_limits(graph: Graph, spec: Workflow) -> Graph:
    """Ensures: a loop that its own condition bounds is never cut short by the default limits.

    A node's own `limits` and an explicit `limits.turns` stay as written.
    """
    texts = [t for n in graph.nodes for t in (*(a.when for a in n.arrows), n.when) if t and "visits" in t]
    found = [(node, bound) for text in texts for node, bound in bounds(text, graph.params)]
    if not found:
        return graph
    regions = Regions.of(graph)
    needed: dict[str, int] = {}
    for node, bound in found:
        for name in regions.cycle_of(node) if node in regions.successors else ():
            needed[name] = max(needed.get(name, 0), bound + 1)
    nodes = tuple(_raised(n, needed.get(n.name, 0), spec) for n in graph.nodes)
    graph = replace(graph, nodes=nodes)
    if spec.limits.turns is None:
        turns = sum(
            turns_of(n, graph, needed.get(n.name) or (1 if not regions.cycle_of(n.name) else n.max_visits))
            for n in nodes
        )
        graph = replace(graph, limits=replace(graph.limits, turns=max(graph.limits.turns, turns)))
    return graph


def _raised(node: Node, needed: int, spec: Workflow) -> Node:
    own = spec.nodes[node.name].limits
    if (own and own.visits) or needed <= node.max_visits:
        return node
    return replace(node, max_visits=needed)


def turns_of(node: Node, graph: Graph, visits: int) -> int:
    """Model calls of that many visits at most, a `foreach` counted as one item."""
    names = {node.role, *node.among} if node.kind == "role" else set()
    most = 0
    for role in graph.roles:
        if role.name in names:
            attempts = 1 + (
                role.reply.on_malformed.retry if isinstance(role.reply.on_malformed, Retry) else 0
            )
            calls = role.max_calls + 1 if role.tools else 1
            copies = len(role.members) if role.members and not role.is_family else 1
            most = max(most, attempts * calls * copies)
    return most * visits
