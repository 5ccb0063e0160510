"""Questions about a graph: who may run before whom, who must, who runs at the same time, where branches meet.

Asks networkx for dominators and components; keeps reachability as one bit set a node, so that a thousand
nodes take milliseconds. Knows no expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

from masflow.compiler.graph import END, START, Arrow, Graph, Node

__all__ = ["FanOut", "Regions", "with_joins"]


@dataclass(frozen=True)
class FanOut:
    """One arrow with several targets: its branches, each up to (without) the join."""

    fork: str
    arrow: int
    targets: tuple[str, ...]
    join: str
    branches: tuple[frozenset[str], ...]

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset().union(*self.branches)


@dataclass(frozen=True)
class Regions:
    """A graph with the answers. Nodes are named; `start` and `end` take part as pseudo-nodes."""

    graph: Graph
    successors: Mapping[str, tuple[str, ...]] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Regions:
        out = {START: _targets(graph.start), END: ()}
        out |= {node.name: _targets(node.arrows) for node in graph.nodes}
        return cls(graph, out)

    @cached_property
    def digraph(self) -> nx.DiGraph:
        flow = nx.DiGraph()
        flow.add_nodes_from(self.successors)
        flow.add_edges_from(
            (a, b) for a, targets in self.successors.items() for b in targets if b in self.successors
        )
        return flow

    @cached_property
    def predecessors(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(self.digraph.predecessors(name)) for name in self.digraph}

    @cached_property
    def _bit(self) -> dict[str, int]:
        return {name: 1 << i for i, name in enumerate(self.digraph)}

    @cached_property
    def _component(self) -> dict[str, int]:
        return {name: i for i, names in enumerate(self._components) for name in names}

    @cached_property
    def _components(self) -> list[set[str]]:
        return list(nx.strongly_connected_components(self.digraph))  # successors come before predecessors

    @cached_property
    def _reach(self) -> dict[str, int]:
        """Bits of the nodes on some path of one arrow or more from each node."""
        reach: dict[str, int] = {}
        for names in self._components:
            bits = 0
            for name in names:
                for target in self.digraph.successors(name):
                    bits |= self._bit[target] | reach.get(target, 0)
            reach |= dict.fromkeys(names, bits)
        return reach

    def may_precede(self, a: str, b: str) -> bool:
        """Whether some path leads from `a` on to `b`; a node in a loop may precede itself."""
        return bool(self._reach[a] & self._bit[b])

    def reachable(self, name: str) -> bool:
        return name == START or self.may_precede(START, name)

    def in_cycle(self, a: str, b: str) -> bool:
        """Whether one loop passes through both."""
        return self._component[a] == self._component[b] and self.may_precede(a, a)

    def cycle_of(self, name: str) -> frozenset[str]:
        """The nodes that share a loop with `name`; empty when it is in none."""
        return (
            frozenset(self._components[self._component[name]])
            if self.may_precede(name, name)
            else frozenset()
        )

    @cached_property
    def cycles(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(c) for c in self._components if self.may_precede(next(iter(c)), next(iter(c))))

    @cached_property
    def post_dominator(self) -> dict[str, str]:
        """The immediate post-dominator of each node that reaches `end`."""
        found = nx.immediate_dominators(self.digraph.reverse(copy=False), END)
        return {name: above for name, above in found.items() if above is not None and name != END}

    @cached_property
    def _depth(self) -> dict[str, int]:
        depth = {END: 0}
        for name in self.post_dominator:
            trail = []
            while name not in depth:
                trail.append(name)
                name = self.post_dominator[name]
            for below in reversed(trail):
                depth[below] = depth[name] + 1
                name = below
        return depth

    def meeting_point(self, targets: Iterable[str]) -> str | None:
        """The first node (or `end`) that every path from every target passes; None when one never ends."""
        names = list(dict.fromkeys(targets))
        if not all(name in self._depth for name in names):
            return None
        meet = names[0]
        for name in names[1:]:
            while meet != name:
                if self._depth[meet] >= self._depth[name]:
                    meet = self.post_dominator[meet]
                else:
                    name = self.post_dominator[name]
        return meet

    def between(self, first: str, stop: str) -> frozenset[str]:
        """`first` and everything reachable from it without passing `stop`."""
        seen, todo = set(), [first]
        while todo:
            name = todo.pop()
            if name not in seen and name != stop:
                seen.add(name)
                todo.extend(self.successors[name])
        return frozenset(seen)

    @cached_property
    def fan_outs(self) -> tuple[FanOut, ...]:
        found = []
        arrows = [(START, self.graph.start), *((n.name, n.arrows) for n in self.graph.nodes)]
        for fork, ways in arrows:
            for i, arrow in enumerate(ways):
                if len(arrow.targets) < 2 or not set(arrow.targets) <= set(self.successors):
                    continue
                join = arrow.join or self.meeting_point(arrow.targets)
                if join is not None:
                    branches = tuple(self.between(target, join) for target in arrow.targets)
                    found.append(FanOut(fork, i, arrow.targets, join, branches))
        return tuple(found)

    def join_of(self, fork: str, arrow: int = 0) -> str | None:
        """Where the branches of that arrow meet; None for an arrow with one target."""
        return next((f.join for f in self.fan_outs if f.fork == fork and f.arrow == arrow), None)

    @cached_property
    def _branch(self) -> dict[str, dict[int, int]]:
        """Node → {number of the fan-out: its branch there}."""
        branch: dict[str, dict[int, int]] = {name: {} for name in self.successors}
        for number, fan_out in enumerate(self.fan_outs):
            for i, names in enumerate(fan_out.branches):
                for name in names:
                    branch[name][number] = i
        return branch

    def concurrent(self, a: str, b: str) -> bool:
        """Whether the two can run at the same time: in different branches of one fan-out.

        A node's own items and copies are the node's business, not asked here.
        """
        of_b = self._branch[b]
        return any(of_b.get(number, i) != i for number, i in self._branch[a].items())

    def enclosing(self, name: str) -> tuple[FanOut, ...]:
        """The fan-outs in whose branches the node lies."""
        return tuple(self.fan_outs[number] for number in self._branch[name])

    def must_precede(self, a: str, b: str) -> bool:
        """Whether `a` has run, at least once, on every path from `start` to `b`.

        After a join of all branches, what every path of *one* branch passes has run; after `join: any | N`
        only what every branch passes.
        """
        return bool(self._before[b] & self._bit[a])

    @cached_property
    def _before(self) -> dict[str, int]:
        return _Must(self).solve()


class _Must:
    """Forward data flow over bit sets: an intersection of the ways in, a union of the branches at a join."""

    def __init__(self, regions: Regions):
        self.regions = regions
        self.joins = {n.name: n.join for n in regions.graph.nodes}
        self.everything = (1 << len(regions.digraph)) - 1
        self.before = dict.fromkeys(regions.digraph, self.everything)
        self.ways_in: dict[str, list[str]] = {name: list(p) for name, p in regions.predecessors.items()}
        self.at: dict[str, list[FanOut]] = {}
        for fan_out in regions.fan_outs:
            if self._structured(fan_out):
                self.at.setdefault(fan_out.join, []).append(fan_out)
        for found in self.at.values():
            found.sort(key=lambda f: len(f.nodes), reverse=True)  # the outer one first
        self.alone = {(f.fork, f.arrow): self._entered(f) for found in self.at.values() for f in found}

    def _structured(self, fan_out: FanOut) -> bool:
        disjoint = sum(map(len, fan_out.branches)) == len(fan_out.nodes)
        return disjoint and fan_out.fork not in fan_out.nodes

    def _entered(self, fan_out: FanOut) -> tuple[bool, ...]:
        """Of each branch, whether something but this fan-out leads into it, so that it may run alone."""
        ways = self.regions.successors[fan_out.fork]
        return tuple(
            ways.count(target) > 1
            or any(
                way not in names and not (way == fan_out.fork and name == target)
                for name in names
                for way in self.regions.predecessors[name]
            )
            for target, names in zip(fan_out.targets, fan_out.branches, strict=True)
        )

    def solve(self) -> dict[str, int]:
        order = list(nx.dfs_postorder_nodes(self.regions.digraph, START))[::-1]
        self.before[START] = 0
        changed = True
        while changed:
            changed = False
            for name in order[1:]:
                new = self._into(name)
                changed |= new != self.before[name]
                self.before[name] = new
        return self.before

    def _after(self, name: str) -> int:
        return self.before[name] | self.regions._bit[name]

    def _into(self, name: str) -> int:
        return self._meet(name, self.ways_in[name], self.at.get(name, []))

    def _meet(self, join: str, ways: list[str], fan_outs: list[FanOut]) -> int:
        """Bits that hold at `join` when arriving by `ways`, whose fan-outs (outer first) all end there."""
        bits, rest, left = self.everything, set(ways), list(fan_outs)
        while left:
            outer = left.pop(0)
            inside = [f for f in left if f.fork in outer.nodes]
            left = [f for f in left if f not in inside]
            rest -= outer.nodes
            parts = []
            for names in outer.branches:
                here = [w for w in ways if w in names]
                parts.append(self._meet(join, here, [f for f in inside if f.fork in names]))
            together = self._after(outer.fork)
            every = self.everything
            for part in parts:
                together |= part
                every &= part
            bits &= together if self.joins.get(join, "all") == "all" else every
            for part, alone in zip(parts, self.alone[outer.fork, outer.arrow], strict=True):
                bits &= part if alone else self.everything
        for way in rest:
            bits &= self._after(way)
        return bits


def _targets(arrows: Iterable[Arrow]) -> tuple[str, ...]:
    return tuple(target for arrow in arrows for target in arrow.targets)


def with_joins(graph: Graph) -> Graph:
    """The graph with every fan-out's join written down. Ensures: an arrow with several targets has a join,
    unless one of its branches never reaches `end`."""
    regions = Regions.of(graph)

    def joined(arrows: tuple[Arrow, ...]) -> tuple[Arrow, ...]:
        return tuple(
            replace(a, join=regions.meeting_point(a.targets)) if len(a.targets) > 1 else a for a in arrows
        )

    nodes: tuple[Node, ...] = tuple(
        replace(n, arrows=joined(n.arrows)) if any(len(a.targets) > 1 for a in n.arrows) else n
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes, start=joined(graph.start))
