"""Turns the text of a reply into a value, one function a reply format; any text ends in a value or in a
reason.

What a model thinks before it answers (`<think>…</think>`) is no part of the value, in any format, unless the
reply itself asks for a `think` tag. It stays in the turn's text and in the conversation, where the chat
template keeps or drops it, and its tokens count in `max_tokens` and are trained like the others. A thought
that is never closed leaves no answer: the turn is malformed (or truncated, where `max_tokens` cut it).

Knows no player: it sees the reply's spec, the text, and what the spec can't hold (choices worked out at run
time).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from masflow.errors import boundary
from masflow.models.dialects import thought_of
from masflow.spec import patterns
from masflow.spec.replies import (
    ChoiceReply,
    CodeReply,
    JsonReply,
    RegexReply,
    Reply,
    TagReply,
    TagsReply,
    TextReply,
    fields_of,
)
from masflow.spec.types import Type, mismatch, unwritable

MAX_BRACES = 32
"""Opening braces at which a JSON object inside prose is looked for."""
ALIASES = {
    "py": "python",
    "python3": "python",
    "js": "javascript",
    "sh": "bash",
    "shell": "bash",
    "yml": "yaml",
}


@dataclass(frozen=True)
class Parsed:
    """A reply's value, or why there is none."""

    value: dict[str, Any] | None = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.value is not None


class _Malformed(Exception):
    """Why a text has no value; stays inside this module."""


def parse_reply(
    spec: Reply, text: str, *, choices: Sequence[object] | None = None, stop: Sequence[str] = ()
) -> Parsed:
    """Read a reply.

    Args:
        choices: of a `choice` reply whose words come from an expression.
        stop: the turn's stop strings; the one that ended the turn is cut from the text, so that a
            closing tag or fence among them counts as written.
    """
    try:
        if not _asks_for_thought(spec):
            thought = thought_of(text)
            if thought.is_open:
                return Parsed(reason="<think> is never closed: there is no answer")
            text = thought.answer
        value = _FORMATS[type(spec)](spec, text, choices, stop)
        problem = unwritable(value)
        return Parsed(reason=f"the value {problem}") if problem else Parsed(value)
    except _Malformed as problem:
        return Parsed(reason=str(problem))
    except RecursionError:
        return Parsed(reason="nested too deeply")


def _asks_for_thought(spec: Reply) -> bool:
    """Whether the thinking is part of what the reply is read for."""
    return "think" in fields_of(spec) or (isinstance(spec, RegexReply) and "think>" in spec.regex)


def _text(spec: TextReply, text: str, choices: object, stop: Sequence[str]) -> dict[str, Any]:
    stripped = text.strip()
    if not stripped:
        raise _Malformed("the reply is empty")
    return {"text": stripped}


def _between(text: str, tag: str, stop: Sequence[str]) -> str | None:
    """Inside of the last `<tag>…</tag>`; None when it was never opened."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening)
    if start < 0:
        return None
    start += len(opening)
    end = text.find(closing, start)
    if end >= 0:
        return text[start:end].strip()
    if closing in stop:
        return text[start:].strip()
    raise _Malformed(f"{opening} is never closed")


def _tag(spec: TagReply, text: str, choices: object, stop: Sequence[str]) -> dict[str, Any]:
    inside = _between(text, spec.tag, stop)
    if inside is None:
        raise _Malformed(f"no <{spec.tag}>…</{spec.tag}>")
    return {spec.tag: inside}


def _tags(spec: TagsReply, text: str, choices: object, stop: Sequence[str]) -> dict[str, Any]:
    value = {}
    for name, type_ in spec.tags.items():
        inside = _between(text, name, stop)
        if inside is None and not type_.nullable:
            raise _Malformed(f"no <{name}>…</{name}>")
        value[name] = None if inside is None else from_text(inside, type_, name)
    return value


def from_text(text: str, type_: Type, name: str) -> Any:
    """The value of a type that a text spells; text stays text (`007` is no number where a `str` is asked
    for)."""
    kind, text = type_.kind, text.strip()
    if type_.nullable and (not text or (kind not in ("str", "any") and text.lower() in ("null", "none"))):
        return None
    if kind in ("str", "any"):
        return text
    if kind == "choice":
        return _chosen(text, type_.choices, name)
    if kind == "int" and re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        return int(text)
    if kind == "float" and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    if kind == "bool" and text.lower() in ("true", "false", "yes", "no"):
        return text.lower() in ("true", "yes")
    if kind in ("list", "record"):
        return _typed(_loads(text, name), type_, name)
    raise _Malformed(f"{name}: expected {type_}, got {_short(text)}")


def _chosen(text: str, choices: Sequence[object], name: str) -> str:
    words = [str(choice) for choice in choices]
    found = [word for word in words if word == text] or [
        word for word in words if word.casefold() == text.casefold()
    ]
    if not found:
        raise _Malformed(f"{name}: expected one of {', '.join(words)}, got {_short(text)}")
    return found[0]


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")


def _loads(text: str, name: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise _Malformed(f"{name}: not JSON ({error})") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} isn't JSON")


def _typed(value: Any, type_: Type, name: str) -> Any:
    """`value` with the declared fields only, absent nullable ones as null; numbers and words as their type
    has them."""
    if value is None and type_.nullable:
        return None
    if type_.kind == "record" and isinstance(value, dict):
        return {
            key: _typed(value.get(key), inner, f"{name}.{key}" if name else key)
            for key, inner in type_.fields
        }
    if type_.kind == "list" and isinstance(value, list):
        assert type_.item is not None
        return [_typed(item, type_.item, f"{name}[{i}]") for i, item in enumerate(value)]
    if type_.kind == "choice" and isinstance(value, (str, int, float)):
        return _chosen(str(value), type_.choices, name)
    if type_.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 2**1000 else value
    problem = mismatch(value, type_, name)
    if problem:
        raise _Malformed(problem)
    return value


def _json(spec: JsonReply, text: str, choices: object, stop: Sequence[str]) -> dict[str, Any]:
    value = find_object(text)
    if spec.fields is not None:
        return _typed(value, Type("record", fields=tuple(spec.fields.items())), "")
    problem = _schema_problem(value, spec.json_schema or {})
    if problem:
        raise _Malformed(problem)
    return value


def find_object(text: str) -> dict[str, Any]:
    """The first JSON object in a text: the whole text, a fenced block, or an object inside prose."""
    stripped = text.strip()
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    reason, start = "no JSON object", -1
    for _ in range(MAX_BRACES):
        start = stripped.find("{", start + 1)
        if start < 0:
            break
        try:
            value, _ = decoder.raw_decode(stripped, start)
        except ValueError as error:
            reason = f"not JSON ({error})" if reason == "no JSON object" else reason
            continue
        if isinstance(value, dict):
            return value
    raise _Malformed(reason)


def _schema_problem(value: Any, schema: dict[str, Any]) -> str | None:
    from jsonschema.exceptions import best_match
    from referencing import Registry

    with boundary("JSON Schema of the reply") as caught:
        error = best_match(_validator()(schema, registry=Registry()).iter_errors(value))
        return None if error is None else f"{error.json_path}: {error.message[:200]}"
    return caught.error


@cache
def _validator() -> Any:
    """The validator of JSON Schema whose patterns have a time limit."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def pattern(validator: Any, wanted: str, value: Any, schema: Any) -> Iterator[Any]:
        if isinstance(value, str) and not _search(wanted, value):
            yield ValidationError(f"{value!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: dict[str, Any], value: Any, schema: Any) -> Iterator[Any]:
        for name, inner in wanted.items() if isinstance(value, dict) else ():
            for key in [key for key in value if _search(name, key)]:
                yield from validator.descend(value[key], inner, path=key, schema_path=name)

    return extend(Draft202012Validator, {"pattern": pattern, "patternProperties": pattern_properties})


def _choice(
    spec: ChoiceReply, text: str, choices: Sequence[object] | None, stop: Sequence[str]
) -> dict[str, Any]:
    words = choices if choices is not None else spec.choice
    if isinstance(words, str):
        raise _Malformed(f"the choices {words!r} were not worked out")
    return {"choice": _chosen(text.strip(), words, "choice")}


def _regex(spec: RegexReply, text: str, choices: object, stop: Sequence[str]) -> dict[str, Any]:
    match = _search(spec.regex, text)
    if match is None:
        raise _Malformed(f"the pattern {_short(spec.regex)} isn't found")
    return match.groupdict()


def _search(pattern: str, text: str) -> Any:
    try:
        return patterns.search(pattern, text)
    except TimeoutError:
        message = f"the pattern {_short(pattern)} took more than {patterns.LIMIT_S:g} s on this text"
        raise _Malformed(message) from None


def _code(spec: CodeReply, text: str, choices: object, stop: Sequence[str]) -> dict[str, Any]:
    wanted, lines = _language(spec.code), text.replace("\r\n", "\n").split("\n")
    start = next((i for i, line in enumerate(lines) if _opens(line, wanted)), None)
    if start is None:
        raise _Malformed(f"no ```{spec.code} block")
    end = next((i for i in range(start + 1, len(lines)) if lines[i].strip() == "```"), None)
    if end is None and not any(s.strip() == "```" for s in stop):
        raise _Malformed(f"the ```{spec.code} block is never closed")
    return {"code": "\n".join(lines[start + 1 : end])}


def _opens(line: str, wanted: str) -> bool:
    stripped = line.strip()
    return stripped.startswith("```") and _language(stripped[3:].strip()) == wanted


def _language(name: str) -> str:
    word = name.lower().split(" ")[0]
    return ALIASES.get(word, word)


_FORMATS: dict[type, Callable[[Any, str, Any, Sequence[str]], dict[str, Any]]] = {
    TextReply: _text,
    TagReply: _tag,
    TagsReply: _tags,
    JsonReply: _json,
    ChoiceReply: _choice,
    RegexReply: _regex,
    CodeReply: _code,
}
