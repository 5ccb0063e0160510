"""Nodes that are passed straight through: a `set` or a `call`, always entered, executed once, without chance.

The same as their visit in `walk` and `items`, without its bookkeeping: nothing can wait in between. Knows no
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from masflow.compiler.expressions import Evaluator, TemplateProblem, compiled
from masflow.compiler.graph import Node
from masflow.errors import EpisodeError
from masflow.runtime.board import Board, Write
from masflow.runtime.effects import run_call
from masflow.runtime.live import GraphInfo, Live, Names, Play
from masflow.trace import visit_path


@dataclass(frozen=True)
class Straight:
    """One such node, its templates compiled."""

    call: str | None
    args: tuple[tuple[str, Evaluator], ...]
    writes: tuple[tuple[str, str, bool, Evaluator], ...]
    """Field, its place in the node, whether it merges, its value."""


def straight(info: GraphInfo) -> dict[str, Straight]:
    """Those of a graph, by name; without the ones whose templates don't compile, which are told when they
    are played."""
    found = {}
    for node in info.graph.nodes:
        if node.kind in ("set", "call") and node.name in info.single and node.name not in info.chance:
            try:
                found[node.name] = _of(node)
            except TemplateProblem:
                continue
    return found


def _of(node: Node) -> Straight:
    writes = [(name, f"write.{name}", True, compiled(raw)) for name, raw in node.write.items()]
    writes += [(name, f"set.{name}", False, compiled(raw)) for name, raw in node.set_.items()]
    args = node.args if node.kind == "call" else {}
    call = node.call if node.kind == "call" else None
    return Straight(call, tuple((name, compiled(raw)) for name, raw in args.items()), tuple(writes))


def visit_straight(live: Live, play: Play, board: Board, node: Node, number: int, how: Straight) -> None:
    """One visit, its number counted already. Raises EpisodeError: what ends the thread."""
    value, name = None, node.name
    names = play.seen(board, {"visit": number}, full=True)
    if how.call is not None:
        try:
            value = _called(live, play, board, node, number, how, names)
        except EpisodeError:
            board.record(name, None, False, None)
            raise
    board.record(name, value, True, None)
    if not how.writes:
        return
    names["result"] = value
    for field, what, merges, evaluate in how.writes:
        try:
            new = evaluate(names, None)
        except TemplateProblem as problem:
            raise EpisodeError("tool_error", f"nodes.{play.qualified(name)}.{what}: {problem}") from None
        board.write(Write(field, merges, new), play.info.fields, live.load)


def _called(
    live: Live, play: Play, board: Board, node: Node, number: int, how: Straight, names: Names
) -> Any:
    try:
        args = {name: evaluate(names, None) for name, evaluate in how.args}
    except TemplateProblem as problem:
        raise EpisodeError("tool_error", f"nodes.{play.qualified(node.name)}.args: {problem}") from None
    path = visit_path(play.prefix, play.call, node.name, number)
    return run_call(live, play, board, path, str(how.call), args)
