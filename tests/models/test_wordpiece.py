"""The tokenizer of small bases gives back what it was given, and spells what it doesn't know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from masflow.errors import RunError
from masflow.models.wordpiece import make_wordpiece, read_texts
from masflow.spec.mapping import Wordpiece


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "red green",
        "the zorb of blue",
        "<answer>red sky</answer>",
        'say: {"a": [1, "red"]}',
        "red\ngreen\n\nblue",
        "3.14 a-b",
        "sea\n",
    ],
)
def test_text_survives(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=True) == text


def test_a_known_word_is_one_token_and_an_unknown_one_is_spelled(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(_ids(tokenizer, "Green xyz")) == ["green", "x", "##y", "##z"]


def test_an_unseen_character_is_unknown(tokenizer: Any) -> None:
    assert tokenizer.unk_token_id in _ids(tokenizer, "日本")


@given(
    st.lists(
        st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789.,:;<>/{}\"'", min_size=1, max_size=9),
        max_size=6,
    )
)
def test_any_ascii_words_survive(tokenizer: Any, words: list[str]) -> None:
    text = " ".join(words)
    assert tokenizer.decode(_ids(tokenizer, text), skip_special_tokens=True) == text


def test_size_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"text": "often often rare"}))
    whole = make_wordpiece(Wordpiece(files=("t",)), [file])
    small = make_wordpiece(Wordpiece(files=("t",), size=len(whole) - 1), [file])
    assert len(_ids(small, "often")) == 1 and len(_ids(small, "rare")) == 4


def test_a_line_without_text_names_its_place(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"text": "a"}\n{"words": "b"}\n')
    with pytest.raises(RunError, match=r"t\.jsonl:2: no `text`"):
        read_texts([file])
    with pytest.raises(RunError, match="missing"):
        read_texts([tmp_path / "absent.jsonl"])
