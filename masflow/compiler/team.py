"""The team of a plan: every role of a workflow and of its sub-workflows under its qualified name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from masflow.compiler.graph import Graph, Node, RoleIR
from masflow.compiler.plan import Plan

__all__ = ["Place", "Speaker", "graphs_below", "members_of", "speakers_of", "team_of"]


@dataclass(frozen=True)
class Speaker:
    """One role in the place where it is used."""

    name: str
    """Qualified by the calling nodes: `research/worker`."""
    role: RoleIR
    graph: Graph

    @property
    def members(self) -> tuple[str, ...]:
        """Mappable names: the members of copies and families, else the role itself."""
        prefix = self.name.removesuffix(self.role.name)
        return tuple(prefix + member for member in self.role.members) or (self.name,)


@dataclass(frozen=True)
class Place:
    """One graph where it is called: `prefix` is "" at the top, else `research/`."""

    prefix: str
    graph: Graph
    loops: int = 1
    """Calls of it in one episode that are expected at most, from the limits."""


def graphs_below(root: str, graphs: Mapping[str, Graph], prefix: str = "", depth: int = 0) -> Iterator[Place]:
    """The root graph and every sub-workflow, once a calling node."""
    yield Place(prefix, graphs[root])
    for node in graphs[root].nodes:
        if node.workflow is not None and node.workflow in graphs and depth < 32:
            yield from graphs_below(node.workflow, graphs, f"{prefix}{node.name}/", depth + 1)


def team_of(root: str, graphs: Mapping[str, Graph]) -> tuple[Speaker, ...]:
    """Every role that a node speaks as, in document order, sub-workflows after their parent."""
    return tuple(
        Speaker(place.prefix + role.name, role, place.graph)
        for place in graphs_below(root, graphs)
        for role in place.graph.roles
        if role.name in used_roles(place.graph)
    )


def used_roles(graph: Graph) -> set[str]:
    """Roles that some node, a judging reward or a person's stand-in speaks as."""
    used = {role for node in graph.nodes for role in speakers_of(node)}
    used |= {reward.judge for reward in graph.rewards if reward.judge}
    answers = [node.human.in_training for node in graph.nodes if node.human]
    return used | {str(a["role"]) for a in answers if isinstance(a, dict) and "role" in a}


def speakers_of(node: Node) -> tuple[str, ...]:
    """The roles that may speak at a node."""
    if node.kind != "role" or node.role is None:
        return ()
    return node.among if "{{" in node.role else (node.role,)


def members_of(plan: Plan) -> tuple[str, ...]:
    """Every mappable name of the plan."""
    return tuple(member for speaker in team_of(plan.root, plan.workflows) for member in speaker.members)
