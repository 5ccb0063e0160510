"""Makes a WordPiece tokenizer: whole words, and single characters so that unseen words can be copied.

A piece that begins a word implies a blank before it; pieces that continue one carry `##`; line breaks are
pieces of their own. So decoding gives back the lower-cased text, up to runs of blanks.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from masflow.errors import RunError
from masflow.spec.mapping import Wordpiece

__all__ = ["make_wordpiece", "read_texts"]

PAD, EOS, UNK, BOS = "[PAD]", "[EOS]", "[UNK]", "[BOS]"
_PIECE = re.compile(r"\w+|[^\w\s]")


def make_wordpiece(spec: Wordpiece, files: Sequence[Path]) -> PreTrainedTokenizerFast:
    """The tokenizer of `spec`; the same files give the same ids.

    Raises:
        RunError: a file is missing, or one of its lines has no `text`.
    """
    vocabulary = _vocabulary(read_texts(files), spec)
    model = models.WordPiece(
        {piece: i for i, piece in enumerate(vocabulary)}, unk_token=UNK, max_input_chars_per_word=1000
    )
    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    blanks = pre_tokenizers.Split(Regex(r"[^\S\n]+"), behavior="removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [blanks, pre_tokenizers.Split("\n", behavior="isolated")]
    )
    joined = decoders.Replace(Regex(" ?\n ?"), "\n")
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), joined]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        bos_token=BOS,
        clean_up_tokenization_spaces=False,
    )


def read_texts(files: Iterable[Path]) -> list[str]:
    """The `text` of every line of JSON Lines files."""
    texts: list[str] = []
    for file in files:
        if not file.is_file():
            raise RunError(
                f"the tokenizer's text file {file} is missing",
                "write the path of a JSON Lines file with a key `text`",
            )
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                texts.append(_text_of(line, f"{file}:{number}"))
    return texts


def _text_of(line: str, place: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RunError(f"{place}: not JSON: {error}", 'write one object a line: {"text": "…"}') from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise RunError(f"{place}: no `text`", 'write one object a line: {"text": "…"}')
    return row["text"]


def _vocabulary(texts: Sequence[str], spec: Wordpiece) -> list[str]:
    """Special pieces, single characters (beginning and continuing a word), then words by frequency."""
    words: Counter[str] = Counter()
    characters = set(string.ascii_lowercase + string.digits + string.punctuation)
    for text in texts:
        for chunk in normalise(text).split():
            characters.update(chunk)
            pieces = _PIECE.findall(chunk) if spec.whole_words else []
            words.update(piece if i == 0 else f"##{piece}" for i, piece in enumerate(pieces))
    singles = [c for char in sorted(characters) for c in (char, f"##{char}")]
    known = {PAD, EOS, UNK, BOS, "\n", *singles}
    ranked = [w for w, _ in sorted(words.items(), key=lambda item: (-item[1], item[0])) if w not in known]
    fixed = [PAD, EOS, UNK, BOS, "\n", *singles]
    return fixed + (ranked if spec.size is None else ranked[: max(0, spec.size - len(fixed))])


def normalise(text: str) -> str:
    """As the tokenizer sees it: NFKC, lower case."""
    return normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]).normalize_str(text)
