"""Messages to ids: one code path for demonstrations, episodes and evaluation.

A conversation continues with the exact ids of its earlier turns; only what was added is tokenised. Where the
chat template rewrites history (drops a thought, moves the system's text) the row forks: it is tokenised anew,
and counted. White space, and the spelling of a tool call's JSON, are no rewriting: what was sampled stays.
Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from masflow.compiler.plan import ModelIR
from masflow.models.chat import ChatText
from masflow.models.dialects import THOUGHT
from masflow.models.experience import Row
from masflow.spec.mapping import Chat
from masflow.trace import Message

__all__ = ["ChatTokens", "Prompt"]


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt. `prefix` ids are the parent's; `forked`: a parent was there but didn't fit."""

    ids: tuple[int, ...]
    text: str
    prefix: int = 0
    forked: bool = False


class ChatTokens:
    """Tokenises prompts and replies of one tokenizer.

    A reply ends with one of `stop_ids`: those of the base, the token that the template writes behind a reply,
    and those that end a tool call. Its text keeps the marks of a tool call, special tokens or not.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        chat: Chat | None = None,
        dialect: str = "text",
        file: str = "",
    ):
        """
        Args:
            stop_ids: of the base, at least one.
            chat, dialect, file: as of `ChatText`.
        Raises:
            RunError: as `ChatText`.
        """
        self.tokenizer = tokenizer
        self.chat = ChatText(tokenizer, chat or Chat(), dialect, file)
        self.end_id = next(iter(stop_ids)) if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
        turn_end = self._special_at_start(self.chat.after_reply())
        self.end_id = self.end_id if turn_end is None else turn_end
        ends = (self._special(text) for text in self.chat.dialect.ends)
        self.stop_ids = frozenset([*stop_ids, self.end_id, *(i for i in ends if i is not None)])
        texts = {self._text_of(i) for i in self.stop_ids}
        self._stop_texts = sorted((t for t in texts if t), key=lambda t: (-len(t), t))
        self._end_text = self._text_of(self.end_id)
        self._silent = self._silent_ids()
        self._known: dict[str, tuple[int, ...]] = {}
        self._ends: dict[str, dict[int, bool]] = {}
        """Last character of a stop string → token → whether it may stand in what the token says."""

    @classmethod
    def of(cls, model: ModelIR, tokenizer: Any, stop_ids: Sequence[int]) -> ChatTokens:
        """Those of a model of the plan."""
        return cls(tokenizer, stop_ids, model.chat, model.dialect, model.template_file)

    def prompt(self, messages: Sequence[Message], parent: Row | None = None, where: str = "") -> Prompt:
        """The ids that the model sees before it speaks.

        Args:
            parent: the row that this conversation continues.
            where: the node whose turn it is, for messages.
        Raises:
            RunError: the chat template refuses the messages.
        """
        text = self.chat.render(messages, self._end_text, where)
        if parent is None:
            return Prompt(self._encode_cached(text), text)
        added = self._added_text(text, messages, parent)
        if added is None:
            return Prompt(self._encode_cached(text), text, forked=True)
        before = parent.prompt_ids + parent.reply_ids
        return Prompt(before + self._encode_after(added), text, prefix=len(before))

    def reply(self, text: str) -> tuple[int, ...]:
        """The ids of a demonstrated reply, with the token that ends it."""
        return (*self._encode(text), self.end_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of reply ids, without special tokens that don't belong to it."""
        if self._silent is not None:
            ids = [i for i in ids if i not in self._silent]
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=self._silent is None, clean_up_tokenization_spaces=False
        )

    def may_end(self, token: int, text: str) -> bool:
        """Whether a text may end within what a token stands for: no only where that is sure.

        A printable ASCII character is one byte, which stands in the vocabulary as itself, or as `<0x..>`.
        """
        last = text[-1:]
        if not ("!" <= last <= "~"):
            return True
        known = self._ends.setdefault(last, {})
        found = known.get(token)
        if found is None:
            piece = self.tokenizer.convert_ids_to_tokens(token)
            found = known[token] = piece is None or last in piece or piece.startswith("<0x")
        return found

    # -- continuing -------------------------------------------------------------------------------

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
        end = self._end_of_reply(rest, parent.text)
        if end is None:
            return None
        rest = rest[end:]
        if parent.reply_ids and parent.reply_ids[-1] in self.stop_ids:
            ended = next((stop for stop in self._stop_texts if rest.startswith(stop)), "")
            return rest.removeprefix(ended)
        return rest

    def _end_of_reply(self, rest: str, spoken: str) -> int | None:
        """Where in the rendered rest the reply ends that was `spoken`; None: something else stands there.

        A tool call is written anew, also the closing mark that was its stop string; other words as they are.
        """
        dialect = self.chat.dialect
        rewrites = dialect.name != "text" and dialect.has(spoken)
        for words in () if rewrites else (spoken, spoken.strip()):
            if rest.startswith(words):
                return len(words)
        ends = [place for stop in self._stop_texts if (place := rest.find(stop)) >= 0]
        return min(ends) if ends and self._is_same(rest[: min(ends)], spoken) else None

    def _is_same(self, written: str, spoken: str) -> bool:
        """Whether the template wrote what was spoken, up to white space and the spelling of a tool call."""
        if "".join(written.split()) == "".join(spoken.split()):
            return True
        dialect, closing = self.chat.dialect, (self.chat.closing,)
        if dialect.name == "text" or not (dialect.has(written) and dialect.has(spoken)):
            return False
        ours, theirs = dialect.read(spoken, closing), dialect.read(written, closing)
        if ours.reason or theirs.reason or ours.before.split() != theirs.before.split():
            return False
        return (ours.name, ours.arguments) == (theirs.name, theirs.arguments)

    # -- ids --------------------------------------------------------------------------------------

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

    def _encode_after(self, text: str) -> tuple[int, ...]:
        """Ids of a text that stands behind a reply, not at a beginning, where some tokenizers add a space."""
        ids = self._encode(self._end_text + text)
        return ids[1:] if ids[:1] == (self.end_id,) else self._encode(text)

    def _special(self, text: str) -> int | None:
        """The id of a special token."""
        token = self.tokenizer.get_added_vocab().get(text)
        return None if token is None else int(token)

    def _special_at_start(self, text: str) -> int | None:
        """The id of the special token with which a text begins, white space aside."""
        ids = self._encode(text.strip())[:1]
        specials = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return ids[0] if ids and ids[0] in specials else None

    def _text_of(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def _silent_ids(self) -> frozenset[int] | None:
        """Special tokens that a reply's text leaves out; None: all of them."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        kept = special.intersection(self._special(mark) for mark in (*THOUGHT, *self.chat.dialect.marks))
        return frozenset(special - kept) if kept else None
