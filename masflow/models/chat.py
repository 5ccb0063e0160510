"""Messages to text: the base's chat template with what the mapping asks of it, or masflow's plain one.

What a template doesn't know is told by trying it once, and made up for by rule: a system message goes into
the first user message, and the result of a tool is told by the user. Knows no ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from masflow.compiler.chat import option_values, variables_of
from masflow.errors import RunError
from masflow.models.dialects import dialect_named
from masflow.spec.mapping import Chat
from masflow.trace import Message

__all__ = ["ChatText"]

_DATE = "26 Jul 2024"
"""What a template that writes a date is told, unless `chat.options` says otherwise: prompts know no clock."""
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a template's code may raise."""
_PROBE = "probe of a role"
_ASK, _ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}


class ChatText:
    """Renders conversations for one tokenizer.

    Without a chat template: contents joined by line breaks, each assistant's reply followed by the end token.
    """

    def __init__(self, tokenizer: Any, chat: Chat, dialect: str = "text", file: str = ""):
        """
        Args:
            chat: its `template` is the text of one.
            dialect: in which form tools are called.
            file: where the template's text came from, for messages.
        Raises:
            RunError: the template is broken, or doesn't know what it is asked.
        """
        self.tokenizer, self.dialect = tokenizer, dialect_named(dialect)
        if chat.template is not None:
            tokenizer.chat_template = chat.template
        self.has_template = tokenizer.chat_template is not None
        self.file = file or f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        self.options = option_values(chat)
        self.notes: tuple[str, ...] = ()
        """What is made up for, in words."""
        self.merges_system = self.tells_tools = False
        if self.has_template:
            self._check_options()
            self._try_roles()
        elif self.options:
            raise RunError(f"{self.file} doesn't exist, so nothing knows {', '.join(self.options)}")

    def render(self, messages: Sequence[Message], end_text: str, where: str = "") -> str:
        """The text that the model sees before it speaks.

        Args:
            end_text: what ends a reply where there is no template.
            where: whose turn it is, for messages.
        Raises:
            RunError: the template refuses the messages.
        """
        if not self.has_template:
            return self._plain(messages, end_text)
        tools = messages[0].tools if messages else ""
        try:
            return self._apply(self._chat(messages), json.loads(tools) if tools else ())
        except _FAULTS as error:
            raise self._refusal(error, " ".join(m.role for m in messages), where) from error

    def after_reply(self) -> str:
        """What the template writes behind a reply; empty without a template."""
        if not self.has_template:
            return ""
        try:
            text = self._apply([_ASK, {**_ANSWER, "content": _PROBE}], speaks=False)
        except _FAULTS as error:
            raise self._refusal(error, "user assistant", "") from error
        return text.rpartition(_PROBE)[2]

    # -- parts ------------------------------------------------------------------------------------

    def _apply(
        self, chat: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, speaks: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat,
            tools=list(tools) or None,
            add_generation_prompt=speaks,
            tokenize=False,
            **self.options,
        )

    def _plain(self, messages: Sequence[Message], end_text: str) -> str:
        parts = [self.tokenizer.bos_token or ""]
        parts += [f"{m.content}{end_text}" if m.role == "assistant" else f"{m.content}\n" for m in messages]
        return "".join(parts)

    def _chat(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        chat: list[dict[str, Any]] = []
        called: dict[str, Any] | None = None
        has_tools = bool(messages and messages[0].tools)
        for place, message in enumerate(messages):
            follows = messages[place + 1].role if place + 1 < len(messages) else ""
            if message.role == "assistant":
                called = self._called(message, place) if has_tools and follows == "tool" else None
                chat.append(called or {"role": "assistant", "content": message.content})
            elif message.role == "tool" and called is not None:
                call = called["tool_calls"][0]
                told = {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"]}
                chat.append({**told, "content": message.content})
            elif message.role == "tool" and self.tells_tools:
                chat.append({"role": "user", "content": message.content})
            elif self.merges_system and place == 1 and messages[0].role == "system":
                chat[0] = {"role": message.role, "content": f"{messages[0].content}\n\n{message.content}"}
            else:
                chat.append({"role": message.role, "content": message.content})
        if self.merges_system and len(messages) == 1 and messages[0].role == "system":
            chat[0]["role"] = "user"
        return chat

    def _called(self, message: Message, place: int) -> dict[str, Any] | None:
        """An assistant's message with its tool call apart; None where there is none to be read."""
        if not self.dialect.has(message.content):
            return None
        found = self.dialect.read(message.content, (self.closing,))
        if found.reason or not isinstance(found.arguments, dict):
            return None
        call = {
            "id": f"call{place:05d}",
            "type": "function",
            "function": {"name": found.name, "arguments": found.arguments},
        }
        return {"role": "assistant", "content": found.before.rstrip(), "tool_calls": [call]}

    @property
    def closing(self) -> str:
        """What may be missing at the end of a call, because it was the stop string."""
        return self.dialect.marks[-1] if self.dialect.marks else ""

    def _check_options(self) -> None:
        templates = self.tokenizer.chat_template
        texts = list(templates.values()) if isinstance(templates, dict) else [templates]
        try:
            names = frozenset().union(*(variables_of(text) for text in texts))
        except TemplateSyntaxError as error:
            raise RunError(f"{self.file}:{error.lineno}: {error.message}", "mend the template") from error
        unknown = [key for key in self.options if key not in names]
        if unknown:
            raise RunError(
                f"{self.file} doesn't know '{unknown[0]}'",
                "remove it from the model's `chat`, or write a template that knows it",
            )
        if "date_string" in names:
            self.options.setdefault("date_string", _DATE)
        elif "strftime_now" in names:
            self.notes += ("the chat template writes today's date: prompts differ from day to day",)

    def _try_roles(self) -> None:
        """Learn which roles the template knows."""
        try:
            self._apply([_ASK])
        except _FAULTS as error:
            raise self._refusal(error, "user", "") from error
        self.merges_system = not self._knows([{"role": "system", "content": _PROBE}, _ASK])
        if self.merges_system:
            self.notes += ("no system role in the chat template: its text goes into the first user message",)
        self.tells_tools = not self._knows([_ASK, _ANSWER, {"role": "tool", "content": _PROBE}])
        if self.tells_tools and self.dialect.name == "text":
            self.notes += ("no tool role in the chat template: what a tool gave is told by the user",)

    def _knows(self, chat: list[dict[str, Any]]) -> bool:
        try:
            return _PROBE in self._apply(chat)
        except _FAULTS:
            return False

    def _refusal(self, error: Exception, roles: str, where: str) -> RunError:
        line = _line_of(error)
        place = f"{self.file}:{line}" if line else self.file
        whose = f"node {where}: " if where else ""
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        message = f"{whose}{place} refuses the messages '{roles}': {said}"
        return RunError(
            message, "let user and assistant take turns, put the text into one prompt, or use another base"
        )


def _line_of(error: Exception) -> int:
    """The line of the template where an error arose, from 1; 0: unknown."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = trace.tb_lineno
        trace = trace.tb_next
    return getattr(error, "lineno", None) or line
