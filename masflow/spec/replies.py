"""What a role answers with, and how the text of a reply becomes a value (the formats of the workflow language)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from masflow.spec.base import JsonValue, Spec
from masflow.spec.types import TypeField

FORMATS = ("text", "tag", "tags", "json", "choice", "regex", "code")


class Retry(Spec):
    """Ask again up to `retry` times after a malformed reply; every attempt is a turn."""

    retry: int = Field(ge=1, le=16)


class ReplyBase(Spec):
    max_tokens: int = Field(256, ge=1)
    """Generation budget of one turn, in tokens."""
    on_malformed: Literal["end", "continue"] | Retry | None = None
    """Default: `end`; inside `foreach` and `copies`: `continue`."""
    default: JsonValue | None = None
    """The value after a malformed reply with `continue`; otherwise its fields are null."""


class TextReply(ReplyBase):
    """The whole text, stripped, as `.text`; never malformed unless empty."""

    format: Literal["text"] = "text"


class TagReply(ReplyBase):
    """The text between `<tag>` and `</tag>`; anything else is malformed."""

    format: Literal["tag"] = "tag"
    tag: str


class TagsReply(ReplyBase):
    """Several tags, each with a type."""

    format: Literal["tags"] = "tags"
    tags: dict[str, TypeField]


class JsonReply(ReplyBase):
    """A JSON object with typed fields, or one that fits a JSON Schema."""

    format: Literal["json"] = "json"
    fields: dict[str, TypeField] | None = None
    json_schema: dict[str, Any] | None = None


class ChoiceReply(ReplyBase):
    """One of a list of words, or of the list that an expression gives."""

    format: Literal["choice"] = "choice"
    choice: tuple[str, ...] | str


class RegexReply(ReplyBase):
    """The named groups of a pattern."""

    format: Literal["regex"] = "regex"
    regex: str


class CodeReply(ReplyBase):
    """The first fenced block in a language, as `.code`."""

    format: Literal["code"] = "code"
    code: str


def _reply_format(raw: object) -> str | None:
    return raw.get("format") if isinstance(raw, dict) else getattr(raw, "format", None)


Reply = Annotated[
    Annotated[TextReply, Tag("text")]
    | Annotated[TagReply, Tag("tag")]
    | Annotated[TagsReply, Tag("tags")]
    | Annotated[JsonReply, Tag("json")]
    | Annotated[ChoiceReply, Tag("choice")]
    | Annotated[RegexReply, Tag("regex")]
    | Annotated[CodeReply, Tag("code")],
    Discriminator(_reply_format),
]
"""A reply spec. `normalise_reply` turns the YAML shorthand into this long form first."""


def normalise_reply(raw: object) -> object:
    """`text` → {format: text}; {tag: answer, …} → {format: tag, tag: answer, …}; {json: {…}} → fields or schema.

    Raises:
        ValueError: no format, or several, with the known ones.
    """
    if isinstance(raw, str):
        raw = {raw: None} if raw in FORMATS else {"format": raw}
    if not isinstance(raw, dict):
        return raw
    if "format" in raw:
        if raw["format"] not in FORMATS:
            raise ValueError(f"unknown reply format {raw['format']!r}; known: {', '.join(FORMATS)}")
        return raw
    found = [key for key in raw if key in FORMATS]
    if len(found) != 1:
        raise ValueError(f"a reply has exactly one format of {', '.join(FORMATS)}; got {', '.join(map(str, raw)) or 'none'}")
    name = found[0]
    long = {"format": name, **{k: v for k, v in raw.items() if k not in ("text", "json")}}
    if name == "json":
        is_schema = isinstance(raw["json"], dict) and ("$schema" in raw["json"] or raw["json"].get("type") == "object")
        long["json_schema" if is_schema else "fields"] = raw["json"]
    return long


class HasReply(Spec):
    """Mixin for specs with a `reply` key in shorthand."""

    @model_validator(mode="before")
    @classmethod
    def _long_reply(cls, data: Any) -> Any:
        if isinstance(data, dict) and "reply" in data:
            return {**data, "reply": normalise_reply(data["reply"])}
        return data
