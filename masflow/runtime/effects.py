"""What reaches outside an episode besides models: tools, functions and people; recorded once, replayed ever
after."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from masflow.compiler.graph import Node, ToolIR
from masflow.errors import EpisodeError, boundary
from masflow.runtime.board import Board
from masflow.runtime.live import Live, Play, Question, Templates
from masflow.runtime.replies import parse_reply
from masflow.spec.replies import ChoiceReply, fields_of, needed_fields
from masflow.spec.types import shown
from masflow.timelimit import OutOfTime, call_limited, tell
from masflow.tools import plain
from masflow.trace import Effect, Path, made, path_json

CALL_TIMEOUT_S = 60.0
"""Of a `call` node, a human node's stand-in included."""


def effect_key(kind: str, path: Path) -> str:
    return f"{kind}:{path_json(path)}"


_SCALARS = frozenset((str, int, float, bool, type(None)))


def own(args: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, those that the function could change copied."""
    for arg in args.values():
        if type(arg) not in _SCALARS:
            return copy.deepcopy(args)
    return args


def _recorded(
    live: Live,
    board: Board,
    kind: Literal["tool", "call"],
    path: Path,
    args: dict[str, Any],
    run: Callable[[], Any],
    whose: str,
) -> Any:
    """The value of an effect: from the record, from the demonstration, or by running it now."""
    key = effect_key(kind, path)
    live.place(key, board)
    effect = live.state.effects.get(key)
    if effect is None:
        effect = live.state.effects[key] = _make(live, key, kind, path, args, run, whose)
    if effect.error is not None:
        outcome, _, message = effect.error.partition(": ")
        raise EpisodeError(outcome, message)
    return effect.value


def _said(live: Live, kind: Literal["tool", "call"], path: Path, args: dict[str, Any]) -> Effect | None:
    """What a demonstration gives in its place."""
    script = live.state.script
    if script is None or not script.has_value(path):
        return None
    return Effect(path, kind, plain(script.value(path)), args=args)


def _is_there(live: Live, play: Play, board: Board, path: Path, tool: ToolIR, args: dict[str, Any]) -> bool:
    """Whether a tool's effect is known. If not, its call is under way beside others, begun now or before."""
    key = effect_key("tool", path)
    effects = live.state.effects
    if tool.at_once == 1 or key in effects:
        return True
    live.place(key, board)
    begun = live.begun.get(key)
    if begun is None:
        effect = _said(live, "tool", path, args)
        if effect is not None:
            effects[key] = effect
            return True
        box, graph, given = live.toolbox, play.graph_key, own({**args, **bound(play, tool)})
        live.begun[key] = box.lanes.begin(
            f"{graph}/{tool.name}",
            tool.at_once,
            lambda: _timed("tool", path, args, lambda: box.call(graph, tool, given, {})),
        )
        return False
    if not begun.is_over():
        return False
    del live.begun[key]
    effects[key] = begun.result()
    return True


def _timed(kind: Literal["tool", "call"], path: Path, args: dict[str, Any], run: Callable[[], Any]) -> Effect:
    started = time.perf_counter()
    value, error = None, None
    try:
        value = run()
    except EpisodeError as problem:
        error = f"{problem.outcome}: {problem.message}"
    return _effect(path, kind, value, error, args, started)


def _make(
    live: Live,
    key: str,
    kind: Literal["tool", "call"],
    path: Path,
    args: dict[str, Any],
    run: Callable[[], Any],
    whose: str,
) -> Effect:
    effect = _said(live, kind, path, args)
    if effect is not None:
        return effect
    started = time.perf_counter()
    tell(partial(_note_late, live.state.effects, key, path, kind, args, whose, started))
    try:
        return _timed(kind, path, args, run)
    finally:
        tell(None)


def _note_late(
    effects: dict[str, Effect],
    key: str,
    path: Path,
    kind: Literal["tool", "call"],
    args: dict[str, Any],
    whose: str,
    started: float,
    text: str,
) -> None:
    effects[key] = _effect(path, kind, None, f"timeout: {whose}: {text}", args, started)


def _effect(
    path: Path,
    kind: Literal["tool", "call"],
    value: Any,
    error: str | None,
    args: dict[str, Any],
    started: float,
) -> Effect:
    took = time.perf_counter() - started
    return made(
        Effect, path=path, kind=kind, value=value, error=error, args=args, duration_s=took, superstep=0
    )


def run_call(live: Live, play: Play, board: Board, path: Path, ref: str, args: dict[str, Any]) -> Any:
    """Call a user's function with copies of its arguments. Raises EpisodeError."""
    return _recorded(live, board, "call", path, args, lambda: _called(live, ref, args), ref)


def _called(live: Live, ref: str, args: dict[str, Any]) -> Any:
    function, given = live.load(ref), own(args)
    late = ""
    with boundary(ref) as caught:
        try:
            return plain(call_limited(function, given, CALL_TIMEOUT_S))
        except OutOfTime as error:
            late = str(error)
    if late:
        raise EpisodeError("timeout", f"{ref}: {late}")
    raise EpisodeError("tool_error", caught.error or ref)


def run_tool(
    live: Live,
    play: Play,
    board: Board,
    path: Path,
    tool: ToolIR,
    args: dict[str, Any],
    *,
    approve: bool = False,
) -> tuple[bool, Any]:
    """(True, value) once the tool ran; (False, None) while it runs beside others, or a person's approval is
    waited for. Refused: value null."""
    if (tool.approve or approve) and live.interactive:
        answer = _answer(
            live,
            board,
            path,
            Question(path, play.qualified(path[-1].node), _call_text(tool, args), "approve"),
        )
        if answer is None:
            return False, None
        if answer.value is not True:
            return True, None
    elif tool.approve or approve:
        raise EpisodeError("paused", f"tool {tool.name} needs a person's approval")
    if not _is_there(live, play, board, path, tool, args):
        return False, None
    whose = f"tool {tool.name} ({tool.function.ref})"
    value = _recorded(live, board, "tool", path, args, lambda: _used(live, play, board, tool, args), whose)
    if tool.scope == "episode":
        board.tool_log = (*board.tool_log, (tool.name, args))
    return True, value


def bound(play: Play, tool: ToolIR) -> dict[str, Any]:
    """The arguments that a tool gets from the task. They stand in no effect: what is recorded is what was
    passed."""
    if not tool.bind:
        return {}
    return Templates(f"tools.{play.qualified(tool.name)}", play.static).value("bind", tool.bind)


def _call_text(tool: ToolIR, args: dict[str, Any]) -> str:
    return f"Run {tool.name}({', '.join(f'{k}={v!r}' for k, v in args.items())})?"


def _used(live: Live, play: Play, board: Board, tool: ToolIR, args: dict[str, Any]) -> Any:
    more = bound(play, tool)
    if tool.scope == "shared":
        return live.toolbox.call(play.graph_key, tool, own({**args, **more}), {})
    scope = path_json(play.prefix)
    log, states = live.tool_states.get(scope, ((), {}))
    wanted = board.tool_log
    if wanted[: len(log)] != log:
        log, states = (), {}
    for name, earlier in wanted[len(log) :]:
        known = play.info.tools[name]
        live.toolbox.call(play.graph_key, known, own({**earlier, **bound(play, known)}), states)
    live.tool_states.pop(scope, None)
    value = live.toolbox.call(play.graph_key, tool, own({**args, **more}), states)
    live.tool_states[scope] = ((*wanted, (tool.name, args)), states)
    return value


def _answer(live: Live, board: Board, path: Path, question: Question) -> Effect | None:
    key = effect_key("human", path)
    live.place(key, board)
    effect = live.state.effects.get(key)
    script = live.state.script
    if effect is None and script is not None and script.has_value(path):
        effect = live.state.effects[key] = Effect(path, "human", plain(script.value(path)))
    if effect is None:
        live.questions[key] = question
    return effect


def run_human(
    live: Live, play: Play, board: Board, path: Path, node: Node, templates: Templates, full: Templates
) -> tuple[bool, Any]:
    """(True, the answer), from a person, or from who answers instead; (False, None) while it is waited
    for."""
    human = node.human
    assert human is not None
    instead = None if live.interactive else human.in_training
    if instead == "skip":
        return True, None
    reply = human.reply
    words = reply.choice if isinstance(reply, ChoiceReply) and isinstance(reply.choice, str) else None
    choices = None if words is None else tuple(templates.value("human.reply.choice", words) or ())
    if isinstance(instead, dict) and "value" in instead:
        return True, _fitting(node, full.value("in_training", instead["value"]), choices)
    if isinstance(instead, dict) and "call" in instead:
        args = full.value("in_training", instead.get("args", {}))
        answer = run_call(live, play, board, path, str(instead["call"]), args)
        return True, _fitting(node, answer, choices)
    asked = templates.render("human.ask", human.ask)
    question = Question(path, play.qualified(node.name), asked, choices=choices)
    effect = _answer(live, board, path, question)
    return (False, None) if effect is None else (True, effect.value)


def _fitting(node: Node, value: Any, choices: Sequence[Any] | None) -> Any:
    """What stands in for a person's answer as the node's value: text is read as if it had been typed.

    Raises EpisodeError: it isn't what a person could answer.
    """
    assert node.human is not None
    if value is None:
        return None
    fields, needed = fields_of(node.human.reply), needed_fields(node.human.reply)
    problem = f"got {shown(value)}" if not isinstance(value, (str, dict)) else ""
    if isinstance(value, str):
        try:
            return parse_answer(node, value, choices)
        except ValueError as error:
            problem = str(error)
    missing = [name for name in needed if isinstance(value, dict) and name not in value]
    if not problem and not missing:
        return value
    wanted = ", ".join(f"{name}: …" for name in fields)
    problem = problem or f"'{missing[0]}' is missing"
    raise EpisodeError("tool_error", f"nodes.{node.name}.in_training: an answer is {{{wanted}}}; {problem}")


def parse_answer(node: Node, text: str, choices: Sequence[Any] | None = None) -> Any:
    """A person's text as the human node's value. Raises ValueError with the reason when it is malformed."""
    assert node.human is not None
    parsed = parse_reply(node.human.reply, text, choices=choices)
    if not parsed.ok:
        raise ValueError(parsed.reason)
    return parsed.value
