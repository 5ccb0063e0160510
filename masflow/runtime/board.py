"""What one thread of a workflow knows: state, node values, conversations, counts, and its place in
happened-before order.

Every mapping here is replaced, never changed in place, so that a fork or a snapshot costs nothing. Knows no
player.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from masflow.compiler.graph import Graph, StateFieldIR
from masflow.errors import EpisodeError, boundary
from masflow.spec.types import mismatch
from masflow.timelimit import OutOfTime, call_limited
from masflow.tools import plain
from masflow.trace import Message

MERGE_TIMEOUT_S = 10.0
"""Of a user's merge function."""


class Clock(NamedTuple):
    """A place in happened-before order: what lies immediately before whatever comes next."""

    superstep: int = 0
    """Of the latest turn before this place; 0 when there is none."""
    last: tuple[str, ...] = ()
    """Ids of the turns immediately before."""
    hidden: tuple[str, ...] = ()
    """Cancelled turns on which a choice of branches hung: no predecessors, yet a fork at one redoes what
    follows."""
    epoch: int = 0
    """How many of the state's forks lie before this place."""
    effects: int = 0
    """Tools, calls and people since the latest turn, one after the other."""

    def after(self, turn_id: str, epoch: int) -> Clock:
        return Clock(self.superstep + 1, (turn_id,), (), epoch)


def meet(fork: Clock, taken: Sequence[Clock], dropped: Sequence[Clock] = ()) -> Clock:
    """The place after a join. A branch without turns adds nothing unless no branch has any."""
    last = [turn for clock in taken if clock.last != fork.last for turn in clock.last]
    hidden = [turn for clock in (taken or (fork,)) for turn in clock.hidden]
    hidden += [turn for clock in dropped if clock.last != fork.last for turn in (*clock.last, *clock.hidden)]
    clocks = (fork, *taken)
    latest = max(clock.superstep for clock in clocks)
    return Clock(
        latest,
        tuple(dict.fromkeys(last)) or fork.last,
        tuple(dict.fromkeys(hidden)),
        max(clock.epoch for clock in (*clocks, *dropped)),
        max(clock.effects for clock in clocks if clock.superstep == latest),
    )


class Conversation(NamedTuple):
    """The messages of one thread of talk, and the turn whose row the next prompt continues."""

    messages: tuple[Message, ...]
    turn_id: str | None


class Write(NamedTuple):
    """One write to state since the fork, made again at the join."""

    field: str
    merges: bool
    value: Any


@dataclass
class Board:
    """The blackboard of one thread. `made` and `writes` hold what happened since its fork."""

    state: Mapping[str, Any]
    values: Mapping[str, Any]
    history: Mapping[str, list[Any]]
    ok: Mapping[str, Any]
    raw: Mapping[str, Any]
    visits: Mapping[str, int]
    clock: Clock
    conversations: Mapping[str, Conversation] = field(default_factory=dict)
    skips: Mapping[str, int] = field(default_factory=dict)
    tool_log: tuple[tuple[str, Any], ...] = ()
    """Calls of episode tools so far, (tool, args): their state is what these calls make of it."""
    turns: int = 0
    tokens: int = 0
    made: tuple[str, ...] = ()
    writes: tuple[Write, ...] = ()

    @classmethod
    def of(cls, graph: Graph, clock: Clock) -> Board:
        names = [node.name for node in graph.nodes]
        return cls(
            state={f.name: f.default for f in graph.state},
            values=dict.fromkeys(names),
            history={name: [] for name in names},
            ok=dict.fromkeys(names),
            raw=dict.fromkeys(names),
            visits=dict.fromkeys(names, 0),
            clock=clock,
        )

    def fork(self) -> Board:
        new = object.__new__(Board)
        new.__dict__.update(self.__dict__, made=(), writes=())
        return new

    def record(self, node: str, value: Any, ok: Any, raw: Any, *, skipped: bool = False) -> None:
        """Make this the value of the node's last visit (or of a skip, which history leaves out)."""
        self.values = {**self.values, node: value}
        self.ok = {**self.ok, node: ok}
        self.raw = {**self.raw, node: raw}
        if not skipped:
            self.history = {**self.history, node: [*self.history[node], value]}

    def write(self, write: Write, fields: Mapping[str, StateFieldIR], load: Callable[[str], Any]) -> None:
        """Raises EpisodeError when the value doesn't fit, or the merge function fails."""
        ir = fields[write.field]
        old = self.state.get(write.field)
        new = merged(ir, old, write.value, load) if write.merges else write.value
        if mismatch(new, ir.type):
            raise EpisodeError("tool_error", mismatch(new, ir.type, f"state.{ir.name}") or "")
        self.state = {**self.state, write.field: new}
        self.writes = (*self.writes, write)

    def join(
        self,
        taken: Sequence[Board],
        fields: Mapping[str, StateFieldIR],
        load: Callable[[str], Any],
        dropped: Sequence[Board] = (),
    ) -> None:
        """Take in what the branches did since they were forked from this board, in their order."""
        turns, tokens = self.turns, self.tokens
        base = {name: getattr(self, name) for name in _MAPPINGS}
        log = self.tool_log
        for branch in taken:
            for name in _MAPPINGS:
                _overlay(self, name, base[name], getattr(branch, name))
            self.tool_log += branch.tool_log[len(log) :]
        for branch in dropped:  # a visit that was started counts, so that no later one has its path
            for name in _COUNTS:
                _overlay(self, name, base[name], getattr(branch, name))
        for branch in (*taken, *dropped):
            self.turns += branch.turns - turns
            self.tokens += branch.tokens - tokens
            self.made += branch.made
        self.clock = meet(self.clock, [b.clock for b in taken], [b.clock for b in dropped])
        for write in [w for branch in taken for w in branch.writes]:
            self.write(write, fields, load)

    def absorb(
        self, branches: Sequence[tuple[Board, Board]], latest: Callable[[Sequence[str]], Sequence[str]]
    ) -> None:
        """Take in what branches did while this one went on, in their order.

        Args:
            branches: (the board that it was forked from, its board now) of each.
            latest: of some turns, those that lie before no other one in happened-before order.
        """
        for base, branch in branches:
            for name in _MAPPINGS:
                _overlay(self, name, getattr(base, name), getattr(branch, name))
            self.tool_log += branch.tool_log[len(base.tool_log) :]
            self.turns += branch.turns - base.turns
            self.tokens += branch.tokens - base.tokens
            self.made += branch.made
        self.clock = after_all([self.clock, *(branch.clock for _, branch in branches)], latest)


def after_all(clocks: Sequence[Clock], latest: Callable[[Sequence[str]], Sequence[str]]) -> Clock:
    """The place after several others, whichever of them knew of each other."""
    if all(clock == clocks[0] for clock in clocks):
        return clocks[0]
    superstep = max(clock.superstep for clock in clocks)
    return Clock(
        superstep,
        tuple(latest(list(dict.fromkeys(turn for clock in clocks for turn in clock.last)))),
        tuple(dict.fromkeys(turn for clock in clocks for turn in clock.hidden)),
        max(clock.epoch for clock in clocks),
        max(clock.effects for clock in clocks if clock.superstep == superstep),
    )


_MAPPINGS = ("values", "ok", "raw", "history", "visits", "skips", "conversations")
_COUNTS = ("visits", "skips")


def _overlay(board: Board, name: str, base: Mapping[str, Any], branch: Mapping[str, Any]) -> None:
    """Put a branch's changes of one mapping over the board's: counts add, histories extend, the rest
    replaces."""
    if branch is base:
        return
    now = dict(getattr(board, name))
    for key, value in branch.items():
        old = base.get(key)
        if value is old:
            continue
        if name in _COUNTS:
            now[key] = now.get(key, 0) + value - (old or 0)
        elif name == "history":
            now[key] = [*now[key], *value[len(old or []) :]]
        else:
            now[key] = value
    setattr(board, name, now)


def merged(ir: StateFieldIR, old: Any, new: Any, load: Callable[[str], Any]) -> Any:
    """The value of a state field after a write under its merge rule; null adds nothing except to `append`."""
    if ir.merge_function is not None:
        return _by_function(ir.merge_function.ref, load, old, new)
    if ir.merge == "replace":
        return new
    if ir.merge == "append":
        return [*(old or []), new]
    if new is None:
        return old
    if old is None:
        return new
    with boundary(f"state.{ir.name}: {ir.merge}") as caught:
        return _RULES[ir.merge](old, new)
    raise EpisodeError("tool_error", caught.error or "")


def _by_function(ref: str, load: Callable[[str], Any], old: Any, new: Any) -> Any:
    function, late = load(ref), ""
    with boundary(f"merge {ref}") as caught:
        try:
            merge = partial(function, deepcopy(old), deepcopy(new))
            return plain(call_limited(merge, {}, MERGE_TIMEOUT_S))
        except OutOfTime as error:
            late = f"merge {ref}: {error}"
    raise EpisodeError("timeout" if late else "tool_error", late or caught.error or "")


def _union(old: list[Any], new: list[Any]) -> list[Any]:
    result = list(old)
    for item in new:
        if item not in result:
            result.append(item)
    return result


_RULES: dict[str, Callable[[Any, Any], Any]] = {
    "extend": lambda old, new: [*old, *new],
    "add": lambda old, new: old + new,
    "union": _union,
    "update": lambda old, new: {**old, **new},
}
