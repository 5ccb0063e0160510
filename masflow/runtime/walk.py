"""Walks a graph: enters nodes, runs their visits, takes edges, forks into branches and joins them in branch
order.

A step either makes progress or waits for a reply; nothing depends on the order in which replies arrive.
"""

from __future__ import annotations

from typing import Any

from masflow.compiler.expressions import TemplateProblem, condition
from masflow.compiler.graph import END, START, Arrow, Node
from masflow.errors import EpisodeError
from masflow.runtime.board import Write
from masflow.runtime.items import expand, run_item
from masflow.runtime.live import Item, Live, Play, Templates, Thread, Visit
from masflow.runtime.straight import visit_straight
from masflow.trace import Moment, changed

MAX_SKIPS = 1000
"""Times that `when` may skip one node, so that a loop of skipped nodes ends."""


def run_play(live: Live, play: Play) -> None:
    """Go on with a graph, or with the function that plays a workflow, until it is done or waits."""
    if play.info.graph.program is None:
        run_thread(live, play, play.thread)
        return
    from masflow.runtime.program import run_program

    run_program(live, play)


def run_thread(live: Live, play: Play, thread: Thread) -> None:
    """Go on until the thread is done or every live branch waits."""
    try:
        while not thread.done and _step(live, play, thread):
            pass
    except EpisodeError as error:
        thread.stop, thread.done = (error.outcome, error.message), True


def _step(live: Live, play: Play, thread: Thread) -> bool:
    if thread.branches is not None:
        return _run_branches(live, play, thread, thread.branches)
    if thread.visit is not None:
        return _run_visit(live, play, thread, thread.visit)
    if thread.at in (thread.until, END):
        thread.done = True
        return False
    if thread.at == START:
        _fill_defaults(play, thread)
        _leave(live, play, thread, play.info.graph.start, None, 0)
        return True
    return _enter(live, play, thread, play.info.nodes[thread.at])


def _fill_defaults(play: Play, thread: Thread) -> None:
    """State defaults may be templates over params and the task."""
    templates = Templates(play.qualified("state"), play.static)
    for f in play.info.graph.state:
        if isinstance(f.default, (str, list, dict)):
            default = templates.value(f.name, f.default)
            thread.board.state = {**thread.board.state, f.name: default}


def _templates(live: Live, play: Play, thread: Thread, node: Node, visit: int, **extra: Any) -> Templates:
    rng = live.rng(play, thread.board, node.name, visit, None, "edge" if extra.get("left") else "enter")
    names = play.seen(thread.board, {"visit": visit})
    return Templates(f"nodes.{play.qualified(node.name)}", names, rng)


def _enter(live: Live, play: Play, thread: Thread, node: Node) -> bool:
    board = thread.board
    number = board.visits[node.name] + 1
    how = play.straight.get(node.name)
    if (how is not None or node.name in play.info.single) and number <= node.max_visits:
        board.visits = {**board.visits, node.name: number}
        if how is not None and not (play.records and node.name in play.info.recorded):
            visit_straight(live, play, board, node, number, how)
            _leave(live, play, thread, node.arrows, node, number)
            return True
        thread.visit = visit = Visit(node, number, False, [Item(None, board)])
        return _run_visit(live, play, thread, visit)
    templates = _templates(live, play, thread, node, number)
    if node.when is not None and not templates.condition("when", node.when):
        skips = board.skips.get(node.name, 0) + 1
        board.skips = {**board.skips, node.name: skips}
        if skips > MAX_SKIPS:
            raise EpisodeError("limit", f"node {play.qualified(node.name)} was skipped {skips} times")
        board.record(node.name, None, None, None, skipped=True)
        _leave(live, play, thread, node.arrows, node, number - 1)
        return True
    if number > node.max_visits:
        raise EpisodeError("limit", f"node {play.qualified(node.name)} reached its {node.max_visits} visits")
    board.visits = {**board.visits, node.name: number}
    templates.names["visits"] = board.visits  # type: ignore[index]
    todo, is_list = expand(live, play, node, templates, board)
    thread.visit = visit = Visit(node, number, is_list, [])
    if node.in_order:
        visit.todo = todo
    elif is_list:
        visit.items = [Item(key, board.fork(), local) for key, local in todo]
    else:
        visit.items = [Item(None, board, todo[0][1])]
    return _run_visit(live, play, thread, visit)


def _run_visit(live: Live, play: Play, thread: Thread, visit: Visit) -> bool:
    if not visit.is_list and not visit.todo:
        item = visit.items[0]
        if not item.done:
            run_item(live, play, visit, item)
        return item.done and _finish(live, play, thread, visit)
    if visit.node.in_order:
        while _next_in_order(live, play, thread, visit):
            pass
        if visit.todo and not any(item.stop for item in visit.items):
            return False
    for item in visit.items:
        if not item.done:
            run_item(live, play, visit, item)
            if item.done and visit.is_list:
                _write_item(live, play, visit, item)
    if not all(item.done for item in visit.items):
        return False
    return _finish(live, play, thread, visit)


def _next_in_order(live: Live, play: Play, thread: Thread, visit: Visit) -> bool:
    """Run the current item; begin the next when it is done. False when it waits, stopped, or none is left."""
    last = visit.items[-1] if visit.items else None
    if last is not None and not last.done:
        run_item(live, play, visit, last)
        if not last.done:
            return False
        _write_item(live, play, visit, last)
    if not visit.todo or (last is not None and last.stop):
        return False
    key, local = visit.todo.pop(0)
    visit.items.append(Item(key, thread.board, local))
    return True


def _write_item(live: Live, play: Play, visit: Visit, item: Item) -> None:
    try:
        if item.stop is None:
            _write(live, play, visit, item, visit.node.write, {})
    except EpisodeError as error:
        item.stop = (error.outcome, error.message)


def _write(
    live: Live, play: Play, visit: Visit, item: Item, writes: dict[str, Any], sets: dict[str, Any]
) -> None:
    """Write what an item, or a whole visit, has to say to state; a malformed reply leaves state alone."""
    node, board = visit.node, item.board
    if (not writes and not sets) or (item.value is None and not item.ok):
        return
    own = {**item.locals, "visit": visit.number, "result": item.value}
    names = play.seen(board, own, full=True)
    rng = live.rng(play, board, node.name, visit.number, item, "write")
    templates = Templates(f"nodes.{play.qualified(node.name)}", names, rng)
    for raw, what in ((writes, "write"), (sets, "set")):
        for name, template in raw.items():
            new = templates.value(f"{what}.{name}", template)
            board.write(Write(name, what == "write", new), play.info.fields, live.load)
            names["state"] = board.state


def _finish(live: Live, play: Play, thread: Thread, visit: Visit) -> bool:
    """Give the node its value and go on; False where the state is to be played no further."""
    node, board, items = visit.node, thread.board, visit.items
    if visit.is_list and not node.in_order:
        board.join([item.board for item in items], play.info.fields, live.load)
    if visit.is_list:
        columns = ([item.value for item in items], [item.ok for item in items], [item.raw for item in items])
        board.record(node.name, *columns)
    else:
        board.record(node.name, items[0].value, items[0].ok, items[0].raw)
    thread.visit = None
    stop = items[0].stop if len(items) == 1 else next((item.stop for item in items if item.stop), None)
    if stop is None and (node.set_ or (node.write and not visit.is_list)):
        whole = Item(None, board, value=board.values[node.name]) if visit.is_list else items[0]
        _write(live, play, visit, whole, {} if visit.is_list else node.write, node.set_)
    if play.records and node.name in play.info.recorded:
        _record_moments(live, play, thread, visit)
    if stop is not None:
        raise EpisodeError(*stop)
    if live.state.until is not None and live.state.until == (play.prefix, node.name, visit.number):
        live.halted = True
        return False
    _leave(live, play, thread, node.arrows, node, visit.number)
    return True


def _record_moments(live: Live, play: Play, thread: Thread, visit: Visit) -> None:
    names = play.names(thread.board, full=True)
    for item in visit.items:
        path = item.path or play.path(visit.node.name, visit.number, item)
        own = {**names, **item.locals, "visit": visit.number, "result": item.value}
        superstep = item.board.clock.superstep
        live.moments.append(Moment(play.qualified(visit.node.name), path, superstep, own))


def _leave(
    live: Live, play: Play, thread: Thread, arrows: tuple[Arrow, ...], node: Node | None, visit: int
) -> None:
    arrow = arrows[0] if len(arrows) == 1 and arrows[0].when is None and arrows[0].case is None else None
    if arrow is None:
        arrow = _choose(live, play, thread, arrows, node, visit)
    if len(arrow.targets) == 1:
        thread.at = arrow.targets[0]
        return
    thread.join = arrow.join or END
    thread.branches = [Thread(thread.board.fork(), at=target, until=thread.join) for target in arrow.targets]


def _choose(
    live: Live, play: Play, thread: Thread, arrows: tuple[Arrow, ...], node: Node | None, visit: int
) -> Arrow:
    if node is None or (node.switch is None and node.name not in play.info.chance):
        return _first(play, thread, arrows, node.name if node else START, visit)
    templates = _templates(live, play, thread, node, visit, left=True)
    if node.switch is not None:
        word = templates.evaluate("switch", node.switch)
        found = next((a for a in arrows if word is not None and a.case == _word(word)), None)
        if found is None:
            raise EpisodeError("malformed", f"the switch after {play.qualified(node.name)} got {word!r}")
        return found
    for arrow in arrows:
        if arrow.when is None or templates.condition("when", arrow.when):
            return arrow
    raise EpisodeError("malformed", f"no edge out of {play.qualified(node.name)} holds")


def _first(play: Play, thread: Thread, arrows: tuple[Arrow, ...], name: str, visit: int) -> Arrow:
    """The first arrow whose condition holds, where chance plays no part."""
    names = play.seen(thread.board, {"visit": visit})
    for arrow in arrows:
        try:
            if arrow.when is None or condition(arrow.when, names):
                return arrow
        except TemplateProblem as problem:
            message = f"nodes.{play.qualified(name)}.when: {problem}"
            raise EpisodeError("tool_error", message) from None
    raise EpisodeError("malformed", f"no edge out of {play.qualified(name)} holds")


def _word(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _run_branches(live: Live, play: Play, thread: Thread, branches: list[Thread]) -> bool:
    for branch in branches:
        if not branch.done:
            run_thread(live, play, branch)
    if not all(branch.done for branch in branches):
        return False
    thread.branches = None
    thread.at = thread.join
    wanted = "all" if thread.join == END else play.info.nodes[thread.join].join
    count = len(branches) if wanted == "all" else 1 if wanted == "any" else min(int(wanted), len(branches))
    arrived = [branch for branch in branches if branch.stop is None]
    enough = len(arrived) >= count
    taken = branches
    if enough and count < len(branches):
        first = sorted(arrived, key=lambda branch: len(branch.board.made))[:count]
        taken = [branch for branch in branches if any(branch is one for one in first)]
    dropped = [branch for branch in branches if not any(branch is one for one in taken)]
    for turn in (turn for branch in dropped for turn in branch.board.made):
        live.turns[turn] = changed(live.turns[turn], outcome="cancelled")
    boards = [branch.board for branch in taken], [branch.board for branch in dropped]
    thread.board.join(boards[0], play.info.fields, live.load, boards[1])
    if not enough:
        raise EpisodeError(*next(branch.stop for branch in branches if branch.stop))
    return True
