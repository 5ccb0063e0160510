"""The calls of a workflow written as a function: of a role, of a tool, of another workflow.

Each is at a path of its own from the moment when it is made: its role (or tool, or workflow) and its key, or
its ordinal. Knows no coroutines.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from masflow.compiler.graph import Node, RoleIR, ToolIR
from masflow.errors import EpisodeError, RunError, closest
from masflow.runtime.awaiting import Misuse, Pending, unwrapped
from masflow.runtime.effects import effect_key, run_tool
from masflow.runtime.items import begin_sub, end_sub
from masflow.runtime.live import Item, Play, Templates, Visit
from masflow.runtime.turns import run_role, thread_name
from masflow.runtime.walk import run_play
from masflow.spec.types import mismatch, shown, unwritable
from masflow.tools import plain
from masflow.trace import Moment, Path, Step, path_json, short_key

if TYPE_CHECKING:
    from masflow.runtime.program import Program, Task

__all__ = ["AgentCall", "Call", "ToolCall", "WorkflowCall", "not_repeated"]


class Call(Pending):
    """Something asked for at a path, with a board forked where it was asked."""

    def __init__(self, program: Program, task: Task, label: str, where: str):
        super().__init__(label, where)
        self.program, self.live, self.play = program, program.live, program.play
        self.board = task.board.fork()
        self.base = self.board.fork()

    def go_on(self) -> None:
        """Run what can run; sets `done` with the value, or with what ends the episode."""
        try:
            self._go_on()
        except EpisodeError as error:
            self.stop, self.done = (error.outcome, self._told(error.message)), True

    def _go_on(self) -> None:
        raise NotImplementedError

    def _told(self, message: str) -> str:
        return message if message.startswith(self.where) else f"{self.where}: {message}"

    def _close(self, name: str, path: Path, value: Any, ok: Any = True, raw: Any = None, **own: Any) -> None:
        """Make this the last value of the name, and keep the moment where a reward looks at it."""
        self.board.record(name, value, ok, raw)
        self.value, self.done = value, True
        if self.play.records and name in self.play.info.recorded:
            names = {**self.play.names(self.board, full=True), **own, "result": value}
            qualified = self.play.qualified(name)
            self.live.moments.append(Moment(qualified, path, self.board.clock.superstep, names))


class AgentCall(Call):
    """A role that is asked; goes on through its tool calls and attempts at its own pace."""

    def __init__(
        self, program: Program, task: Task, role: RoleIR, node: Node, item: Item, visit: int,
        values: dict[str, Any], key: str | int | None, where: str,
    ):  # fmt: skip
        super().__init__(program, task, f"a call of '{role.name}'", where)
        self.role, self.key, self.item = role, key, item
        item.board = self.board
        self.visit = Visit(node, visit, False, [item])
        self.path = self.play.path(node.name, visit, item)
        self.board.visits = {**self.board.visits, role.name: self.board.visits[role.name] + 1}
        names = {**self.play.visible, **values, "task": self.play.visible["task"], "visit": visit, "key": key}
        epoch = self.board.clock.epoch
        seed = f"{self.live.state.keys[epoch].seed(self.path)} prompt"
        self.templates: Templates | None = Templates(where, names, random.Random(seed))

    @classmethod
    def of(
        cls, program: Program, task: Task, name: str, member: str | int | None, values: dict[str, Any],
        key: str | int | None, prompt: str | None, thread: str | int | None, where: str,
    ) -> AgentCall:  # fmt: skip
        """Raises EpisodeError: no such member, a key twice, a thread that is spoken in, or a limit."""
        info = program.play.info
        role, node = info.roles[name], info.nodes[name]
        who = _member(role, member, where)
        _check_given(role, values, prompt, thread, where)
        visit, item = _identity(program, task, name, who, role.members, key, where)
        if task.board.visits[name] >= node.max_visits:
            raise EpisodeError("limit", f"{where}: role {name} reached its {node.max_visits} visits")
        node = replace(node, speaker=repr(who) if role.is_family else None, prompt=prompt or node.prompt)
        if not (node.prompt or role.system):
            message = f"role '{name}' has no prompt; give it one, or the call: prompt=…"
            raise EpisodeError("tool_error", f"{where}: {message}")
        made = Item(item, task.board, {"me": who} if role.members else {}, role=name, member=who)
        if thread is not None and role.conversation == "none":
            message = f"role '{name}' has no conversation, so 'thread' means nothing; add conversation: role"
            raise EpisodeError("tool_error", f"{where}: {message}")
        made.thread = "" if thread is None else f" {type(thread).__name__} {thread}"
        call = cls(program, task, role, node, made, visit, values, key, where)
        call._take_floor()
        return call

    def _take_floor(self) -> None:
        """One speaks in a conversation at a time, and everybody there knows what was said."""
        self.thread = thread_name(self.visit.node, self.role, self.item)
        if not self.thread:
            return
        talks = self.program.talks
        if talks.get(self.thread) != (self.board.conversations.get(self.thread)):
            message = (
                f"role '{self.role.name}' speaks in a conversation whose last call isn't awaited here; "
                "await it first, or name another thread: thread=…"
            )
            raise EpisodeError("tool_error", f"{self.where}: {message}")
        talks[self.thread] = self

    def _go_on(self) -> None:
        item = self.item
        try:
            run_role(self.live, self.play, self.visit, item, self.templates)
        except EpisodeError as error:
            item.stop, item.done, item.ok = (error.outcome, self._named(error.message)), True, False
        if self.templates is not None:
            self.templates = None
            self._compare()
        if not item.done:
            return
        if self.thread:
            self.program.talks[self.thread] = self.board.conversations.get(self.thread)
        name, path = self.role.name, item.path or self.path
        own = {"item": self.key, "key": self.key, "visit": self.visit.number, "me": item.member}
        self._close(name, path, item.value, item.ok, item.raw, **own)
        if item.stop is not None:
            self.stop = item.stop[0], self._told(item.stop[1])

    def _named(self, message: str) -> str:
        """A prompt's null that is really a value which the call forgot."""
        found = re.search(r"prints null \('(\w+)", message) if self.templates is not None else None
        if found is None or self.templates is None or found[1] in self.templates.names:
            return message
        name = found[1]
        if name in self.play.info.hidden:
            return (
                f"{self.where}: the prompt names the hidden field '{name}', which only rewards and tools read"
            )
        return f"{self.where}: the call gives no '{name}': write agents.{self.role.name}({name}=…)"

    def _compare(self) -> None:
        """The same call is asked the same thing whenever the episode is replayed. Raises RunError."""
        text = path_json(self.path)
        turn = self.live.turns.get(self.live.paths.get(text, ""))
        messages = turn.messages if turn is not None else self.item.messages
        if messages is None:
            return
        asked = "\n\n".join(f"{message.role}: {message.content}" for message in messages)
        before = self.live.state.prompts.setdefault(text, asked)
        if before != asked:
            raise not_repeated(self.where, f"{self.label} {text} {_difference(before, asked)}")


class ToolCall(Call):
    """A tool that is used; recorded once, replayed ever after."""

    def __init__(
        self, program: Program, task: Task, name: str, path: Path, args: dict[str, Any], key: Any, where: str
    ):
        super().__init__(program, task, f"a use of tool '{name}'", where)
        self.name, self.path, self.args, self.key = name, path, args, key
        self.board.visits = {**self.board.visits, name: self.board.visits[name] + 1}

    @classmethod
    def of(
        cls, program: Program, task: Task, name: str, args: dict[str, Any], key: Any, where: str
    ) -> ToolCall:
        """Raises EpisodeError: no such tool, a key twice, or a limit."""
        info = program.play.info
        known = [node.name for node in info.graph.nodes if node.kind == "tool"]
        if name not in known:
            raise EpisodeError("tool_error", f"{where}: {_unknown('tool', name, known)}")
        visit, item = _identity(program, task, name, "", (), key, where)
        if task.board.visits[name] >= info.nodes[name].max_visits:
            raise EpisodeError(
                "limit", f"{where}: tool {name} reached its {info.nodes[name].max_visits} visits"
            )
        problem = _misfit(info.tools[name], args)
        if problem:
            raise EpisodeError("tool_error", f"{where}: tool '{name}': {problem}")
        path = (*program.play.prefix, Step(program.play.call, name, visit, item))
        return cls(program, task, name, path, args, key, where)

    def _go_on(self) -> None:
        recorded = self.live.state.effects.get(effect_key("tool", self.path))
        if recorded is not None and recorded.args != self.args:
            change = _difference(repr(recorded.args), repr(self.args))
            raise not_repeated(self.where, f"{self.label} {path_json(self.path)} {change}")
        tool = self.play.info.tools[self.name]
        done, value = run_tool(self.live, self.play, self.board, self.path, tool, self.args)
        if done:
            own = {"item": self.key, "key": self.key, "visit": self.path[-1].visit}
            self._close(self.name, self.path, value, **own)


class WorkflowCall(Call):
    """An episode of another workflow inside this one."""

    def __init__(
        self, program: Program, task: Task, node: Node, path: Path, args: dict[str, Any], where: str
    ):
        super().__init__(program, task, f"a run of '{node.name}'", where)
        self.node, self.path, self.args = node, path, args
        self.board.visits = {**self.board.visits, node.name: self.board.visits[node.name] + 1}
        self.sub: Play | None = None

    @classmethod
    def of(
        cls, program: Program, task: Task, workflow: Any, args: dict[str, Any], key: Any, where: str
    ) -> WorkflowCall:
        """Raises EpisodeError: a workflow that isn't declared, a key twice, or fields that don't fit."""
        node = _declared(program, workflow, where)
        visit, item = _identity(program, task, node.name, "", (), key, where)
        graph = program.live.plan.workflows[str(node.workflow)]
        fields = {entry.name: entry for entry in graph.task}
        given: dict[str, Any] = {}
        for name, value in args.items():
            if name not in fields:
                message = _unknown(f"task field of '{node.name}'", name, list(fields))
                raise EpisodeError("tool_error", f"{where}: {message}")
            read = program._hidden if fields[name].hidden else program._no_hidden
            try:
                given[name] = plain(unwrapped(value, read))
            except (TypeError, Misuse) as error:
                raise EpisodeError("tool_error", f"{where}: field '{name}': {error}") from None
        path = (*program.play.prefix, Step(program.play.call, node.name, visit, item))
        return cls(program, task, node, path, given, where)

    def _go_on(self) -> None:
        if self.sub is None:
            self.sub = begin_sub(self.live, self.play, self.board, self.node, self.path, self.args)
        run_play(self.live, self.sub)
        if not self.sub.thread.done:
            return
        value = end_sub(self.live, self.board, self.sub)
        self._close(self.node.name, self.path, value)


def _declared(program: Program, workflow: Any, where: str) -> Node:
    """The node of a workflow, given by its name or as the function itself."""
    nodes = [node for node in program.play.info.graph.nodes if node.kind == "workflow"]
    name = workflow
    if callable(workflow):
        name = getattr(workflow, "__name__", "?")
        file = getattr(getattr(workflow, "__code__", None), "co_filename", "")
        for node in nodes:
            made = program.live.plan.workflows[str(node.workflow)].program
            at, _, function = made.function.ref.rpartition(":") if made else ("", "", "")
            if function == name and File(at).resolve() == File(file).resolve():
                return node
    found = next((node for node in nodes if node.name == name), None)
    if found is None:
        message = _unknown("workflow", name, [node.name for node in nodes])
        raise EpisodeError("tool_error", f"{where}: {message}; declare it: workflows={{'{name}': …}}")
    return found


def _identity(
    program: Program, task: Task, name: str, member: str, members: tuple[str, ...], key: Any, where: str
) -> tuple[int, int | str | None]:
    """(visit, item) of a call: by its key, or by its ordinal in the task that makes it."""
    if key is None:
        place: int | str | None = None
        if members:
            place = members.index(member) if member == f"{name}_{members.index(member)}" else member
        if task.branch:
            label = "~" + ".".join(map(str, task.branch))
            place = label if place is None else f"{label} {place}"
        return task.ordinal(name, member if members else ""), place
    _check_name(key, "key", where)
    if str(key).startswith("~"):
        raise EpisodeError("tool_error", f"{where}: a key begins without '~'; got {shown(key)}")
    identity = (name, member, str(key)) if members else (name, "", f"{type(key).__name__} {key}")
    if identity in program.keys:
        first = program.keys[identity]
        message = (
            f"'{name}' has a call with key {shown(key)} already, made at {first}; give each call its own key"
        )
        raise EpisodeError("tool_error", f"{where}: {message}")
    program.keys[identity] = where
    return 1, f"{member}:{short_key(key)}" if members else short_key(key)


def _check_name(value: Any, what: str, where: str) -> None:
    """A key or a thread. Raises EpisodeError: it doesn't stay the same from one play to the next."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        message = f"a {what} is text or a whole number; got {shown(value)}"
    elif unwritable(value):
        message = f"the {what} {unwritable(value)}: {shown(value)}"
    else:
        return
    raise EpisodeError("tool_error", f"{where}: {message}")


def _check_given(role: RoleIR, values: dict[str, Any], prompt: Any, thread: Any, where: str) -> None:
    """What a call of a role gives beside its key. Raises EpisodeError."""
    message = ""
    lost = [name for name in ("task", "visit", *(["me"] if role.members else [])) if name in values]
    if lost:
        message = f"'{lost[0]}' is what masflow calls it in every prompt; give the value another name"
    elif prompt is not None and not isinstance(prompt, str):
        message = f"a prompt is a template's text; got {shown(prompt)}"
    elif prompt is not None and re.fullmatch(r"[\w./\\-]+\.(md|txt|jinja2?|j2)", prompt):
        message = f"a call's prompt is the text itself, and {prompt!r} looks like a file; read it at the top"
    elif thread is not None:
        _check_name(thread, "thread", where)
    if message:
        raise EpisodeError("tool_error", f"{where}: {message}")


def _misfit(tool: ToolIR, args: dict[str, Any]) -> str | None:
    """Why a tool doesn't take these arguments; None where it does."""
    function = tool.function
    types = {**tool.parameters, **function.types}
    params = function.params or tuple(types)
    free = ("state", *tool.settings, *tool.bind)
    ours = next((name for name in args if name in tool.bind), None)
    if ours is not None:
        return f"'{ours}' is bound by the workflow; leave it out"
    lost = [name for name in args if name not in params]
    if lost and "**" not in params:
        return _unknown("argument", lost[0], [name for name in params if name not in free])
    missing = [name for name in function.required if name not in args and name not in free]
    if missing:
        return f"needs '{missing[0]}'; write {missing[0]}=…"
    return next((m for name in args if name in types and (m := _mismatch(name, args[name], tool))), None)


def _mismatch(name: str, value: Any, tool: ToolIR) -> str | None:
    if value is None and (name in tool.function.nullable or name not in tool.function.required):
        return None
    return mismatch(value, tool.function.types.get(name) or tool.parameters[name], name)


def _member(role: RoleIR, member: str | int | None, where: str) -> str:
    if not role.members:
        if member is not None:
            message = f"role '{role.name}' is one voice, without members; leave [{member!r}] out"
            raise EpisodeError("tool_error", f"{where}: {message}")
        return role.name
    known = ", ".join(role.members)
    if isinstance(member, int) and 0 <= member < len(role.members):
        return role.members[member]
    if member not in role.members:
        asked = f"no member {member!r}" if member is not None else "several members"
        message = f"role '{role.name}' has {asked}: {known}; write agents.{role.name}[0](…)"
        raise EpisodeError("tool_error", f"{where}: {message}")
    return str(member)


def _unknown(kind: str, name: Any, known: list[str]) -> str:
    near = closest(str(name), known)
    return f"no {kind} '{name}'; known: {', '.join(known) or 'none'}" + (f"; write '{near}'" if near else "")


def _difference(before: str, now: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now))
    )
    start = max(0, at - 20)
    old, new = before[start : at + 40], now[start : at + 40]
    return f"was given {old!r} first and {new!r} now (from character {at} on)"


def not_repeated(where: str, what: str) -> RunError:
    """The function doesn't do the same again when it is replayed."""
    fix = "take chance from ctx.rng, effects from ctx.tool, and share nothing between coroutines side by side"
    return RunError(f"{where}: the function isn't deterministic: {what}", fix)
