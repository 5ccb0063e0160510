"""Rows of experience by turn id, and the token trace on disk: the only home of sampled ids."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from masflow.errors import RunError

__all__ = ["Experience", "Row", "TokenTrace"]


@dataclass(frozen=True)
class Row:
    """One turn's tokens. Made by the engine or from a demonstration; eaten by trainer and continuation."""

    turn_id: str
    policy: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    """With the token that ended it, and with a stop string's tokens."""
    logprobs: tuple[float, ...]
    """Of each reply token, nats, of the distribution sampled from; empty for demonstrations."""
    version: int
    """Of the policy that sampled it; -1 for demonstrations."""
    prompt_text: str
    text: str
    """The reply as the player saw it."""
    temperature: float = 1.0
    parent: str | None = None
    prefix: int = 0
    """Leading prompt ids that are the parent's, prompt and reply."""
    forked: bool = False
    """There was a parent, but the chat template rewrote history."""

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Token ranges [start, end) that a loss may touch: this turn's reply."""
        return ((len(self.prompt_ids), len(self.prompt_ids) + len(self.reply_ids)),)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.reply_ids)


class Experience:
    """Rows in memory by turn id, until `clear`."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self.num_forked = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows; the same turn again replaces its row."""
        for row in rows:
            self._rows[row.turn_id] = row
            self.num_forked += row.forked

    def get(self, turn_id: str | None) -> Row | None:
        return self._rows.get(turn_id) if turn_id is not None else None

    def rows(self, turn_ids: Sequence[str]) -> list[Row]:
        """Raises RunError for a turn that was never sampled here."""
        missing = [t for t in turn_ids if t not in self._rows]
        if missing:
            raise RunError(
                f"no tokens are kept of turn {missing[0]}"
                + (f" and {len(missing) - 1} more" if missing[1:] else "")
            )
        return [self._rows[t] for t in turn_ids]

    def clear(self) -> None:
        self._rows.clear()


_SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
  turn_id TEXT PRIMARY KEY, policy TEXT NOT NULL, version INTEGER NOT NULL, parent TEXT,
  prefix INTEGER NOT NULL, forked INTEGER NOT NULL,
  prompt_ids BLOB NOT NULL, reply_ids BLOB NOT NULL, logprobs BLOB NOT NULL
) WITHOUT ROWID
"""


class TokenTrace:
    """`tokens/<model>.sqlite`: ids as little-endian int32, log-probs as float32; readable meanwhile."""

    def __init__(self, path: Path):
        """Raises RunError when the file can't be opened, or is no database."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise RunError(f"can't open {path}: {error}", "look at the file and its folder") from error

    def add(self, rows: Sequence[Row]) -> None:
        """Write rows in one transaction; the same turn again replaces its row (a resumed run).

        Raises:
            RunError: the disk refuses.
        """
        values = [
            (
                r.turn_id,
                r.policy,
                r.version,
                r.parent,
                r.prefix,
                r.forked,
                _ints(r.prompt_ids),
                _ints(r.reply_ids),
                _floats(r),
            )
            for r in rows
        ]
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO tokens VALUES (?,?,?,?,?,?,?,?,?)", values)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise RunError(
                f"can't write {self.path}: {error}",
                "look at the file and the room on its disk, then go on with --resume",
            ) from error

    def close(self) -> None:
        self._db.close()


def read_tokens(path: Path, turn_id: str) -> tuple[list[int], list[int], list[float]] | None:
    """(prompt ids, reply ids, log-probs) of a turn in a token trace, or None."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        found = db.execute(
            "SELECT prompt_ids, reply_ids, logprobs FROM tokens WHERE turn_id=?", (turn_id,)
        ).fetchone()
    if found is None:
        return None
    prompt, reply, logprobs = found
    as_ints = [np.frombuffer(blob, dtype="<i4").tolist() for blob in (prompt, reply)]
    return as_ints[0], as_ints[1], np.frombuffer(logprobs, dtype="<f4").tolist()


def _ints(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _floats(row: Row) -> bytes:
    return np.asarray(row.logprobs, dtype="<f4").tobytes()
