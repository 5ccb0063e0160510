"""The file that memory lives in: every step's memory is there, whole, whatever kills the process."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from masflow.errors import RunError
from masflow.memory.evolve import Evolved, evolve
from masflow.memory.records import Event, Experience, Memory
from masflow.memory.rules import Rules
from masflow.memory.store import MemoryDb

RULES = Rules(capacity=3, window=10)


def grown(steps: int, db: MemoryDb | None = None) -> list[dict[str, Memory]]:
    """Memories of steps 0 … `steps`, of a store that a few random turns evolve; written as it goes."""
    now = {"s": Memory("s"), "t": Memory("t")}
    found = [now]
    for step in range(1, steps + 1):
        chance = random.Random(step)
        turns = [
            Experience(f"{step}.{i}", f"word{chance.randrange(6)}", f"r{i}", float(chance.random() < 0.4),
                       f"k{chance.randrange(9)}", tuple(r.id for r in now["s"].records[:2]))
            for i in range(6)
        ]  # fmt: skip
        after = {"s": evolve(now["s"], turns, step, RULES), "t": Evolved(now["t"])}
        if db is not None:
            db.write(step, now, after)
        now = {name: one.memory for name, one in after.items()}
        found.append(now)
    return found


def test_every_steps_memory_can_be_had_again(tmp_path: Path):
    with MemoryDb(tmp_path / "m.sqlite") as db:
        steps = grown(12, db)
        assert db.last_step() == 12 and db.names() == ["s", "t"]
    assert steps[-1]["s"].records and len({len(one["s"].records) for one in steps}) > 1
    with MemoryDb(tmp_path / "m.sqlite", read_only=True) as db:
        assert [db.at(step, ["s", "t"]) for step in range(13)] == steps
        assert {e.kind for e in db.events("s")} >= {"inserted", "merged", "evicted"}
        assert db.events("t") == [] and db.events() == db.events("s")
        there = {record.id: alive for record, alive in db.latest("s")}
        assert sorted(n for n, alive in there.items() if alive) == [r.id for r in steps[-1]["s"].records]
        assert len(there) == steps[-1]["s"].next_id - 1


def test_a_run_that_goes_on_from_an_earlier_step_comes_to_the_same(tmp_path: Path):
    with MemoryDb(tmp_path / "m.sqlite") as db:
        steps = grown(9, db)
        events = db.events()
        db.cut(5)
        assert db.last_step() == 5 and db.at(99, ["s", "t"]) == steps[5]
        assert max(e.step for e in db.events()) <= 5
    with MemoryDb(tmp_path / "n.sqlite") as db:
        assert grown(9, db) == steps and db.events() == events


def test_a_checkpoint_that_is_younger_than_the_file_is_refused(tmp_path: Path):
    with MemoryDb(tmp_path / "m.sqlite") as db:
        grown(3, db)
        with pytest.raises(RunError, match="has the memory of step 3, and the checkpoint is of step 4"):
            db.cut(4)
        with pytest.raises(RunError, match="step 6 was to follow"):
            db.write(6, {}, {})


def test_a_step_that_can_t_be_written_whole_leaves_nothing(tmp_path: Path):
    with MemoryDb(tmp_path / "m.sqlite") as db:
        steps = grown(3, db)
        odd = Event(4, "s", 1, "inserted", object(), 0.0)  # type: ignore[arg-type]
        with pytest.raises(RunError, match="can't write the memory"):
            db.write(4, steps[3], {"s": Evolved(Memory("s"), (odd,), (1.0,))})
        assert db.last_step() == 3 and db.at(9, ["s", "t"]) == steps[3]


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_store import MemoryDb, grown
with MemoryDb(Path({path!r})) as db:
    print("begun", flush=True)
    grown(100000, db)
"""


@pytest.mark.parametrize("after_s", [0.02, 0.11])
def test_a_killed_process_leaves_the_memory_of_a_whole_step(tmp_path: Path, after_s: float):
    path = tmp_path / "m.sqlite"
    code = KILLED.format(here=str(Path(__file__).parent), path=str(path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(after_s)
        os.kill(process.pid, signal.SIGKILL)
    with MemoryDb(path) as db:
        last = db.last_step()
        assert db.at(last, ["s", "t"]) == grown(last)[-1]
        db.write(last + 1, {}, {})


def test_a_file_that_is_none_or_of_another_version_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="there is no memory at"):
        MemoryDb(tmp_path / "none.sqlite", read_only=True)
    (tmp_path / "odd.sqlite").write_text("no database at all, but long enough for a header" * 9)
    with pytest.raises(RunError, match="can't open the memory"):
        MemoryDb(tmp_path / "odd.sqlite")
    with sqlite3.connect(tmp_path / "old.sqlite") as db:
        db.execute("PRAGMA user_version=9")
    with pytest.raises(RunError, match="another version"):
        MemoryDb(tmp_path / "old.sqlite")
