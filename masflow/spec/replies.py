"""What a role answers with: the reply formats of the workflow language."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from masflow.errors import closest
from masflow.spec import patterns
from masflow.spec.base import NAME, Fault, JsonValue, Spec, by_shape, unknown_word
from masflow.spec.types import Type, TypeField, word_text

FORMATS = ("text", "tag", "tags", "json", "choice", "regex", "code")
COMMON = ("max_tokens", "on_malformed", "default")
"""Keys of every reply."""


class Retry(Spec):
    """Ask again up to `retry` times after a malformed reply; every attempt is a turn."""

    retry: int = Field(ge=1, le=16)


OnMalformed = Annotated[
    Annotated[Literal["end", "continue"], Tag("<word>")] | Annotated[Retry, Tag("<retry>")],
    Discriminator(by_shape("<retry>", "<word>")),
]


class ReplyBase(Spec):
    hints: ClassVar[dict[str, str]] = {"retry": "on_malformed: {retry: 2}"}

    max_tokens: int = Field(default=256, ge=1)
    """Generation budget of one turn, in tokens."""
    on_malformed: OnMalformed | None = None
    """Default: `end`; inside `foreach` and `copies`: `continue`."""
    default: JsonValue | None = None
    """The value after a malformed reply with `continue`; otherwise its fields are null."""


def _tag_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w-]*", value):
        message = f"'{value}' can't be a tag"
        raise Fault(message, code="bad-name", fix="write a word without < >, such as 'answer'")
    return value


TagName = Annotated[str, AfterValidator(_tag_name)]


def _some_fields(fields: dict[str, Type]) -> dict[str, Type]:
    if not fields:
        raise Fault("no field is named", code="bad-reply", fix="name a field: {answer: str}")
    for name in fields:
        if not NAME.match(name):
            raise Fault(
                f"field '{name}' isn't an identifier",
                code="bad-name",
                fix="use letters, digits and _",
                path=(name,),
            )
    return fields


def _tags(tags: dict[str, Type]) -> dict[str, Type]:
    return _some_fields(tags)


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        path = tuple(error.absolute_path)
        raise Fault(
            f"not a JSON Schema: {error.message}", code="bad-schema", fix="correct the schema", path=path
        ) from None
    for path, reference in _references(schema):
        if not reference.startswith("#"):
            message = f"the schema refers to '{reference}', which isn't in it"
            fix = "write that part under $defs, and '#/$defs/NAME'"
            raise Fault(message, code="bad-schema", fix=fix, path=path)
    return schema


def _references(schema: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """(path, text) of every `$ref` in a schema."""
    items = schema.items() if isinstance(schema, dict) else enumerate(schema)
    for key, inside in items:
        if key in ("$ref", "$dynamicRef") and isinstance(inside, str):
            yield (*path, key), inside
        elif isinstance(inside, (dict, list)):
            yield from _references(inside, (*path, key))


def _choice(value: object) -> object:
    if isinstance(value, str):
        if not re.fullmatch(r"\s*\{\{.*\}\}\s*", value, re.S):
            fix = f'write [{value}, …], or a "{{{{ }}}}" that gives a list'
            raise Fault(f"'choice' is a list of words; got '{value}'", code="bad-reply", fix=fix)
        return value
    if (
        not isinstance(value, (list, tuple))
        or not value
        or any(isinstance(v, (dict, list)) or v is None for v in value)
    ):
        raise Fault(f"'choice' is a list of words; got {value!r}", code="bad-reply", fix="write [yes, no]")
    words = tuple(word_text(word) for word in value)
    counts = Counter(words)
    twice = next((word for word in words if counts[word] > 1), None)
    if twice is not None:
        raise Fault(f"the choice has '{twice}' twice", code="duplicate-choice", fix=f"write '{twice}' once")
    return words


def _pattern(value: str) -> str:
    try:
        pattern = patterns.compiled(value)
    except patterns.BadPattern as error:
        raise Fault(
            f"not a pattern: {error}", code="bad-regex", fix="correct the regular expression"
        ) from None
    if not pattern.groupindex:
        message = "the pattern has no named group, so the reply would have no field"
        raise Fault(message, code="bad-regex", fix="name what you want: (?P<answer>…)")
    return value


class TextReply(ReplyBase):
    """The whole text, stripped, as `.text`; never malformed unless empty."""

    format: Literal["text"] = "text"


class TagReply(ReplyBase):
    """The text between `<tag>` and `</tag>`; anything else is malformed."""

    format: Literal["tag"] = "tag"
    tag: TagName


class TagsReply(ReplyBase):
    """Several tags, each with a type."""

    format: Literal["tags"] = "tags"
    tags: Annotated[dict[str, TypeField], AfterValidator(_tags)]


class JsonReply(ReplyBase):
    """A JSON object with typed fields, or one that fits a JSON Schema."""

    format: Literal["json"] = "json"
    fields: Annotated[dict[str, TypeField], AfterValidator(_some_fields)] | None = None
    json_schema: Annotated[dict[str, Any], AfterValidator(_schema)] | None = None


class ChoiceReply(ReplyBase):
    """One of a list of words, or of the list that an expression gives."""

    format: Literal["choice"] = "choice"
    choice: Annotated[tuple[str, ...] | str, BeforeValidator(_choice)]


class RegexReply(ReplyBase):
    """The named groups of a pattern."""

    format: Literal["regex"] = "regex"
    regex: Annotated[str, AfterValidator(_pattern)]


class CodeReply(ReplyBase):
    """The first fenced block in a language (any, when left out), as `.code`."""

    format: Literal["code"] = "code"
    code: str = ""


def normalise_reply(raw: object) -> object:
    """`text` → {format: text}; {tag: answer} → {format: tag, tag: answer}; {json: {…}} → fields or schema.

    Without a format it is text.

    Raises:
        Fault: an unknown format, or several, with the known ones.
    """
    if isinstance(raw, ReplyBase):
        return raw
    if isinstance(raw, str):
        if raw not in FORMATS:
            raise unknown_word("reply format", raw, FORMATS)
        raw = {raw: None}
    if not isinstance(raw, dict):
        raise Fault(
            f"a reply is a format or a mapping; got {raw!r}",
            code="bad-reply",
            fix="write text, or {tag: answer}",
        )
    if "format" in raw:
        if raw["format"] not in FORMATS:
            raise unknown_word("reply format", raw["format"], FORMATS, path=("format",))
        return raw
    found = [key for key in raw if key in FORMATS]
    if len(found) > 1:
        message = f"a reply has exactly one format of {', '.join(FORMATS)}; got {', '.join(found)}"
        raise Fault(
            message,
            code="bad-reply",
            fix=f"keep '{found[0]}'; several values in one reply are 'tags' or 'json'",
        )
    if not found and (fault := _misspelt(raw)):
        raise fault
    return _long(found[0] if found else "text", {"text": None, **raw})


def _misspelt(raw: dict[Any, Any]) -> Fault | None:
    """The fault of a reply without a format that has a key which is neither a format nor common to all."""
    odd = next((key for key in raw if key not in COMMON), None)
    if odd is None:
        return None
    if odd in ReplyBase.hints:
        fix = f"write '{ReplyBase.hints[odd]}'"
        return Fault(f"unknown key '{odd}'", code="unknown-key", fix=fix, path=(odd,))
    if closest(str(odd), COMMON):
        return unknown_word("key", odd, (*FORMATS, *COMMON), path=(odd,))
    return unknown_word("reply format", odd, FORMATS, path=(odd,))


def _long(name: str, raw: dict[Any, Any]) -> dict[Any, Any]:
    if raw[name] is None and name not in ("text", "code"):
        example = {"tags": "{score: int}", "json": "{answer: str}", "choice": "[yes, no]"}.get(name, "answer")
        fix = f"write {{{name}: {example}}}"
        raise Fault(f"reply format '{name}' needs a value", code="bad-reply", fix=fix, path=(name,))
    if name == "text" and raw[name] is not None:
        raise Fault(
            "reply format 'text' takes no value", code="bad-reply", fix="write 'reply: text'", path=(name,)
        )
    long = {"format": name, **{k: v for k, v in raw.items() if k not in ("text", "json")}}
    if name == "code" and raw[name] is None:
        long["code"] = ""
    if name == "json":
        is_schema = isinstance(raw["json"], dict) and (
            "$schema" in raw["json"] or raw["json"].get("type") == "object"
        )
        long["json_schema" if is_schema else "fields"] = raw["json"]
    return long


def _reply_format(raw: object) -> str | None:
    name = raw.get("format") if isinstance(raw, dict) else getattr(raw, "format", None)
    return f"<{name}>"


Reply = Annotated[
    Annotated[TextReply, Tag("<text>")]
    | Annotated[TagReply, Tag("<tag>")]
    | Annotated[TagsReply, Tag("<tags>")]
    | Annotated[JsonReply, Tag("<json>")]
    | Annotated[ChoiceReply, Tag("<choice>")]
    | Annotated[RegexReply, Tag("<regex>")]
    | Annotated[CodeReply, Tag("<code>")],
    Discriminator(_reply_format),
    BeforeValidator(normalise_reply),
]
"""A reply spec. `normalise_reply` turns the YAML shorthand into this long form first."""


def fields_of(reply: Reply) -> tuple[str, ...]:
    """Names of the fields that a well-formed reply's value has."""
    if isinstance(reply, TagsReply):
        return tuple(reply.tags)
    if isinstance(reply, JsonReply):
        return tuple(reply.fields or (reply.json_schema or {}).get("properties", {}))
    if isinstance(reply, RegexReply):
        return tuple(patterns.groups(reply.regex))
    return (reply.tag,) if isinstance(reply, TagReply) else (reply.format,)


def needed_fields(reply: Reply) -> tuple[str, ...]:
    """Those of its fields that may not be left out."""
    if isinstance(reply, JsonReply) and reply.fields is None:
        return tuple((reply.json_schema or {}).get("required", ()))
    types = reply.tags if isinstance(reply, TagsReply) else getattr(reply, "fields", None) or {}
    return tuple(name for name in fields_of(reply) if name not in types or not types[name].nullable)


class HasReply(Spec):
    """Mixin for specs with a `reply` key, in shorthand or in full."""

    reply: Reply = TextReply()
