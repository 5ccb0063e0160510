"""The chat of each model: its template is read where it can be, and what the mapping asks of it is checked.

Reads text alone: neither tokenizers nor the network are asked, so that a plan is the same on every machine.
What a hub id's template knows is seen when the model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from masflow.compiler.plan import ModelIR
from masflow.compiler.team import Speaker
from masflow.errors import Problem, SpecError
from masflow.project import Loaded, Source, display_path, resolve
from masflow.spec.mapping import Chat, ConfigBase
from masflow.spec.mapping import Mapping as MappingSpec

__all__ = ["dialect_of", "link_chats", "notes_of", "option_values", "template_of", "variables_of"]


class _Generation(Extension):
    """`{% generation %}` of training templates: its body stays."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PARSER = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
)


@lru_cache(maxsize=64)
def variables_of(template: str) -> frozenset[str]:
    """Names that a template reads from outside.

    Raises:
        TemplateSyntaxError: it isn't Jinja; `lineno` says where.
    """
    return frozenset(meta.find_undeclared_variables(_PARSER.parse(template)))


def dialect_of(template: str) -> str | None:
    """The form in which a template writes tool calls, told by its marks; None: it knows no tools, or a form
    that masflow can't read."""
    if "tools" not in variables_of(template) or "<function=" in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "smollm" if "<tool_call>[" in template else "hermes"
    return "llama" if '"parameters"' in template and "ipython" in template else None


def template_of(folder: Path) -> str | None:
    """The chat template of a model's folder, for tools where it has several; None where it has none."""
    for name in ("additional_chat_templates/tool_use.jinja", "chat_template.jinja"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("tool_use", named.get("default"))
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class _Place:
    """Where a model's chat is written."""

    source: Source
    model: str
    problems: list[Problem]

    def add(self, code: str, message: str, fix: str, *key: str) -> None:
        where = self.source.where("models", self.model, "chat", *key)
        self.problems.append(Problem.at(where, code, message, fix))


def link_chats(
    models: Iterable[ModelIR], mapping: Loaded[MappingSpec], team: Iterable[Speaker], problems: list[Problem]
) -> tuple[ModelIR, ...]:
    """Ensures: `chat.template` holds the template's text, and `dialect` says how tools are called."""
    callers = {m for s in team if s.role.tools or s.role.handoff for m in s.members}
    told: set[str] = set()
    found = []
    for model in models:
        name = model.where.path.removeprefix("models.") or model.name
        place = _Place(mapping.source, name, [] if name in told else problems)
        found.append(_linked(model, mapping, place, bool(callers.intersection(model.roles))))
        told.add(name)
    return tuple(found)


def _linked(model: ModelIR, mapping: Loaded[MappingSpec], place: _Place, calls: bool) -> ModelIR:
    if model.endpoint is not None:
        return model
    chat, file = _read(model.chat, mapping, place)
    template = chat.template
    if template is None and model.base is not None:
        folder = model.base.tokenizer if isinstance(model.base, ConfigBase) else model.base
        template = template_of(Path(folder)) if isinstance(folder, str) else None
        known = template is not None or not isinstance(folder, str) or Path(folder).is_dir()
    else:
        known = template is not None
    try:
        names = variables_of(template) if template is not None else frozenset()
    except TemplateSyntaxError:
        return model  # of the base's own: the tokenizer will say so
    if known:
        _options(chat, template is not None, names, place)
    dialect = _dialect(model, chat, template, known, calls, place)
    return replace(model, chat=chat, template_file=file, dialect=dialect)


def _read(chat: Chat, mapping: Loaded[MappingSpec], place: _Place) -> tuple[Chat, str]:
    """The chat with its template's text, and the template's file."""
    if chat.template is None:
        return chat, ""
    where = place.source.where("models", place.model, "chat", "template")
    try:
        path = resolve(chat.template, mapping.path, mapping.root, where, "chat template")
    except SpecError as error:
        place.problems.extend(error.problems)
        return chat.model_copy(update={"template": None}), ""
    try:
        text = path.read_text(encoding="utf-8")
        variables_of(text)
    except TemplateSyntaxError as error:
        file = display_path(path)
        fix = "mend the Jinja there"
        place.problems.append(Problem(file, error.lineno, "", "bad-chat-template", str(error.message), fix))
    except (OSError, ValueError) as error:
        place.add(
            "bad-chat-template", f"can't read '{chat.template}': {error}", "save it as UTF-8", "template"
        )
    else:
        return chat.model_copy(update={"template": text}), str(path)
    return chat.model_copy(update={"template": None}), ""


def _options(chat: Chat, has_template: bool, names: frozenset[str], place: _Place) -> None:
    """What the template would never look at."""
    what = "this base's chat template" if has_template else "this base has no chat template, which"
    if chat.thinking is not None and "enable_thinking" not in names:
        message = f"{what} doesn't know 'enable_thinking'"
        fix = "remove 'thinking', or write a 'template' that knows it"
        place.add("unknown-chat-option", message, fix, "thinking")
    for key in sorted(set(chat.options) - names):
        known = ", ".join(sorted(names - _OWN)) or "(none)"
        place.add(
            "unknown-chat-option",
            f"{what} doesn't know '{key}'; known: {known}",
            f"remove '{key}'",
            "options",
            key,
        )


_OWN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_OWN |= {"bos_token", "eos_token", "pad_token", "unk_token"}
"""What a template is given by others than the user."""


def _dialect(
    model: ModelIR, chat: Chat, template: str | None, known: bool, calls: bool, place: _Place
) -> str:
    if not calls or chat.tools == "text":
        return "text"
    found = dialect_of(template) if template is not None else None
    if chat.tools == "auto":
        return "text" if isinstance(model.base, ConfigBase) else found or "text"
    if found is not None:
        return found
    if not known:
        message = f"the chat template of '{model.base}' isn't known before it is loaded"
        fix = "name the base's folder, write its template as 'template', or leave tools in plain text"
    elif template is not None and "tools" in variables_of(template):
        message = "masflow can't read the tool calls of this chat template"
        fix = f"write 'tools: text'; read are {', '.join(_FORMS)}"
    else:
        message = "this base's chat template knows no tools" if template else "this base has no chat template"
        fix = "write 'tools: text', or a 'template' that describes tools"
    place.add("no-tool-template", message, fix, "tools")
    return "text"


_FORMS = (
    "Hermes' and Qwen's <tool_call>{…}</tool_call>",
    "SmolLM's <tool_call>[…]</tool_call>",
    "Llama 3's JSON",
    "Mistral's [TOOL_CALLS]",
)


def notes_of(model: ModelIR) -> Iterator[str]:
    """What a person should know of a model's chat, in words."""
    if model.chat.template is not None:
        yield f"chat template {display_path(Path(model.template_file))}"
    if model.chat.thinking is not None:
        yield "thinking on" if model.chat.thinking else "thinking off"
    if model.dialect != "text":
        yield f"tools by the chat template ({model.dialect})"


def option_values(chat: Chat) -> dict[str, Any]:
    """The variables that a template is given beside the messages."""
    thinking = {} if chat.thinking is None else {"enable_thinking": chat.thinking}
    return {**thinking, **chat.options}
