"""`bm25`: lexical search over a fixed corpus (Robertson and Zaragoza 2009, the Lucene variant of the idf).

An index is built once a process and shared by every tool with the same corpus and settings.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

import bm25s
import numpy as np

from masflow.errors import Problem, SpecError, Where
from masflow.spec.tools import Bm25Settings

__all__ = ["Index", "make", "read_corpus", "terms"]

_WORD = re.compile(r"\w+")


def terms(text: str) -> list[str]:
    """Lower-case words; letters and digits of any script, nothing left out."""
    return _WORD.findall(text.lower())


def make(settings: dict[str, Any]) -> Search:
    """The tool `bm25`.

    Raises:
        SpecError: the corpus is missing or has a bad row.
    """
    return Search(Bm25Settings.model_validate(settings))


class Search:
    """`search(query=…)` gives passages, best first; equal scores stand in corpus order."""

    def __init__(self, settings: Bm25Settings):
        path = Path(settings.corpus)
        self.settings = settings
        fields = settings.text_field, settings.id_field, settings.title_field
        self.index = _index(str(path), _stamp(path), fields, settings.k1, settings.b)

    def __call__(self, query: str) -> dict[str, Any]:
        if not isinstance(query, str):
            raise TypeError(f"query must be text, got {query!r}")
        words = terms(query)
        if self.settings.unique_terms:
            words = list(dict.fromkeys(words))
        found = self.index.search(words, self.settings.top_k)
        passages = [self.index.passages[i] for i, _ in found]
        return {
            "text": "\n".join(p["text"] for p in passages),
            "passages": [dict(p) for p in passages],
            "ids": [p["id"] for p in passages],
            "scores": [score for _, score in found],
        }


class Index:
    """Passages with their term weights; a title's words count as the text's."""

    def __init__(self, passages: list[dict[str, Any]], k1: float, b: float, title_field: str | None = None):
        self.passages = passages
        titles = [str(p.get(title_field) or "") if title_field else "" for p in passages]
        tokens = [terms(f"{title} {p['text']}") for title, p in zip(titles, passages, strict=True)]
        self.weights: Any = None
        if any(tokens):
            self.weights = bm25s.BM25(k1=k1, b=b, method="lucene")
            self.weights.index(tokens, show_progress=False)

    def search(self, words: list[str], top_k: int) -> list[tuple[int, float]]:
        """(place in the corpus, score) of the best, scores above 0 only, ties to the earlier passage."""
        if self.weights is None:
            return []
        known = [w for w in words if w in self.weights.vocab_dict]
        if not known:
            return []
        scores = np.asarray(self.weights.get_scores(known), dtype=np.float64)[: len(self.passages)]
        hits = np.flatnonzero(scores > 0)
        if len(hits) > top_k:
            cut = np.partition(scores[hits], len(hits) - top_k)[len(hits) - top_k]
            hits = hits[scores[hits] >= cut]
        best = hits[np.argsort(-scores[hits], kind="stable")][:top_k]
        return [(int(i), round(float(scores[i]), 6)) for i in best]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise SpecError(
            Problem.at(
                Where(str(path)),
                "missing-corpus",
                f"cannot read the corpus: {error.strerror}",
                "write an existing file",
            )
        ) from None
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=8)
def _index(
    path: str, stamp: tuple[int, int], fields: tuple[str, str, str | None], k1: float, b: float
) -> Index:
    text_field, id_field, title_field = fields
    passages = read_corpus(Path(path), text_field, id_field)
    if title_field and not any(title_field in passage for passage in passages):
        known = ", ".join(passages[0])
        message = f"no passage has a '{title_field}'; the first one has {known}"
        fix = "name a field of the passages as title_field, or leave it out"
        raise SpecError(Problem.at(Where(path), "bad-corpus-field", message, fix))
    return Index(passages, k1, b, title_field)


def read_corpus(path: Path, text_field: str = "text", id_field: str = "id") -> list[dict[str, Any]]:
    """Passages `{"id", "text", …}` in file order; other fields are kept.

    Without an id the line's number is one.

    Raises:
        SpecError: every bad row, with its line.
    """
    passages, problems, seen = [], [], {}
    for line, text in _lines(path):
        row, wrong = _passage(text, text_field, id_field, line)
        if not wrong and row["id"] in seen:
            wrong = f"id {row['id']!r} stands on line {seen[row['id']]} already"
        if wrong:
            fix = f'write {{"{id_field}": …, "{text_field}": "…"}}, one object a line'
            problems.append(Problem.at(Where(str(path), line), "bad-corpus-row", wrong, fix))
        else:
            seen[row["id"]] = line
            passages.append(row)
    if not passages and not problems:
        problems.append(
            Problem.at(Where(str(path)), "empty-corpus", "the corpus has no passages", "write one a line")
        )
    if problems:
        raise SpecError(problems)
    return passages


def _passage(text: str, text_field: str, id_field: str, line: int) -> tuple[dict[str, Any], str]:
    try:
        row = json.loads(text)
    except ValueError as error:
        return {}, f"not JSON: {error}"
    if not isinstance(row, dict):
        return {}, f"expected an object, got {type(row).__name__}"
    if not isinstance(row.get(text_field), str):
        return (
            {},
            f"field '{text_field}' must be text, got {row.get(text_field)!r}; fields here: {', '.join(row)}",
        )
    rest = {k: v for k, v in row.items() if k not in (text_field, id_field)}
    return {"id": str(row.get(id_field, line)), "text": row[text_field], **rest}, ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with _open(path) as file:
            yield from ((n, text) for n, text in enumerate(file, 1) if text.strip())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        problem = Problem.at(
            Where(str(path)),
            "bad-corpus",
            f"cannot read the corpus: {error}",
            "write UTF-8 .jsonl or .jsonl.gz",
        )
        raise SpecError(problem) from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")
