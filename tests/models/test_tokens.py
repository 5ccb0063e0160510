"""Conversations keep the ids that were sampled; a template that rewrites history forks, and is counted."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from masflow.errors import RunError
from masflow.models.experience import Row
from masflow.models.tokens import ChatTokens, Prompt
from masflow.spec.mapping import Chat
from masflow.trace import Message

APPENDS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}[EOS]\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REWRITES = APPENDS.replace(
    "{{ m.content }}", "{{ m.content.split('|')[-1] if m.role == 'assistant' else m.content }}"
)
"""Drops what an earlier reply holds before its bar, as templates drop reasoning."""
TRIMS = APPENDS.replace("{{ m.content }}", "{{ m.content | trim }}")


def _chat(tokenizer: Any, template: str | None) -> ChatTokens:
    own = deepcopy(tokenizer)
    own.chat_template = template
    return ChatTokens(own, (own.eos_token_id,))


def _row(chat: ChatTokens, prompt: Prompt, ids: tuple[int, ...], text: str) -> Row:
    return Row("t1", "m", prompt.ids, ids, (0.0,) * len(ids), 0, prompt.text, text)


def _spelled(chat: ChatTokens, word: str) -> tuple[int, ...]:
    """Ids of a word in a way that its tokenizer would never write it."""
    ids = chat.tokenizer.convert_tokens_to_ids([word[0], *(f"##{c}" for c in word[1:])])
    assert chat.decode(ids) == word and tuple(ids) != chat.reply(word)[:-1]
    return tuple(ids)


ASK = Message("user", "what is red")


def _after(text: str) -> tuple[Message, ...]:
    return (ASK, Message("assistant", text, "t1"), Message("user", "say blue"))


@pytest.mark.parametrize("template", [None, APPENDS, TRIMS])
def test_a_conversation_continues_with_the_sampled_ids(tokenizer: Any, template: str | None) -> None:
    # FIELD_PROBLEMS, Tokens: decoding and re-encoding drifts.
    chat = _chat(tokenizer, template)
    first = chat.prompt((ASK,))
    ids = (*_spelled(chat, "green"), chat.end_id)
    second = chat.prompt(_after("green"), _row(chat, first, ids, "green"))
    assert second.ids[: second.prefix] == first.ids + ids
    assert not second.forked
    assert second.ids != chat.prompt(_after("green")).ids
    # Only the spelling differs: the added ids are those of the whole text's end.
    added = second.ids[second.prefix :]
    assert chat.prompt(_after("green")).ids[-len(added) :] == added
    assert chat.tokenizer.decode(second.ids) == chat.tokenizer.decode(chat.prompt(_after("green")).ids)


@pytest.mark.parametrize("template", [None, APPENDS])
def test_a_reply_without_an_end_token_is_closed_once(tokenizer: Any, template: str | None) -> None:
    chat = _chat(tokenizer, template)
    first = chat.prompt((ASK,))
    cut = chat.prompt(_after("green"), _row(chat, first, chat.reply("green")[:-1], "green"))
    ended = chat.prompt(_after("green"), _row(chat, first, chat.reply("green"), "green"))
    assert cut.ids == ended.ids == chat.prompt(_after("green")).ids
    assert cut.prefix == ended.prefix - 1


def test_a_template_that_rewrites_history_forks(tokenizer: Any) -> None:
    # FIELD_PROBLEMS, Tokens: templates drop reasoning or tool calls from history.
    chat = _chat(tokenizer, REWRITES)
    first = chat.prompt((ASK,))
    text = "one two|green"
    second = chat.prompt(_after(text), _row(chat, first, chat.reply(text), text))
    assert second.forked and second.prefix == 0
    assert second.ids == chat.prompt(_after(text)).ids
    kept = chat.prompt(_after("green"), _row(chat, first, chat.reply("green"), "green"))
    assert not kept.forked


def test_a_history_that_the_workflow_changed_forks(tokenizer: Any) -> None:
    chat = _chat(tokenizer, APPENDS)
    first = chat.prompt((ASK,))
    assert chat.prompt(_after("blue"), _row(chat, first, chat.reply("green"), "green")).forked
    other = (Message("user", "what is sky"), *_after("green")[1:])
    assert chat.prompt(other, _row(chat, first, chat.reply("green"), "green")).forked


def test_a_stop_string_stays_in_the_ids_of_the_next_turn(tokenizer: Any) -> None:
    chat = _chat(tokenizer, None)
    first = chat.prompt((ASK,))
    ids = chat.reply("green say: blue")[:-1]
    second = chat.prompt(_after("green"), _row(chat, first, ids, "green"))
    assert second.ids[: second.prefix] == first.ids + ids and not second.forked


def test_a_template_without_a_system_role_tells_the_user(tokenizer: Any) -> None:
    chat = _chat(
        tokenizer, "{{ raise_exception('no system role') if messages[0].role == 'system' }}" + APPENDS
    )
    told = chat.prompt((Message("system", "say red"), ASK))
    assert told.text == "<|user|>\nsay red\n\nwhat is red[EOS]\n<|assistant|>\n"
    assert told.ids == chat.prompt((Message("user", "say red\n\nwhat is red"),)).ids
    [note] = chat.chat.notes
    assert note.startswith("no system role")


def test_a_template_that_refuses_an_order_of_roles_names_node_file_and_line(tokenizer: Any) -> None:
    refuses = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\n"
        "{{ raise_exception('take turns') }}{% endif %}{% endfor %}" + APPENDS
    )
    own = deepcopy(tokenizer)
    chat = ChatTokens(own, (own.eos_token_id,), Chat(template=refuses), file="own.jinja")
    with pytest.raises(RunError, match=r"node ask: own.jinja:2 refuses the messages 'user user': take turns"):
        chat.prompt((ASK, ASK), where="ask")


def test_the_plain_template_joins_lines_and_ends_replies(tokenizer: Any) -> None:
    chat = _chat(tokenizer, None)
    tokens = chat.tokenizer.convert_ids_to_tokens(
        chat.prompt((Message("system", "say red"), *_after("green"))).ids
    )
    assert tokens == [
        "[BOS]", "say", "red", "\n", "what", "is", "red", "\n", "green", "[EOS]", "say", "blue", "\n",
    ]  # fmt: skip
    assert chat.tokenizer.convert_ids_to_tokens(chat.reply("green sea")) == ["green", "sea", "[EOS]"]
