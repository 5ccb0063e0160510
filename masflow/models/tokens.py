"""Messages to ids: one code path for demonstrations, episodes and evaluation.

A conversation continues with the exact ids of its earlier turns; only what was added is tokenised. Where the
chat template rewrites history the row forks: it is tokenised anew, and counted. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from masflow.errors import RunError
from masflow.models.experience import Row
from masflow.trace import Message

__all__ = ["ChatTokens", "Prompt"]

_ROLES = "some templates know no system role: put its text into the prompt, or use another base"


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt. `prefix` ids are the parent's; `forked`: a parent was there but didn't fit."""

    ids: tuple[int, ...]
    text: str
    prefix: int = 0
    forked: bool = False


class ChatTokens:
    """Tokenises prompts and replies of one tokenizer.

    Without a chat template: contents joined by line breaks, each assistant's reply followed by the end token.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.end_id = next(iter(stop_ids)) if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
        self._end_text: str = tokenizer.decode([self.end_id], skip_special_tokens=False)
        self._known: dict[str, tuple[int, ...]] = {}

    def prompt(self, messages: Sequence[Message], parent: Row | None = None) -> Prompt:
        """The ids that the model sees before it speaks.

        Args:
            parent: the row that this conversation continues.
        """
        text = self._render(messages)
        if parent is None:
            return Prompt(self._encode_cached(text), text)
        added = self._added_text(text, messages, parent)
        if added is None:
            return Prompt(self._encode_cached(text), text, forked=True)
        before = parent.prompt_ids + parent.reply_ids
        return Prompt(before + self._encode(added), text, prefix=len(before))

    def reply(self, text: str) -> tuple[int, ...]:
        """The ids of a demonstrated reply, with the token that ends it."""
        return (*self._encode(text), self.end_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of reply ids, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    # -- parts ------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message]) -> str:
        if self.tokenizer.chat_template is None:
            return self._plain(messages)
        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            roles = " ".join(m.role for m in messages)
            message = f"the base's chat template refuses the messages '{roles}': {error}"
            raise RunError(message, _ROLES) from error

    def _plain(self, messages: Sequence[Message]) -> str:
        parts = [self.tokenizer.bos_token or ""]
        parts += [
            f"{m.content}{self._end_text}" if m.role == "assistant" else f"{m.content}\n" for m in messages
        ]
        return "".join(parts)

    def _added_text(self, text: str, messages: Sequence[Message], parent: Row) -> str | None:
        """What `text` adds after the parent's prompt and reply; None when the template rewrote either."""
        said = next((m for m in reversed(messages) if m.role == "assistant"), None)
        if (
            said is None
            or said.turn_id not in (None, parent.turn_id)
            or not text.startswith(parent.prompt_text)
        ):
            return None
        rest = text[len(parent.prompt_text) :]
        for spoken in (parent.text, parent.text.strip()):
            if rest.startswith(spoken):
                rest = rest[len(spoken) :]
                break
        else:
            return None
        last = parent.reply_ids[-1] if parent.reply_ids else None
        ended = self.tokenizer.decode([last], skip_special_tokens=False) if last in self.stop_ids else ""
        return rest.removeprefix(ended)

    def _encode_cached(self, text: str) -> tuple[int, ...]:
        """As `_encode`; the samples of a group have equal prompts."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) > 4096:
                self._known.clear()
            found = self._known[text] = self._encode(text)
        return found

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
