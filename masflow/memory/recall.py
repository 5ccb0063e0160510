"""Which records are like a situation: FTS5 finds some, their words decide; and a step's frozen view.

Similarity is the cosine of words and pairs of neighbours, weighted by how rare they are in the store, so that
the words of the prompt's template, which all situations share, count for little. (Ours: JoyAgents-R1 compares
embeddings.)
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise

from masflow.memory.records import Memory, Record
from masflow.trace import Recalled

__all__ = ["Index", "Snapshot", "terms_of"]

CANDIDATES = 64
"""Records that FTS5 finds for one situation, before they are compared."""
QUERY_WORDS = 48
"""Of a situation, the rarest ones, that FTS5 is asked about."""
_TERM = re.compile(r"\w+|[^\w\s]")


@lru_cache(maxsize=8192)
def terms_of(text: str) -> Counter[str]:
    """How often each word, sign and pair of neighbours occurs; letter case left aside. Not to be changed."""
    words = _TERM.findall(text.casefold())
    return Counter(words) + Counter(f"{a} {b}" for a, b in pairwise(words))


class Index:
    """Records of one store, to be asked for similar ones. Its own database in memory; close it by `close`."""

    def __init__(self, records: Iterable[Record] = (), others: Iterable[str] = ()):
        """
        Args:
            others: situations of records that may be added; how rare a word is, is counted now, once.
        """
        records = list(records)
        texts = {record.situation for record in records} | set(others)
        self._total = len(texts)
        self._spread: Counter[str] = Counter()
        for text in texts:
            self._spread.update(terms_of(text).keys())
        self._norms: dict[int, float] = {}
        # The player may run on another thread than the one that made the step's view, never on two at once.
        self._db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._db.execute("CREATE VIRTUAL TABLE found USING fts5(words, task UNINDEXED)")
        self._records: dict[int, Record] = {}
        for record in records:
            self.add(record)

    def close(self) -> None:
        self._db.close()

    def add(self, record: Record) -> None:
        """Add a record, or put it in place of the one with its id."""
        self.remove(record.id)
        self._records[record.id] = record
        words = " ".join(_words(record.situation))
        sql = "INSERT INTO found (rowid, words, task) VALUES (?, ?, ?)"
        self._db.execute(sql, (record.id, words, record.task))

    def remove(self, record: int) -> None:
        """Forget the record with this id, if it is there."""
        if self._records.pop(record, None) is not None:
            self._norms.pop(record, None)
            self._db.execute("DELETE FROM found WHERE rowid = ?", (record,))

    def nearest(self, situation: str, limit: int, not_of: str = "") -> list[tuple[Record, float]]:
        """The most similar records with their similarity, in (0, 1], the best first; of equals the earlier.

        Args:
            not_of: the task (`task_key`) whose records are passed over.
        """
        asked = terms_of(situation)
        weighted = {term: count * self._rarity(term) ** 2 for term, count in asked.items()}
        norm = math.sqrt(sum(weighted[term] * count for term, count in asked.items()))
        found = []
        for number in self._candidates(situation, not_of):
            record = self._records[number]
            terms = terms_of(record.situation)
            dot = sum(weight * terms[term] for term, weight in weighted.items() if term in terms)
            length = norm * self._norm(number, terms)
            similarity = 1.0 if terms == asked else dot / length if length else 0.0
            if similarity > 0:
                found.append((record, similarity))
        found.sort(key=lambda pair: (-pair[1], pair[0].id))
        return found[:limit]

    def _candidates(self, situation: str, not_of: str) -> list[int]:
        asked = _words(situation)
        if not asked:  # signs alone, of which FTS5 knows nothing
            bare = [n for n, r in self._records.items() if r.task != not_of and not _words(r.situation)]
            return bare[:CANDIDATES]
        words = [word for word in asked if self._spread[word] > 0]
        words = sorted(words, key=lambda word: (self._spread[word], word))[:QUERY_WORDS]
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words)
        sql = "SELECT rowid FROM found WHERE words MATCH ? AND task <> ? ORDER BY bm25(found), rowid LIMIT ?"
        rows = self._db.execute(sql, (query, not_of, CANDIDATES))
        return [row[0] for row in rows]

    def _rarity(self, term: str) -> float:
        """Weight of a term of the situation that is asked about, which counts as one text more."""
        return math.log((self._total + 2) / (self._spread[term] + 1))

    def _norm(self, number: int, terms: Counter[str]) -> float:
        if number not in self._norms:
            squares = sum((count * self._rarity(term)) ** 2 for term, count in terms.items())
            self._norms[number] = math.sqrt(squares)
        return self._norms[number]


def _words(text: str) -> list[str]:
    """Its distinct words, without signs."""
    return [term for term in dict.fromkeys(_TERM.findall(text.casefold())) if term[0].isalnum()]


class Snapshot:
    """All stores as they are at the beginning of a step: nothing that happens in the step changes it, so that
    whoever is in the same situation is reminded of the same."""

    def __init__(
        self,
        memories: Mapping[str, Memory],
        store_of: Mapping[str, str],
        recall: int,
        held_out: Collection[str] = (),
    ):
        """
        Args:
            store_of: qualified role → its store; other roles have no memory.
            recall: records a turn at most.
            held_out: tasks (`task_key`) whose records are never given away, should there be any.
        """
        self._store_of, self._recall = dict(store_of), recall
        self._known: dict[tuple[str, str, str], list[Record]] = {}
        self._index = {
            name: Index(record for record in memory.records if record.task not in held_out)
            for name, memory in memories.items()
        }

    def close(self) -> None:
        for index in self._index.values():
            index.close()

    def has(self, role: str) -> bool:
        """Whether a role has a memory."""
        return role in self._store_of

    def recall(self, role: str, situation: str, task: str) -> tuple[Recalled, list[Record]]:
        """The records that are most like the situation, none of them of the same task.

        Args:
            role: qualified; one that `has` a memory.
            task: `task_key` of the episode's task.
        """
        store = self._store_of[role]
        asked = (store, situation, task)
        records = self._known.get(asked)
        if records is None:  # siblings, and what is played behind them, ask the same again and again
            index = self._index.get(store)
            found = index.nearest(situation, self._recall, task) if index is not None else []
            records = self._known[asked] = [record for record, _ in found]
        return Recalled(store, situation, tuple(record.id for record in records)), list(records)
