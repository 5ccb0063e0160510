"""When a stop string is complete: the quick look at the last token misses none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from masflow.models.drawn import is_stopped
from masflow.models.tokens import ChatTokens

TEXT = "<answer>blue</answer> the sky is blue.\n\nüber é → call: {red}, 'green'; 1 + 1 = 2\n" * 3


def _bytes() -> Any:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<end>"])
    inner.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def _fallback() -> Any:
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    vocab += [(f"▁{word}", -3.0) for word in ("blue", "</", "answer", "red")] + [
        ("answer>", -3.0),
        (">", -3.0),
    ]
    inner = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


@pytest.mark.parametrize("kind", ["words", "bytes", "fallback"])
def test_the_quick_look_misses_no_stop_string(kind: str, tokenizer: Any) -> None:
    made = {"words": lambda: tokenizer, "bytes": _bytes, "fallback": _fallback}[kind]()
    made.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokens = ChatTokens(made, [made.eos_token_id])
    rng = np.random.default_rng(0)
    stops = [("</answer>",), (">", "e"), ("\n",), ("é",), ("red", "}"), ("blue", "2"), ("answer:", "sky g")]
    seen = 0
    for n in range(600):
        wanted = stops[n % len(stops)]
        ids: list[int] = rng.integers(0, len(made), size=3).tolist()
        if kind != "words" and n % 3 == 0:
            ids = made(TEXT[int(rng.integers(40)) :][:30])["input_ids"]
        for end in range(1, len(ids) + 1):
            is_there = any(stop in tokens.decode(ids[:end]) for stop in wanted)
            assert is_stopped(ids[:end], wanted, tokens) == is_there
            seen += is_there
            if is_there:
                break
    assert seen > 20
