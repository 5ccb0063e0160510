"""Rules of rewards: whom they name, when they measure, and what happens when an episode ends early."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from masflow.compiler.graph import END, Graph, RewardIR
from masflow.compiler.regions import Regions
from masflow.compiler.team import graphs_below, speakers_of
from masflow.compiler.usage import below
from masflow.compiler.writers import self_concurrent
from masflow.errors import Problem, unknown

__all__ = ["reward_problems"]


def reward_problems(graph: Graph, graphs: Mapping[str, Graph], regions: Regions | None) -> Iterator[Problem]:
    """Args: regions: None when the flow is broken."""
    roles, nodes = _names(graph, graphs)
    for reward in graph.rewards:
        for key, named, known, kind in (
            ("roles", reward.roles, roles, "role"),
            ("to", reward.to, roles, "role"),
            ("pay", tuple(role for role, _ in reward.pay), roles, "role"),
            ("nodes", reward.nodes, nodes, "node"),
            ("measure.after", reward.measure_after, nodes, "node"),
        ):
            for name in named:
                whole = name.partition(":")[0] if graph.program and kind == "node" else name
                if whole not in known:
                    yield unknown(below(reward.where, key), kind, name, known)
        if reward.judge is not None and reward.judge not in {r.name for r in graph.roles}:
            yield unknown(below(reward.where, "use"), "role", reward.judge, {r.name for r in graph.roles})
        if graph.credit == "return_to_go" and any(how == "gain" for _, how in reward.pay):
            message = f"reward '{reward.name}' pays gains, and 'credit: return_to_go' would count them twice"
            fix = "write 'credit: own', or pay the value"
            yield Problem.at(below(reward.where, "pay"), "gain-with-return-to-go", message, fix)
        if regions is not None:
            yield from _measured_problems(reward, graph, regions)
            yield from _early_end_problems(reward, graph, regions)


def _names(graph: Graph, graphs: Mapping[str, Graph]) -> tuple[list[str], list[str]]:
    places = list(graphs_below(graph.name, graphs)) if graph.name in graphs else []
    roles = [p.prefix + r.name for p in places for r in p.graph.roles]
    nodes = [p.prefix + n.name for p in places for n in p.graph.nodes]
    return roles or [r.name for r in graph.roles], nodes or [n.name for n in graph.nodes]


def _measured_problems(reward: RewardIR, graph: Graph, regions: Regions) -> Iterator[Problem]:
    """A measurement beside a paid turn has no before and after."""
    known = {n.name: n for n in graph.nodes}
    paid = dict(reward.pay)
    for measured in reward.measure_after:
        for node in graph.nodes:
            gets = {paid[r] for r in speakers_of(node) if r in paid}
            if not gets or measured not in known:
                continue
            beside = regions.concurrent(measured, node.name)
            itself = measured == node.name and "gain" in gets and self_concurrent(node, graph)
            if beside or itself:
                message = (
                    f"'{measured}' may be measured while '{node.name}', which '{reward.name}' pays, runs"
                )
                fix = "measure after the node where the branches meet"
                yield Problem.at(below(reward.where, "measure.after"), "concurrent-measure", message, fix)
                break


def _early_end_problems(reward: RewardIR, graph: Graph, regions: Regions) -> Iterator[Problem]:
    """Warns of a trained reward whose arguments may be null because the episode ended early, without
    `otherwise`.
    """
    if (
        reward.otherwise is not None
        or reward.weight == 0
        or reward.function is None
        or reward.when is not None
    ):
        return
    args = reward.measure_args if reward.measure_after else reward.args
    words = set(re.findall(r"(?<![\w.'\"])\w+", _expressions(args)))
    words |= set(re.findall(r"\bnodes\.(\w+)", _expressions(args)))
    own = reward.level == "turn" and "result" in words
    late = [n.name for n in graph.nodes if n.name in words and _may_miss(n.name, graph, regions)]
    if late or own:
        what = f"'{late[0]}'" if late else "its turn"
        message = f"reward '{reward.name}' goes unscored when the episode ends before {what} has a value"
        yield Problem.at(
            reward.where, "warn-no-otherwise", message, "add 'otherwise: 0', or what such an episode deserves"
        )


def _may_miss(name: str, graph: Graph, regions: Regions) -> bool:
    """Whether an episode may end without a value of this node: it is skipped, passed by, or something breaks
    before.
    """
    node = graph.node(name)
    ends = {r.name for r in graph.roles if r.reply.on_malformed != "continue"}
    risky = [
        n
        for n in graph.nodes
        if set(speakers_of(n)) & ends and (n is node or regions.may_precede(n.name, name))
    ]
    return bool(risky) or node.when is not None or not regions.must_precede(name, END)


def _expressions(value: Any) -> str:
    return " ".join(re.findall(r"\{\{(.*?)\}\}", str(value), flags=re.DOTALL))
