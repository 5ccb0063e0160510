"""The trace of a run: trajectories, turns, rewards, advantages and metrics in one SQLite file beside it.

Written by one process, a transaction a step, in WAL mode, so that others read while the run goes on. Token
ids are not here; each model group keeps its own by turn id.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from masflow.errors import RunError
from masflow.runtime.state import tupled
from masflow.trace import (
    Effect,
    EpisodeKey,
    Message,
    Recalled,
    Scored,
    Trajectory,
    Turn,
    path_from_json,
    path_json,
)

SCHEMA_VERSION = 1
BUSY_S = 30.0
"""How long a write waits for another process's lock."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS trajectories (
  step INTEGER, split TEXT, id TEXT, key TEXT, slot INTEGER, task_id TEXT, sample INTEGER, fork TEXT,
  task TEXT, outcome TEXT, detail TEXT, output TEXT, effects TEXT, failures TEXT, metrics TEXT,
  predecessors TEXT,
  PRIMARY KEY (step, split, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
  step INTEGER, split TEXT, trajectory TEXT, place INTEGER, id TEXT, path TEXT, node TEXT, role TEXT,
  member TEXT, policy TEXT, superstep INTEGER, messages TEXT, text TEXT, value TEXT, ok INTEGER, outcome TEXT,
  last INTEGER, detail TEXT, parent TEXT, temperature REAL, prompt_tokens INTEGER, reply_tokens INTEGER,
  logprob REAL, version INTEGER, demonstrated INTEGER, total REAL, advantage REAL,
  PRIMARY KEY (step, split, trajectory, place)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turns_by_id ON turns (id);
CREATE TABLE IF NOT EXISTS rewards (
  step INTEGER, split TEXT, trajectory TEXT, turn TEXT, name TEXT, value REAL,
  PRIMARY KEY (step, split, trajectory, turn, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS recalls (
  step INTEGER, split TEXT, trajectory TEXT, turn TEXT, store TEXT, situation TEXT, records TEXT,
  PRIMARY KEY (step, split, trajectory, turn)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS metrics (step INTEGER, place INTEGER, name TEXT, value REAL, text TEXT,
  PRIMARY KEY (step, place)) WITHOUT ROWID;
"""
TABLES = ("trajectories", "turns", "rewards", "recalls", "metrics")
TURN_FIELDS = tuple(Turn.__dataclass_fields__)
_turn_fields = itemgetter(*TURN_FIELDS)


class TraceDb:
    """One trace file. `read_only` opens it beside a run that is writing.

    Raises:
        RunError: here and in every method; the file can't be opened, read or written: why, and where it is.
    """

    def __init__(self, path: Path | str, read_only: bool = False):
        self.path = Path(path)
        if read_only and not self.path.is_file():
            raise RunError(f"there is no trace at {self.path}", "name the folder of a run")
        with self._guard("open"):
            name = f"{self.path.absolute().as_uri()}?mode=ro" if read_only else str(self.path)
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
            self._db.execute("PRAGMA synchronous=NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise RunError(
                f"{self.path} is a trace of another version ({version})", "read it with that version"
            )
        if not read_only:
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        tables = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'recalls'")
        self._has_recalls = tables.fetchone() is not None  # a trace from before roles had memories

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> TraceDb:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _guard(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            fixes = {
                "full": "free some space on its disk",
                "locked": "end the other process that writes to it",
            }
            fix = next(
                (fix for word, fix in fixes.items() if word in text), "look at the file and its folder"
            )
            raise RunError(f"can't {doing} the trace {self.path}: {text}", fix) from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def add_trajectories(
        self, step: int, split: str, scored: Sequence[Scored], advantages: Mapping[str, float] | None = None
    ) -> None:
        """Add the episodes of a step with their rewards; an episode that is there already is written again.

        Args:
            advantages: turn id → advantage, of the turns that were trained on.
        """
        advantages = advantages or {}
        places = [(step, split, one.trajectory.id) for one in scored]
        with self._transaction() as db:
            inside = [(table, "trajectory") for table in ("turns", "rewards", "recalls")]
            for table, column in (*inside, ("trajectories", "id")):
                db.executemany(f"DELETE FROM {table} WHERE step=? AND split=? AND {column}=?", places)
            _insert(db, "trajectories", [_trajectory_row(step, split, one) for one in scored])
            _insert(db, "turns", [row for one in scored for row in _turn_rows(step, split, one, advantages)])
            _insert(db, "rewards", [row for one in scored for row in _reward_rows(step, split, one)])
            _insert(db, "recalls", [row for one in scored for row in _recall_rows(step, split, one)])

    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add numbers (or anything JSON, kept as text) of a step; nested names are joined by `/`."""
        rows = [(name, *_metric(value)) for name, value in _flat("", metrics)]
        with self._transaction() as db:
            first = db.execute(
                "SELECT coalesce(max(place) + 1, 0) FROM metrics WHERE step=?", (step,)
            ).fetchone()[0]
            _insert(db, "metrics", [(step, first + i, *row) for i, row in enumerate(rows)])

    def cut(self, step: int) -> None:
        """Forget everything after a step, for a run that goes on from there."""
        with self._transaction() as db:
            for table in TABLES:
                db.execute(f"DELETE FROM {table} WHERE step>?", (step,))

    def steps(self) -> list[int]:
        return [row["step"] for row in self._rows("SELECT DISTINCT step FROM trajectories ORDER BY step")]

    def trajectories(
        self, step: int | None = None, split: str | None = None, *, limit: int = -1
    ) -> list[Scored]:
        """Episodes with their turns and rewards, in order of step, split, slot and sample.

        Names and moments, which rewards were computed from, are not kept.
        """
        wanted = [(k, v) for k, v in (("step", step), ("split", split)) if v is not None]
        where = " AND ".join(f"{k}=?" for k, _ in wanted) or "1"
        sql = f"SELECT * FROM trajectories WHERE {where} ORDER BY step, split, slot, sample, id LIMIT ?"
        return [self._scored(row) for row in self._rows(sql, (*(v for _, v in wanted), limit))]

    def trajectory(self, trajectory_id: str) -> Scored:
        """The latest episode with this id. Raises RunError when there is none."""
        rows = self._rows(
            "SELECT * FROM trajectories WHERE id=? ORDER BY step DESC LIMIT 1", (trajectory_id,)
        )
        if not rows:
            raise RunError(f"the trace {self.path} has no trajectory '{trajectory_id}'")
        return self._scored(rows[0])

    def advantages(self, step: int) -> dict[str, float]:
        """Turn id → advantage, of the turns trained on in a step."""
        wanted = "step=? AND advantage IS NOT NULL ORDER BY trajectory, place"
        rows = self._rows(f"SELECT id, advantage FROM turns WHERE {wanted}", (step,))
        return {row["id"]: row["advantage"] for row in rows}

    def metrics(self, name: str | None = None) -> list[tuple[int, str, Any]]:
        """(step, name, value) in order of writing; all of them, or those of one name."""
        where, args = ("WHERE name=?", (name,)) if name is not None else ("", ())
        rows = self._rows(f"SELECT * FROM metrics {where} ORDER BY step, place", args)
        return [
            (r["step"], r["name"], r["value"] if r["text"] is None else json.loads(r["text"])) for r in rows
        ]

    def _rows(self, sql: str, args: Sequence[Any] = ()) -> list[dict[str, Any]]:
        with self._guard("read"):
            cursor = self._db.execute(sql, tuple(args))
            names = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _scored(self, row: dict[str, Any]) -> Scored:
        at = (row["step"], row["split"], row["id"])
        sql = "SELECT * FROM {} WHERE step=? AND split=? AND trajectory=?"
        turn_rows = self._rows(sql.format("turns") + " ORDER BY place", at)
        components: dict[str, dict[str, float | None]] = {}
        for reward in self._rows(sql.format("rewards"), at):
            components.setdefault(reward["turn"], {})[reward["name"]] = reward["value"]
        key = json.loads(row["key"])
        trajectory = Trajectory(
            key=EpisodeKey(**{**key, "fork": tupled(key["fork"])}),
            task=json.loads(row["task"]),
            turns=tuple(map(_turn, turn_rows)),
            effects=tuple(
                Effect(**{**effect, "path": path_from_json(effect["path"])})
                for effect in json.loads(row["effects"])
            ),
            outcome=row["outcome"],
            detail=row["detail"],
            output=json.loads(row["output"]),
            predecessors={turn: tuple(before) for turn, before in json.loads(row["predecessors"]).items()},
            recalled=self._recalled(at) if self._has_recalls else {},
        )
        totals = {turn["id"]: turn["total"] for turn in turn_rows}
        return Scored(
            trajectory, components, totals, json.loads(row["metrics"]), tuple(json.loads(row["failures"]))
        )

    def _recalled(self, at: tuple[Any, ...]) -> dict[str, Recalled]:
        rows = self._rows("SELECT * FROM recalls WHERE step=? AND split=? AND trajectory=? ORDER BY turn", at)
        return {
            row["turn"]: Recalled(row["store"], row["situation"], tuple(json.loads(row["records"])))
            for row in rows
        }


def _insert(db: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]]) -> None:
    if rows:
        db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)


_encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


def _dump(value: Any) -> str:
    return "null" if value is None else _clean(_encoded(value))


def _clean(text: str) -> str:
    """The text without half characters, which UTF-8 has no bytes for."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _trajectory_row(step: int, split: str, one: Scored) -> tuple[Any, ...]:
    t, key = one.trajectory, one.trajectory.key
    effects = [{**effect.__dict__, "path": path_json(effect.path)} for effect in t.effects]
    return (
        step, split, t.id, _dump(key.__dict__), key.slot, key.task_id, key.sample, _dump(key.fork),
        _dump(t.task), t.outcome, _clean(t.detail), _dump(t.output), _dump(effects), _dump(one.failures),
        _dump(one.metrics), _dump(t.predecessors),
    )  # fmt: skip


def _turn_rows(
    step: int, split: str, one: Scored, advantages: Mapping[str, float]
) -> Iterator[tuple[Any, ...]]:
    own, totals = one.trajectory.id, one.totals
    for place, turn in enumerate(one.trajectory.turns):
        plain = {
            **turn.__dict__,
            "path": path_json(turn.path),
            "messages": _dump([_message(m) for m in turn.messages]),
            "text": _clean(turn.text),
            "detail": _clean(turn.detail),
            "value": _dump(turn.value),
        }
        yield (step, split, own, place, *_turn_fields(plain), totals.get(turn.id), advantages.get(turn.id))


def _message(message: Message) -> list[Any]:
    plain = [message.role, message.content, message.turn_id]
    return [*plain, message.tools] if message.tools else plain


def _turn(row: dict[str, Any]) -> Turn:
    own = {name: row[name] for name in TURN_FIELDS}
    flags = {name: bool(row[name]) for name in ("ok", "last", "demonstrated")}
    messages = tuple(Message(*message) for message in json.loads(row["messages"]))
    path = path_from_json(row["path"])
    return Turn(**{**own, **flags, "messages": messages, "path": path, "value": json.loads(row["value"])})


def _reward_rows(step: int, split: str, one: Scored) -> Iterator[tuple[Any, ...]]:
    for turn, rewards in one.components.items():
        for name, value in rewards.items():
            yield (step, split, one.trajectory.id, turn, name, value)


def _recall_rows(step: int, split: str, one: Scored) -> Iterator[tuple[Any, ...]]:
    for turn in one.trajectory.turns:
        found = one.trajectory.recalled.get(turn.id)
        if found is not None:
            place = (step, split, one.trajectory.id, turn.id)
            yield (*place, found.store, _clean(found.situation), _dump(found.records))


def _flat(prefix: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        full = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from _flat(full, value)
        else:
            yield full, value


def _metric(value: Any) -> tuple[float | None, str | None]:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value, None
    return None, _dump(value)
