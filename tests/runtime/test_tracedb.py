"""The trace database: what goes in comes out, while others write, and when the disk doesn't let it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from masflow.errors import RunError
from masflow.runtime.tracedb import TraceDb
from masflow.trace import Effect, EpisodeKey, Message, Scored, Step, Trajectory, Turn


def scored(sample: int = 0, text: str = "reply") -> Scored:
    key = EpisodeKey(1, "train", 2, 3, "task3", sample, ((("", "a", 1),), 2, 0))
    path = (Step("", "team", 1, "k"), Step("team", "a", 2, 4, 1, 1))
    turn = Turn(
        id=key.turn_id(path),
        path=path,
        node="team/a",
        role="team/r",
        member="team/r_0",
        policy="p/x",
        superstep=3,
        messages=(Message("system", "be", tools='[{"n": 1}]'), Message("assistant", "hm", "0abc")),
        text=text,
        value={"t": [1, None, "ü"]},
        ok=True,
        outcome="truncated",
        last=False,
        detail="cut",
        parent="0abc",
        temperature=0.7,
        prompt_tokens=5,
        reply_tokens=6,
        logprob=-1.25,
        version=9,
        demonstrated=False,
    )
    trajectory = Trajectory(
        key=key,
        task={"q": "why?", "n": [1, 2]},
        turns=(turn,),
        effects=(Effect(path, "tool", {"ids": ["1"]}, None, {"query": "q"}),),
        outcome="limit",
        detail="visits",
        output={"answer": None},
        predecessors={turn.id: ("x", "y")},
    )
    return Scored(
        trajectory, {turn.id: {"f1": 0.5, "form": None}}, {turn.id: None}, {"f1": 0.5}, ("form: broke",)
    )


def test_what_goes_in_comes_out(tmp_path: Path):
    one, two = scored(0), scored(1)
    with TraceDb(tmp_path / "trace.sqlite") as db:
        db.add_trajectories(2, "train", [two, one], {one.trajectory.turns[0].id: 1.5})
        assert db.trajectories() == [one, two]
        assert db.trajectories(step=3) == []
        found = db.trajectory(two.trajectory.id)
        assert found == two
        assert found.trajectory.predecessors == two.trajectory.predecessors
        assert found.trajectory.key.fork == two.trajectory.key.fork
        assert found.trajectory.id == two.trajectory.id
        assert db.advantages(2) == {one.trajectory.turns[0].id: 1.5}
        with pytest.raises(RunError, match="no trajectory"):
            db.trajectory("nobody")


def test_a_step_written_again_replaces_itself(tmp_path: Path):
    with TraceDb(tmp_path / "trace.sqlite") as db:
        db.add_trajectories(2, "train", [scored(text="old")])
        db.add_trajectories(2, "train", [scored(text="new")])
        assert [one.trajectory.turns[0].text for one in db.trajectories()] == ["new"]


def test_metrics_keep_their_order_and_nested_names(tmp_path: Path):
    with TraceDb(tmp_path / "trace.sqlite") as db:
        db.add_metrics(
            1, {"reward": 0.5, "roles": {"a": {"malformed_frac": 0}}, "none": None, "names": ["x"]}
        )
        db.add_metrics(2, {"reward": 0.75})
        assert db.metrics("reward") == [(1, "reward", 0.5), (2, "reward", 0.75)]
        assert db.metrics()[1:4] == [
            (1, "roles/a/malformed_frac", 0.0),
            (1, "none", None),
            (1, "names", ["x"]),
        ]


def test_a_resumed_run_forgets_what_lies_after_its_step(tmp_path: Path):
    with TraceDb(tmp_path / "trace.sqlite") as db:
        for step in (1, 2, 3):
            db.add_trajectories(step, "train", [scored()])
            db.add_metrics(step, {"x": step})
        db.cut(2)
        assert db.steps() == [1, 2]
        assert [step for step, _, _ in db.metrics()] == [1, 2]


READER = """
import sys
from masflow.runtime.tracedb import TraceDb
with TraceDb(sys.argv[1], read_only=True) as db:
    print(len(db.trajectories()), db.metrics("x")[-1][2])
"""


def test_another_process_reads_while_a_transaction_is_open(tmp_path: Path):
    path = tmp_path / "trace.sqlite"
    with TraceDb(path) as db:
        db.add_trajectories(1, "train", [scored()])
        db.add_metrics(1, {"x": 4})
        with db._transaction() as raw:
            raw.execute("DELETE FROM trajectories")
            done = subprocess.run(
                [sys.executable, "-c", READER, str(path)],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
        assert done.stdout.split() == ["1", "4.0"]
        assert db.trajectories() == []


def test_a_locked_trace_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("masflow.runtime.tracedb.BUSY_S", 0.05)
    path = tmp_path / "trace.sqlite"
    with TraceDb(path) as db:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunError, match=r"can't write the trace .*locked"):
            db.add_metrics(1, {"x": 1})
        other.execute("ROLLBACK")
        other.close()
        db.add_metrics(1, {"x": 1})
        assert db.metrics("x") == [(1, "x", 1.0)]


def test_a_full_disk_is_an_error_that_says_so_and_leaves_whole_steps(tmp_path: Path):
    with TraceDb(tmp_path / "trace.sqlite") as db:
        db.add_trajectories(1, "train", [scored()])
        pages = db._db.execute("PRAGMA page_count").fetchone()[0]
        db._db.execute(f"PRAGMA max_page_count={pages}")
        with pytest.raises(RunError, match="full") as caught:
            db.add_trajectories(2, "train", [scored(i, "long " * 5000) for i in range(9)])
        assert "free some space" in caught.value.fix
        assert db.steps() == [1]


def test_a_missing_foreign_or_broken_file_is_an_error(tmp_path: Path):
    with pytest.raises(RunError, match="no trace at"):
        TraceDb(tmp_path / "none.sqlite", read_only=True)
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.raises(RunError, match="not a database"):
        TraceDb(broken)
    with sqlite3.connect(tmp_path / "newer.sqlite") as newer:
        newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(RunError, match="another version"):
        TraceDb(tmp_path / "newer.sqlite")


def test_text_that_utf8_has_no_bytes_for_does_not_stop_a_run(tmp_path: Path):
    bad = scored(text="half \ud800")
    bad = replace(bad, trajectory=replace(bad.trajectory, output={"x": "\udfff"}))
    with TraceDb(tmp_path / "trace.sqlite") as db:
        db.add_trajectories(1, "train", [bad])
        assert db.trajectories()[0].trajectory.turns[0].text == "half ?"
