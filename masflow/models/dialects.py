"""How model families write thoughts and tool calls: read from a reply, and written for a demonstration.

`text` is masflow's own form, which the system message explains; the others are what chat templates teach
their models. One call a turn. Knows no tools: whether name and arguments fit is the player's question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from masflow.errors import RunError

__all__ = ["CLOSING", "DIALECTS", "OPENING", "THOUGHT", "Dialect", "Read", "Thought"]
__all__ += ["dialect_named", "thought_of"]

OPENING, CLOSING = "<tool_call>", "</tool_call>"
THOUGHT = ("<think>", "</think>")
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_SHAPE = 'a tool call is {"name": …, "arguments": {…}}'


@dataclass(frozen=True)
class Thought:
    """A reply in two parts; `is_open`: the thinking is never closed, and there is no answer."""

    before: str
    """The thinking with its tags, and the blank space behind it."""
    answer: str
    is_open: bool = False


def thought_of(text: str) -> Thought:
    """Part a reply at the end of its thinking.

    It begins with `<think>`, or in the middle of a thought where the prompt opened it: then only the closing
    tag is there.
    """
    inside, closing, answer = text.partition(THOUGHT[1])
    if closing:
        start = inside + closing
        blank = len(answer) - len(answer.lstrip())
        return Thought(start + answer[:blank], answer[blank:])
    is_open = text.lstrip().startswith(THOUGHT[0])
    return Thought(text, "", True) if is_open else Thought("", text)


class Read(NamedTuple):
    """A reply with a tool call in it; `reason` says why there is no call after all."""

    before: str = ""
    """What was thought and said before the call."""
    name: str = ""
    arguments: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Dialect:
    """One form of a tool call. `marks` are special tokens that belong to a reply's text."""

    name: str
    in_answer: Callable[[str], bool]
    read_answer: Callable[[str, Sequence[str]], Read]
    write: Callable[[str, str, dict[str, Any]], str]
    """(words before, tool, arguments) → the reply as the family writes it."""
    marks: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    """Tokens that end a reply with a call, beside the end of a turn."""

    def has(self, text: str) -> bool:
        """Whether a reply means to call a tool. What it says while it thinks is no call."""
        return self.in_answer(thought_of(text).answer)

    def read(self, text: str, stop: Sequence[str] = ()) -> Read:
        """The call of a reply that has one; a closing mark among the stop strings counts as written."""
        thought = thought_of(text)
        found = self.read_answer(thought.answer, stop)
        return found._replace(before=thought.before + found.before)


def _load(text: str) -> tuple[Any, str]:
    try:
        return json.loads(text, parse_constant=float), ""
    except (ValueError, RecursionError) as error:
        return None, f"the tool call isn't JSON ({error})"


def _call(before: str, data: Any, key: str = "arguments") -> Read:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return Read(before, reason=_SHAPE.replace("arguments", key))
    return Read(before, data["name"], data.get(key, {}))


def _only(before: str, data: Any) -> Read:
    """The one call of a list of calls; a call that stands alone is itself."""
    if isinstance(data, list) and len(data) != 1:
        return Read(before, reason=f"{len(data)} tool calls in one turn; one is allowed")
    return _call(before, data[0] if isinstance(data, list) else data)


# -- <tool_call>…</tool_call>: masflow's own text, Hermes and Qwen, SmolLM -----------------------


def _between_tags(text: str, stop: Sequence[str], found: Callable[[str, Any], Read]) -> Read:
    before, *parts = text.split(OPENING)
    if len(parts) != 1:
        return Read(before, reason=f"{len(parts)} tool calls in one turn; one is allowed")
    inside, closing, _ = parts[0].partition(CLOSING)
    if not closing and CLOSING not in stop:
        return Read(before, reason=f"{OPENING} is never closed")
    data, reason = _load(inside)
    return Read(before, reason=reason) if reason else found(before, data)


def _json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _joined(before: str, call: str) -> str:
    return f"{before.rstrip()}\n{call}" if before.strip() else call


def _has_tag(text: str) -> bool:
    return OPENING in text


# -- Llama 3: {"name": …, "parameters": {…}}, after a python tag or not --------------------------

_LLAMA_CALL = re.compile(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"parameters"\s*:')


def _llama_has(text: str) -> bool:
    return _PYTHON_TAG in text or _LLAMA_CALL.match(text.strip()) is not None


def _llama_read(text: str, stop: Sequence[str]) -> Read:
    before, tag, inside = text.partition(_PYTHON_TAG)
    data, reason = _load(inside if tag else text)
    before = before if tag else ""
    return Read(before, reason=reason) if reason else _call(before, data, "parameters")


# -- Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}] ---------------------------------------


def _mistral_read(text: str, stop: Sequence[str]) -> Read:
    before, *parts = text.split(_TOOL_CALLS)
    if len(parts) != 1:
        return Read(before, reason=f"{len(parts)} tool calls in one turn; one is allowed")
    data, reason = _load(parts[0])
    return Read(before, reason=reason) if reason else _only(before, data)


DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        Dialect(
            "text",
            _has_tag,
            lambda text, stop: _between_tags(text, stop, _call),
            lambda before, name, arguments: f"{before}{OPENING}{_json(name, arguments)}{CLOSING}",
        ),
        Dialect(
            "hermes",
            _has_tag,
            lambda text, stop: _between_tags(text, stop, _only),
            lambda before, name, arguments: _joined(
                before, f"{OPENING}\n{_json(name, arguments)}\n{CLOSING}"
            ),
            marks=(OPENING, CLOSING),
        ),
        Dialect(
            "smollm",
            _has_tag,
            lambda text, stop: _between_tags(text, stop, _only),
            lambda before, name, arguments: _joined(before, f"{OPENING}[{_json(name, arguments)}]{CLOSING}"),
            marks=(OPENING, CLOSING),
        ),
        Dialect(
            "llama",
            _llama_has,
            _llama_read,
            lambda before, name, arguments: _json(name, arguments, "parameters"),
            marks=(_PYTHON_TAG,),
            ends=("<|eom_id|>",),
        ),
        Dialect(
            "mistral",
            lambda text: _TOOL_CALLS in text,
            _mistral_read,
            lambda before, name, arguments: f"{before}{_TOOL_CALLS} [{_json(name, arguments)}]",
            marks=(_TOOL_CALLS,),
        ),
    )
}


def dialect_named(name: str) -> Dialect:
    """Raises RunError for a name of another version's plan."""
    if name not in DIALECTS:
        raise RunError(f"unknown form of tool calls '{name}'; known: {', '.join(DIALECTS)}")
    return DIALECTS[name]
