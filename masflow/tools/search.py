"""`bm25`: lexical search over a fixed corpus (Robertson and Zaragoza 2009, the Lucene variant of the idf).

An index is built once, kept in the cache folder and memory-mapped from there; processes share its pages.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from masflow.spec.tools import Bm25Settings
from masflow.tools.corpus import StoredPassages, read_corpus, save_passages, searched_texts, stamp
from masflow.tools.stored import content_key, stored

__all__ = ["Index", "found", "make", "read_corpus", "terms"]

_WORD = re.compile(r"\w+")
LAYOUT = 1
"""Of the files of an index; a change makes old ones unused."""
SMALL_BYTES = 64 * 1024
"""Corpora up to this size are indexed anew faster than a cache is looked through."""
NO_WORDS = "no_words"


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
        self.index = _index(str(path), stamp(path), fields, settings.k1, settings.b)

    def __call__(self, query: str) -> dict[str, Any]:
        if not isinstance(query, str):
            raise TypeError(f"query must be text, got {query!r}")
        words = terms(query)
        if self.settings.unique_terms:
            words = list(dict.fromkeys(words))
        return found(self.index.passages, self.index.search(words, self.settings.top_k))


def found(passages: Sequence[dict[str, Any]], best: list[tuple[int, float]]) -> dict[str, Any]:
    """What a search returns: `{"text", "passages", "ids", "scores"}` of (place, score) pairs."""
    hits = [dict(passages[i]) for i, _ in best]
    return {
        "text": "\n".join(p["text"] for p in hits),
        "passages": hits,
        "ids": [p["id"] for p in hits],
        "scores": [score for _, score in best],
    }


class Index:
    """Passages with their term weights; a title's words count as the text's."""

    def __init__(self, passages: Sequence[dict[str, Any]], weights: Any):
        """
        Args:
            weights: a bm25s index over the passages in their order; None where no passage has a word.
        """
        self.passages, self.weights = passages, weights

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


@lru_cache(maxsize=8)
def _index(
    path: str, stamp: tuple[int, int], fields: tuple[str, str, str | None], k1: float, b: float
) -> Index:
    text_field, id_field, title_field = fields

    def built() -> Index:
        passages = read_corpus(Path(path), text_field, id_field)
        tokens = [terms(text) for text in searched_texts(passages, Path(path), title_field)]
        weights = None
        if any(tokens):
            weights = bm25s.BM25(k1=k1, b=b, method="lucene")
            weights.index(tokens, show_progress=False)
        return Index(passages, weights)

    if stamp[1] <= SMALL_BYTES:
        return built()
    versions = [LAYOUT, bm25s.__version__, np.__version__, platform.python_version()]  # \w follows Python's
    key = content_key([Path(path)], fields, k1, b, versions)
    return stored("bm25", key, built, _save, _load)


def _save(index: Index, folder: Path) -> None:
    save_passages(index.passages, folder)
    if index.weights is None:
        (folder / NO_WORDS).touch()
    else:
        index.weights.save(folder, show_progress=False)


def _load(folder: Path) -> Index:
    passages = StoredPassages(folder)
    if (folder / NO_WORDS).exists():
        return Index(passages, None)
    return Index(passages, bm25s.BM25.load(folder, mmap=True, show_progress=False))
