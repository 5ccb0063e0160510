"""Runs one execution of a node, whatever its kind, and spreads a node over items or copies."""

from __future__ import annotations

import random
from typing import Any

from masflow.compiler.graph import END, Node, RoleIR
from masflow.errors import EpisodeError
from masflow.runtime.board import Board
from masflow.runtime.effects import run_call, run_human, run_tool
from masflow.runtime.live import CHANCE, Item, Live, Names, Play, Templates, Visit
from masflow.runtime.turns import run_role
from masflow.spec.types import mismatch
from masflow.trace import Moment, Path

NULL_ENDS = ("malformed", "truncated", "limit", "prompt_too_long")
"""Ends of an inner episode that leave who started it without a value; other ends are the whole episode's."""


def expand(
    live: Live, play: Play, node: Node, templates: Templates, board: Board
) -> tuple[list[tuple[int | str | None, dict[str, Any]]], bool]:
    """The (key, own names) of each execution of a visit, and whether the node's value is a list."""
    members: tuple[str, ...] = ()
    if node.kind == "role":
        role = role_of(play, node, templates)
        members = () if role.is_family else role.members
    if node.foreach is None and not members:
        return [(None, {})], False
    before = board.values[node.name]
    if node.foreach is None:
        own = [{"index": i, "me": me, "others": _others(before, i)} for i, me in enumerate(members)]
        return list(enumerate(own)), True
    if members:
        raise EpisodeError("tool_error", f"{templates.where}: foreach over a role with copies")
    values = templates.evaluate("foreach", node.foreach)
    if values is None:
        raise EpisodeError("malformed", f"{templates.where}.foreach: '{node.foreach}' is null")
    if not isinstance(values, list):
        raise EpisodeError("tool_error", f"{templates.where}.foreach: expected a list, got {values!r}")
    limit = play.info.graph.limits.items
    if len(values) > limit:
        raise EpisodeError("limit", f"{templates.where}.foreach: {len(values)} items; the limit is {limit}")
    todo: list[tuple[int | str | None, dict[str, Any]]] = []
    for i, value in enumerate(values):
        own = {"item": value, "index": i, "others": _others(before, i)}
        if node.as_name:
            own[node.as_name] = value
        key = _key(templates, node.key, own, i)
        todo.append((key, {**own, "me": key}))
    if len({key for key, _ in todo}) < len(todo):
        raise EpisodeError("tool_error", f"{templates.where}.key: two items have the same key")
    return todo, True


def _others(before: Any, index: int) -> list[Any]:
    """The others' values of the previous visit; malformed ones are left out."""
    if not isinstance(before, list):
        return []
    return [value for i, value in enumerate(before) if i != index and value is not None]


def _key(templates: Templates, expression: str | None, own: dict[str, Any], index: int) -> int | str:
    if expression is None:
        return index
    names = templates.names
    if isinstance(names, Names):
        names = Names({**names, **own}, names.board, names.others)
    key = Templates(templates.where, names, templates.rng).evaluate("key", expression)
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise EpisodeError("tool_error", f"{templates.where}.key: expected text or a number, got {key!r}")
    return key


def role_of(play: Play, node: Node, templates: Templates) -> RoleIR:
    """The node's role; one that is chosen at run time must be among the listed ones."""
    name: Any = node.role
    if node.role is not None and "{{" in node.role:
        name = templates.value("role", node.role)
        if name not in node.among:
            raise EpisodeError(
                "malformed", f"{templates.where}.role: {name!r} isn't one of {', '.join(node.among)}"
            )
    return play.info.roles[name]


def run_item(live: Live, play: Play, visit: Visit, item: Item) -> None:
    """Go on until the item is done or waits. A failure ends the item; what follows from it is the visit's
    business."""
    try:
        _RUN[visit.node.kind](live, play, visit, item)
    except EpisodeError as error:
        item.stop, item.done, item.ok = (error.outcome, error.message), True, False


def item_templates(live: Live, play: Play, visit: Visit, item: Item, what: str, *, full: bool) -> Templates:
    names = play.seen(item.board, {"visit": visit.number, **item.locals}, full=full)
    rng = live.rng(play, item.board, visit.node.name, visit.number, item, what)
    return Templates(f"nodes.{play.qualified(visit.node.name)}", names, rng)


def _role(live: Live, play: Play, visit: Visit, item: Item) -> None:
    templates = None
    if item.messages is None:
        templates = item_templates(live, play, visit, item, "prompt", full=False)
        item.role = role_of(play, visit.node, templates).name
    run_role(live, play, visit, item, templates)


def _tool(live: Live, play: Play, visit: Visit, item: Item) -> None:
    node = visit.node
    assert node.tool is not None
    tool = play.info.tools[node.tool]
    path = play.path(node.name, visit.number, item)
    args = item_templates(live, play, visit, item, "args", full=True).value("args", node.args)
    done, value = run_tool(live, play, item.board, path, tool, args)
    if done:
        item.value, item.done, item.path = value, True, path


def _call(live: Live, play: Play, visit: Visit, item: Item) -> None:
    node = visit.node
    assert node.call is not None
    item.path = play.path(node.name, visit.number, item)
    args = item_templates(live, play, visit, item, "args", full=True).value("args", node.args)
    item.value = run_call(live, play, item.board, item.path, node.call, args)
    item.done = True


def _set(live: Live, play: Play, visit: Visit, item: Item) -> None:
    item.done = True


def _human(live: Live, play: Play, visit: Visit, item: Item) -> None:
    human = visit.node.human
    assert human is not None
    item.path = play.path(visit.node.name, visit.number, item)
    templates = item_templates(live, play, visit, item, "ask", full=False)
    instead = None if live.interactive else human.in_training
    if isinstance(instead, dict) and "role" in instead:
        item.role = str(instead["role"])
        run_role(live, play, visit, item, templates if item.messages is None else None, prompt=human.ask)
        return
    names = Templates(templates.where, play.names(item.board, full=True) | item.locals, templates.rng)
    item.done, item.value = run_human(live, play, item.board, item.path, visit.node, templates, names)


def _workflow(live: Live, play: Play, visit: Visit, item: Item) -> None:
    from masflow.runtime.walk import run_play

    if item.sub is None:
        item.sub = _begin(live, play, visit, item)
    sub = item.sub
    run_play(live, sub)
    if not sub.thread.done:
        return
    item.path = play.path(visit.node.name, visit.number, item)
    _close_sub(live, item.board, sub)
    stop = sub.thread.stop
    if stop is None:
        item.value = output_of(live, sub)
    elif visit.is_list and stop[0] in ("malformed", "truncated"):
        item.ok = False
    else:
        raise EpisodeError(*stop)
    item.done = True


def _begin(live: Live, play: Play, visit: Visit, item: Item) -> Play:
    node = visit.node
    assert node.workflow is not None
    templates = item_templates(live, play, visit, item, "args", full=True)
    args, params = templates.value("args", node.args), templates.value("params", node.params)
    path = play.path(node.name, visit.number, item)
    return begin_sub(live, play, item.board, node, path, args, params, f"{templates.where}.")


def begin_sub(
    live: Live,
    play: Play,
    board: Board,
    node: Node,
    path: Path,
    args: dict[str, Any],
    params: dict[str, Any] | None = None,
    where: str = "",
) -> Play:
    """An episode of a node's workflow inside this one. Raises EpisodeError: the arguments don't fit."""
    assert node.workflow is not None
    left = None if play.token_limit is None else max(play.token_limit - board.tokens, 0)
    sub = live.play_of(
        node.workflow, args, node.params if params is None else params, path, play.qualified(node.name),
        board.clock, left, play.records and node.keep_rewards,
    )  # fmt: skip
    for f in sub.info.graph.task:
        problem = mismatch(sub.task.get(f.name), f.type, f"args.{f.name}")
        if problem:
            raise EpisodeError("tool_error", f"{where}{problem}")
    return sub


def end_sub(live: Live, board: Board, sub: Play) -> Any:
    """The output of an inner episode that a function or a role has started; None where it ended without.

    Raises EpisodeError: it ended in a way that ends this episode too.
    """
    _close_sub(live, board, sub)
    stop = sub.thread.stop
    if stop is None:
        return output_of(live, sub)
    if stop[0] in NULL_ENDS:
        return None
    raise EpisodeError(*stop)


def _close_sub(live: Live, mine: Board, sub: Play) -> None:
    """Take over where an inner episode has come to; its rewards see the names that it ended with."""
    theirs = sub.thread.board
    mine.tokens += theirs.tokens
    mine.made += theirs.made
    mine.clock = theirs.clock
    if sub.records:
        names = sub.names(theirs, full=True)
        live.moments.append(Moment(sub.qualified(END), sub.path(END, 1), theirs.clock.superstep, names))


def output_of(live: Live, play: Play) -> dict[str, Any]:
    """The play's `output`, from what its board holds now. Raises EpisodeError."""
    names = play.seen(play.thread.board, {}, full=True)
    if play.info.graph.program is not None:
        result = play.program.result if play.program is not None else None
        if not play.info.graph.output:
            return result if isinstance(result, dict) else {} if result is None else {"result": result}
        names["result"] = result
    key = live.state.keys[play.thread.board.clock.epoch]
    rng = (
        random.Random(f"{key.seed(play.prefix)} output")
        if CHANCE.search(repr(play.info.graph.output))
        else None
    )
    return Templates(play.qualified("output"), names, rng).value("output", play.info.graph.output)


_RUN = {"role": _role, "tool": _tool, "call": _call, "set": _set, "human": _human, "workflow": _workflow}
