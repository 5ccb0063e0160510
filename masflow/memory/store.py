"""A run's memory on the disk: every version of every record, so that each step's memory can be had again.

One SQLite file beside the run's trace, a transaction a step, synced before it returns: a process that is
killed leaves the memory of a whole step, and a checkpoint never knows more steps than the file. Written by
one process; others read while it goes on.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from masflow.errors import RunError
from masflow.memory.evolve import Evolved
from masflow.memory.records import Event, Memory, Record

__all__ = ["MemoryDb"]

SCHEMA_VERSION = 1
BUSY_S = 30.0
"""How long a write waits for another process's lock."""
COLUMNS = tuple(field.name for field in fields(Record))
SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
  store TEXT, step INTEGER, alive INTEGER, id INTEGER, situation TEXT, strategy TEXT, score REAL,
  scored INTEGER, uses INTEGER, created INTEGER, last_used INTEGER, source TEXT, task TEXT,
  PRIMARY KEY (store, id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
  step INTEGER, place INTEGER, store TEXT, record INTEGER, kind TEXT, turn TEXT, score REAL, detail TEXT,
  PRIMARY KEY (step, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stores (
  store TEXT, step INTEGER, next_id INTEGER, num_rewards INTEGER,
  PRIMARY KEY (store, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rewards (
  store TEXT, step INTEGER, place INTEGER, value REAL,
  PRIMARY KEY (store, step, place)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (step INTEGER PRIMARY KEY);
"""
TABLES = ("versions", "events", "stores", "rewards", "steps")


class MemoryDb:
    """One memory file. `read_only` opens it beside a run that is writing.

    Raises:
        RunError: here and in every method; the file can't be opened, read or written: why, and where it is.
    """

    def __init__(self, path: Path, read_only: bool = False):
        self.path = path
        if read_only and not path.is_file():
            raise RunError(
                f"there is no memory at {path}", "name a run whose experiment has memory_evolution"
            )
        with self._guard("open"):
            name = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path)
            self._db = sqlite3.connect(name, uri=read_only, timeout=BUSY_S, isolation_level=None)
        try:
            with self._guard("open"):
                self._prepare(read_only)
        except RunError:
            self._db.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        if not read_only:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # no checkpoint may outlive the memory of its step
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION and (version or read_only):
            fix = "read it with the version of masflow that wrote it"
            raise RunError(f"{self.path} is a memory of another version ({version})", fix)
        if not read_only:
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> MemoryDb:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            fix = "free some space on its disk" if "full" in str(error) else "look at the file and its folder"
            raise RunError(f"can't {doing} the memory {self.path}: {error}", fix) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guard("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def last_step(self) -> int:
        """The last step whose memory is here whole; 0 before the first."""
        [(step,)] = self._all("SELECT coalesce(max(step), 0) FROM steps")
        return step

    def has_beginning(self) -> bool:
        """Whether the memory that the run begins with is here, or a later one."""
        return bool(self._all("SELECT 1 FROM steps LIMIT 1"))

    def write(self, step: int, before: Mapping[str, Memory], after: Mapping[str, Evolved]) -> None:
        """Add a step: what differs between the stores before and after it. All of it, or nothing.

        Args:
            step: from 1; 0 is what a run begins with, if it begins with anything.
            before, after: by store.
        Raises:
            RunError: the step isn't the one after the last.
        """
        last = self.last_step()
        if step != last + 1 and (step or self.has_beginning()):
            message = f"{self.path} has the memory of step {last}, and step {step} was to follow"
            raise RunError(message, "resume the run from a checkpoint that isn't younger than the file")
        with self._transaction():
            for name, evolved in after.items():
                self._write_store(step, before.get(name, Memory(name)), evolved)
            events = (event for name in after for event in after[name].events)
            rows = [(e.step, i, *astuple(e)[1:]) for i, e in enumerate(events)]
            self._db.executemany(f"INSERT INTO events VALUES ({_marks(8)})", rows)
            self._db.execute("INSERT INTO steps VALUES (?)", (step,))

    def _write_store(self, step: int, old: Memory, evolved: Evolved) -> None:
        new = evolved.memory
        was = {record.id: record for record in old.records}
        now = {record.id: record for record in new.records}
        changed = [(record, 1) for number, record in now.items() if was.get(number) != record]
        gone = [(record, 0) for number, record in was.items() if number not in now]
        gone += [(record, 0) for record in evolved.brief]
        rows = [(new.name, step, alive, *astuple(record)) for record, alive in changed + gone]
        self._db.executemany(f"INSERT INTO versions VALUES ({_marks(3 + len(COLUMNS))})", rows)
        rewards = [(new.name, step, place, value) for place, value in enumerate(evolved.rewards)]
        self._db.executemany("INSERT INTO rewards VALUES (?, ?, ?, ?)", rewards)
        counts = (new.name, step, new.next_id, len(new.rewards))
        self._db.execute("INSERT INTO stores VALUES (?, ?, ?, ?)", counts)

    def cut(self, step: int) -> None:
        """Forget everything after a step, for a run that goes on from there.

        Raises:
            RunError: the file has no memory of that step.
        """
        last = self.last_step()
        if last < step:
            message = f"{self.path} has the memory of step {last}, and the checkpoint is of step {step}"
            raise RunError(message, "put the file back, or remove checkpoints until one is as old as it")
        with self._transaction():
            for table in TABLES:
                self._db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))

    def at(self, step: int, names: Collection[str]) -> dict[str, Memory]:
        """Store → its memory after a step, of each of these names; empty ones before the first."""
        return {name: self._memory(name, step) for name in names}

    def _memory(self, name: str, step: int) -> Memory:
        sql = (
            f"SELECT {', '.join(COLUMNS)} FROM versions AS v WHERE store = ? AND alive = 1 AND step ="
            " (SELECT max(step) FROM versions WHERE store = v.store AND id = v.id AND step <= ?) ORDER BY id"
        )
        records = tuple(Record(*row) for row in self._all(sql, (name, step)))
        sql = (
            "SELECT next_id, num_rewards FROM stores WHERE store = ? AND step <= ? ORDER BY step DESC LIMIT 1"
        )
        next_id, number = next(iter(self._all(sql, (name, step))), (1, 0))
        sql = "SELECT value FROM rewards WHERE store = ? AND step <= ? ORDER BY step DESC, place DESC LIMIT ?"
        rewards = [value for (value,) in self._all(sql, (name, step, number))]
        return Memory(name, records, tuple(reversed(rewards)), next_id)

    def names(self) -> list[str]:
        """Stores that have ever been written."""
        return [name for (name,) in self._all("SELECT DISTINCT store FROM stores ORDER BY store")]

    def latest(self, store: str) -> list[tuple[Record, bool]]:
        """Every record that a store ever had, by id, as it was last, and whether it is still there."""
        sql = (
            f"SELECT alive, {', '.join(COLUMNS)} FROM versions AS v WHERE store = ? AND step ="
            " (SELECT max(step) FROM versions WHERE store = v.store AND id = v.id) ORDER BY id"
        )
        return [(Record(*row), bool(alive)) for alive, *row in self._all(sql, (store,))]

    def events(self, store: str | None = None) -> list[Event]:
        """What happened, in its order; to one store's records, or to all."""
        where, args = ("WHERE store = ?", (store,)) if store is not None else ("", ())
        columns = "step, store, record, kind, turn, score, detail"
        return [
            Event(*row)
            for row in self._all(f"SELECT {columns} FROM events {where} ORDER BY step, place", args)
        ]

    def _all(self, sql: str, args: Sequence[Any] = ()) -> list[Any]:
        with self._guard("read"):
            return self._db.execute(sql, tuple(args)).fetchall()


def _marks(number: int) -> str:
    return ", ".join("?" * number)
