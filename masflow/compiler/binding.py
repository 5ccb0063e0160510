"""The users' functions of all graphs, read in one go: signatures and hashes put in their places.

The files are imported in a time-limited process of their own, never here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from masflow.compiler.graph import FunctionIR, Graph, RewardIR, ToolIR
from masflow.errors import Problem, Where
from masflow.spec.tools import BUILTINS
from masflow.spec.types import ANY

__all__ = ["bind_functions"]


def bind_functions(graphs: Mapping[str, Graph], root: Path, problems: list[Problem]) -> dict[str, Graph]:
    """Ensures: every FunctionIR of a user's function has its parameters and hash, or a problem says why
    not.
    """
    wanted: dict[str, Where] = {}
    for graph in graphs.values():
        for ref, where in _refs(graph):
            wanted.setdefault(ref, where)
    if not wanted:
        return dict(graphs)
    from masflow.functions import inspect_functions

    found = inspect_functions(list(wanted.items()), root)
    problems.extend(f for f in found.values() if isinstance(f, Problem))
    known = {ref: f for ref, f in found.items() if isinstance(f, FunctionIR)}
    return {key: _bound(graph, known) for key, graph in graphs.items()}


def _refs(graph: Graph) -> Iterator[tuple[str, Where]]:
    for tool in graph.tools:
        if ":" in tool.function.ref:
            yield tool.function.ref, tool.where
    for reward in graph.rewards:
        if reward.function:
            yield reward.function.ref, reward.where
    for entry in graph.state:
        if entry.merge_function:
            yield entry.merge_function.ref, graph.where
    for node in graph.nodes:
        if node.call:
            yield node.call, node.where
        if node.human and isinstance(node.human.in_training, dict) and "call" in node.human.in_training:
            yield str(node.human.in_training["call"]), node.where


def _bound(graph: Graph, known: Mapping[str, FunctionIR]) -> Graph:
    return replace(
        graph,
        tools=tuple(_bound_tool(tool, known) for tool in graph.tools),
        rewards=tuple(_bound_reward(reward, known) for reward in graph.rewards),
        state=tuple(
            replace(s, merge_function=known.get(s.merge_function.ref, s.merge_function))
            if s.merge_function
            else s
            for s in graph.state
        ),
        functions=tuple(known.get(f.ref, f) for f in graph.functions),
    )


def _bound_tool(tool: ToolIR, known: Mapping[str, FunctionIR]) -> ToolIR:
    if tool.function.ref in BUILTINS:
        return tool
    function = known.get(tool.function.ref, tool.function)
    taken = {*tool.settings, *tool.bind, "state", "**"}
    offered = [p for p in function.params if p not in taken]
    parameters = tool.parameters or {name: function.types.get(name, ANY) for name in offered}
    return replace(tool, function=function, parameters=parameters, summary=tool.summary or function.summary)


def _bound_reward(reward: RewardIR, known: Mapping[str, FunctionIR]) -> RewardIR:
    """An allocator is a turn-level function that gets nothing but the trajectory."""
    if reward.function is None:
        return reward
    function = known.get(reward.function.ref, reward.function)
    alone = function.params == ("trajectory",) and not reward.args and not reward.measure_after
    return replace(reward, function=function, allocator=alone and reward.level == "turn")
