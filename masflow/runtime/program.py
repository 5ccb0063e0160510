"""Plays a workflow that is an async function: drives its coroutine, in an order that no arrival changes.

The function's coroutine, and those it gathers or spawns, are tasks. Calls go on at their own pace; tasks go
on in rounds: when everything that tasks wait for is there, each goes on to its next `await`, in the order in
which they were begun. A call happens after what its task had awaited when it was made; that is its place in
happened-before order. Knows no engine.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from masflow.errors import EpisodeError, boundary
from masflow.runtime.awaiting import Agents, Context, Gather, Hidden, Misuse, Pending, Value, shown, unwrapped
from masflow.runtime.board import Board
from masflow.runtime.live import Live, Play
from masflow.runtime.program_calls import AgentCall, Call, ToolCall, WorkflowCall, not_repeated
from masflow.timelimit import OutOfTime, call_limited
from masflow.tools import plain
from masflow.trace import path_from_json

__all__ = ["Program", "run_program"]

MAX_CALLS = 10_000
"""Calls of one function in one episode, so that a loop over tools ends."""
LIBRARY = f"{Path(__file__).resolve().parents[1]}/"
"""Files that are no user's."""


class Task(Pending):
    """One coroutine on its way, with what it knows."""

    def __init__(self, coroutine: Any, branch: tuple[int, ...], board: Board, where: str):
        super().__init__("the coroutine", where)
        self.coroutine, self.branch = coroutine, branch
        self.board, self.base = board, board.fork()
        self.waits: Pending | Gather | None = None
        self.raised: Exception | None = None
        """What its code raised: raised again where it is awaited, as anywhere in Python."""
        self.ordinals: dict[tuple[str, ...], int] = {}
        self.children = 0

    @property
    def given(self) -> Any:
        """What its code returned, as it is."""
        return self.value

    @property
    def parts(self) -> list[Pending]:
        """What it waits for."""
        if self.waits is None:
            return []
        return self.waits.parts if isinstance(self.waits, Gather) else [self.waits]

    def ordinal(self, *what: str) -> int:
        """The how-manieth of its kind in this task, from 1."""
        self.ordinals[what] = self.ordinals.get(what, 0) + 1
        return self.ordinals[what]


@dataclass
class Program:
    """One play of a function; what `agents` and `ctx` speak to."""

    live: Live
    play: Play
    tasks: list[Task] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Those under way, in the order in which they were made."""
    now: Task | None = None
    """The task whose code runs."""
    fault: EpisodeError | None = None
    """What the running code asked for in vain."""
    stop: tuple[str, str] | None = None
    keys: dict[tuple[str, str, str | int], str] = field(default_factory=dict)
    """Identity of each keyed call → where it was made."""
    talks: dict[str, Any] = field(default_factory=dict)
    """Thread of a conversation → its open call, or the last turn's conversation."""
    num_calls: int = 0
    _chances: dict[tuple[tuple[int, ...], int], random.Random] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.play.info.graph
        assert graph.program is not None
        self.timeout_s = graph.program.timeout_s
        self.ref = graph.program.function.ref
        function = self.live.load(self.ref)
        hidden = {name: Hidden(name) for name in self.play.info.hidden}
        task = Value({**self.play.task, **hidden})
        coroutine = self._called(function, (task, Agents(self), Context(self, self.play.params)))
        self._main = Task(coroutine, (), self.play.thread.board, self.ref)
        self.tasks.append(self._main)

    def _called(self, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        """Its coroutine; runs none of its code, but a decorator's. Raises EpisodeError: it gives none."""
        made, late = None, False
        with boundary(self.ref) as caught:
            try:
                made = call_limited(lambda: [function(*given)], {}, self.timeout_s)[0]
            except OutOfTime:
                late = True
        if late:
            message = f"{shown(self.ref)}: calling it took more than {self.timeout_s:g} s; what decorates it?"
            raise EpisodeError("timeout", message)
        if caught.error is not None:
            raise EpisodeError("tool_error", self._told(shown(self.ref), caught.error, caught.detail))
        if not inspect.iscoroutine(made):
            message = f"calling it gives no coroutine but a {type(made).__name__}; what decorates it?"
            raise EpisodeError("tool_error", f"{shown(self.ref)}: {message}")
        return made

    def go_on(self) -> None:
        """Run what can run: calls that have their replies, then rounds of tasks."""
        main, thread = self._main, self.play.thread
        while not thread.done:
            for call in [call for call in self.calls if not call.done]:
                call.go_on()
            self.calls = [call for call in self.calls if not call.done]
            if self.stop is not None or main.done:
                if not self.calls:
                    self._end(main)
                return
            if not all(part.done for task in self.tasks for part in task.parts if isinstance(part, Call)):
                return
            self._round()

    def is_alone(self) -> bool:
        """Whether at most one call is under way, nothing inside it side by side."""
        from masflow.runtime.player import is_alone

        inner = [call.sub for call in self.calls if isinstance(call, WorkflowCall) and call.sub is not None]
        inner += [call.item.sub for call in self.calls if isinstance(call, AgentCall) and call.item.sub]
        return len(self.calls) <= 1 and all(is_alone(play) for play in inner)

    def _end(self, main: Task) -> None:
        thread = self.play.thread
        if self.stop is None and main.stop is None:
            lost = unused(self.live, self.play)
            if lost:
                raise not_repeated(self.ref, f"the recorded reply to {lost[0]} isn't asked for any more")
        thread.stop, thread.done = self.stop or main.stop, True

    def _round(self) -> None:
        """Every task that has what it waits for goes on to its next `await`; new ones begin."""
        moved, i = False, 0
        while i < len(self.tasks) and self.stop is None:
            task = self.tasks[i]
            if not task.done and all(part.done for part in task.parts):
                moved = True
                self._resume(task)
            i += 1
        self.tasks = [task for task in self.tasks if not task.done or not task.awaited or task.branch == ()]
        if not moved and self.stop is None:
            self.stop = ("tool_error", f"{self.ref}: every coroutine waits for another")

    def _resume(self, task: Task) -> None:
        parts = task.parts
        branches = [(part.base, part.board) for part in parts if isinstance(part, (Call, Task))]
        task.board.absorb(branches, self._latest)
        raisers = [part for part in parts if isinstance(part, Task) and part.raised]
        raised = raisers[0].raised if raisers else None
        stop = next((part.stop for part in parts if part.stop and part not in raisers), None)
        if stop is not None:
            self._finish(task, None, stop)
            return
        task.waits = None
        try:
            done, value = self._step(task, raised)
            if done:
                self._finish(task, value, None)
            else:
                task.waits = self._waits(task, value)
        except EpisodeError as error:
            self._finish(task, None, (error.outcome, error.message))

    def _latest(self, turns: Sequence[str]) -> list[str]:
        """Of some turns, those that lie before no other one in happened-before order."""
        known = self.live.turns
        first = min((known[turn].superstep for turn in turns), default=0)
        left = [turn for turn in turns if known[turn].superstep > first]
        before: set[str] = set()
        while left:
            for earlier in self.live.predecessors.get(left.pop(), ()):
                if earlier not in before and known[earlier].superstep >= first:
                    before.add(earlier)
                    left.append(earlier)
        return [turn for turn in turns if turn not in before]

    def _finish(self, task: Task, value: Any, stop: tuple[str, str] | None) -> None:
        task.waits = None
        if stop is None:
            try:
                task.value = plain(unwrapped(value, self._no_hidden)) if task.branch == () else value
            except (TypeError, Misuse, RecursionError) as error:
                stop = ("tool_error", f"{self._top}: what the function returns: {_reason(error)}")
                _closed([value])
        task.done, task.stop = True, stop
        if stop is not None:
            self._close(task)
        if task.branch == ():
            self.stop = stop or self._left_over()
            for other in self.tasks:
                if not other.done:
                    self._close(other)
                    other.done = True

    def _left_over(self) -> tuple[str, str] | None:
        """Whatever was asked for and never awaited when the function returned."""
        lost = [p for p in (*self.calls, *self.tasks[1:]) if not p.awaited]
        if not lost:
            return None
        broken = next((p.stop for p in lost if p.stop), None)
        return broken or ("tool_error", f"{lost[0].where}: {lost[0].label} is never awaited; write 'await'")

    def _close(self, task: Task) -> None:
        with boundary(self.ref):
            try:
                call_limited(lambda: task.coroutine.close(), {}, self.timeout_s)
            except OutOfTime:
                return

    def _step(self, task: Task, raised: Exception | None = None) -> tuple[bool, Any]:
        """Let the task's code run to its next `await`: (whether it returned, what it gives).

        Args:
            raised: by a coroutine that it awaited, for it to catch.
        Raises EpisodeError: it raised, misused what it was given, or took too long.
        """
        self.now, self.fault, late = task, None, False
        found: list[tuple[bool, Any]] = []

        def run() -> None:
            try:
                go_on = task.coroutine.send if raised is None else task.coroutine.throw
                found.append((False, go_on(raised)))
            except StopIteration as end:
                found.append((True, end.value))

        with boundary(self.ref) as caught:
            try:
                call_limited(run, {}, self.timeout_s)
            except OutOfTime:
                late = True
        self.now = None
        if late:
            place = self._place_of(task)
            message = f"{place}: the function's own code took more than {self.timeout_s:g} s without an await"
            raise EpisodeError("timeout", message)
        if self.fault is not None:
            raise self.fault
        if caught.error is not None:
            task.raised = caught.raised
            raise EpisodeError("tool_error", self._told(task.where, caught.error, caught.detail))
        return found[0]

    def _told(self, where: str, error: str, detail: str) -> str:
        """`file:line: Type: text`, the line being the last one of the user's own code."""
        text = error.removeprefix(f"{self.ref}: ")
        if "cannot reuse already awaited coroutine" in text:
            text = "a coroutine is awaited twice; call its function once for each await"
        frames = re.findall(r'File "([^"]+)", line (\d+)', detail)
        own = [(f, n) for f, n in frames if not f.startswith(LIBRARY)]
        file = self.ref.rpartition(":")[0]
        inside = [(f, n) for f, n in own if f == file] or own
        place = f"{shown(inside[-1][0])}:{inside[-1][1]}" if inside else where
        foreign = any("/asyncio/" in f for f, _ in own) or "running event loop" in text
        return f"{place}: {text}{'; ' + FOREIGN if foreign else ''}"

    @property
    def _top(self) -> str:
        """Where the function begins."""
        code = getattr(self._main.coroutine, "cr_code", None)
        return f"{shown(code.co_filename)}:{code.co_firstlineno}" if code is not None else self.ref

    def _place_of(self, task: Task) -> str:
        frame = getattr(task.coroutine, "cr_frame", None)
        file = shown(self.ref.rpartition(":")[0])
        return f"{file}:{frame.f_lineno}" if frame is not None else file

    def _waits(self, task: Task, given: Any) -> Pending | Gather:
        """What was awaited, with coroutines made tasks. Raises EpisodeError for what isn't ours."""
        if isinstance(given, Gather):
            if not given.parts:
                self._count(given.where)
            try:
                given.parts = [self._part(task, part, given.where) for part in given.parts]
            except EpisodeError:
                _closed(given.parts)
                raise
        parts = given.parts if isinstance(given, Gather) else [given]
        for part in parts:
            if not isinstance(part, Pending):
                what = type(part).__name__
                many = isinstance(part, (list, tuple, Generator))
                hint = "gather takes calls one by one: write gather(*…)" if many else FOREIGN
                raise EpisodeError("tool_error", f"{self._place_of(task)}: awaits a {what}; {hint}")
            if part.awaited:
                message = f"{part.where}: {part.label} is awaited twice; keep its value"
                raise EpisodeError("tool_error", message)
            part.awaited = True
        return given

    def _part(self, task: Task, part: Any, where: str) -> Any:
        if isinstance(part, Gather):
            part = _all_of(part)
        return self._begin(task, part, where) if inspect.iscoroutine(part) else part

    def _begin(self, task: Task, coroutine: Any, where: str) -> Task:
        self._count(where)
        child = Task(coroutine, (*task.branch, task.children), task.board.fork(), where)
        task.children += 1
        self.tasks.append(child)
        return child

    def _count(self, where: str) -> None:
        self.num_calls += 1
        under_way = sum(not p.done for p in (*self.calls, *self.tasks))
        limit = self.play.info.graph.limits.items
        if self.num_calls > MAX_CALLS:
            raise EpisodeError("limit", f"{where}: the function made {MAX_CALLS} calls")
        if under_way > limit:
            raise EpisodeError("limit", f"{where}: {under_way} calls under way; limits.items is {limit}")

    # what `agents` and `ctx` ask for; runs inside the function's own code

    @property
    def result(self) -> Any:
        """What the function returned; None before."""
        return self._main.value

    @property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        return {name: role.members for name, role in self.play.info.roles.items()}

    def ask(
        self,
        role: str,
        member: str | int | None,
        values: dict[str, Any],
        key: str | int | None,
        prompt: str | None,
        thread: str | int | None,
        where: str,
    ) -> Pending:
        def make(task: Task) -> Call:
            return AgentCall.of(
                self, task, role, member, self._plain(values, where), key, prompt, thread, where
            )

        return self._made(where, make)

    def use(self, tool: str, args: dict[str, Any], key: str | int | None, where: str) -> Pending:
        given = self._plain(args, where, self._hidden)
        return self._made(where, lambda task: ToolCall.of(self, task, tool, given, key, where))

    def run(self, workflow: Any, args: dict[str, Any], key: str | int | None, where: str) -> Pending:
        return self._made(where, lambda task: WorkflowCall.of(self, task, workflow, args, key, where))

    def spawn(self, coroutine: Any, where: str) -> Pending:
        if not inspect.iscoroutine(coroutine):
            raise self.misuse(where, f"ctx.spawn takes a coroutine, got {type(coroutine).__name__}")
        return self._made(where, lambda task: self._begin(task, coroutine, where))

    def _made(self, where: str, make: Callable[[Task], Any]) -> Any:
        if self.now is None or self.fault is not None:
            raise self.misuse(where, "agents and ctx belong to the function while it is played")
        try:
            made = make(self.now)
            if isinstance(made, Call):
                self._count(where)
                self.calls.append(made)
            return made
        except EpisodeError as error:
            self.fault = self.fault or error
            raise Misuse(error.message) from None

    def misuse(self, where: str, message: str) -> Misuse:
        told = EpisodeError("tool_error", f"{where}: {message}")
        self.fault = self.fault or told
        return Misuse(told.message)

    def chance(self) -> random.Random:
        """Of the task whose code runs, at what it has awaited: a fork draws anew behind its turn."""
        assert self.now is not None
        task, epoch = self.now, self.now.board.clock.epoch
        if (task.branch, epoch) not in self._chances:
            key = self.live.state.keys[epoch]
            seed = f"{key.seed(self.play.prefix)} rng {task.branch}"
            self._chances[task.branch, epoch] = random.Random(seed)
        return self._chances[task.branch, epoch]

    def _plain(self, values: Any, where: str, hidden: Callable[[str], Any] | None = None) -> Any:
        try:
            return plain(unwrapped(values, hidden or self._no_hidden))
        except (TypeError, Misuse, RecursionError) as error:
            raise self.misuse(where, _reason(error).replace("the result", "a value", 1)) from None

    def _hidden(self, name: str) -> Any:
        return self.play.task[name]

    def _no_hidden(self, name: str) -> Any:
        raise Misuse(f"the hidden field '{name}' may be read by rewards and tools only")


FOREIGN = (
    "a workflow awaits agents, ctx.tool, ctx.run and masflow.gather only; effects and waiting are tools'"
)


def unused(live: Live, play: Play) -> list[str]:
    """Paths of recorded replies inside this play that nothing has asked for."""
    depth = len(play.prefix)
    lost = [text for text in live.state.replies if text not in live.paths]
    return [text for text in lost if path_from_json(text)[:depth] == play.prefix]


def _reason(error: Exception) -> str:
    return "it holds itself, or is nested too deep" if isinstance(error, RecursionError) else str(error)


def _closed(parts: Sequence[Any]) -> None:
    """Close the coroutines that were never begun."""
    for part in parts:
        if inspect.iscoroutine(part) and inspect.getcoroutinestate(part) == inspect.CORO_CREATED:
            part.close()


async def _all_of(given: Gather) -> list[Any]:
    return await given


def run_program(live: Live, play: Play) -> None:
    """Go on until the function has returned or waits for a reply."""
    try:
        if play.program is None:
            play.program = Program(live, play)
        play.program.go_on()
    except EpisodeError as error:
        play.thread.stop, play.thread.done = (error.outcome, error.message), True
