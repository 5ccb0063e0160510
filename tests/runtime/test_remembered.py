"""`masflow memory`: records and what happened to each, at which step, by which turn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.cli import main
from masflow.memory.evolve import Evolved, evolve
from masflow.memory.records import Experience, Memory
from masflow.memory.rules import Rules
from masflow.memory.store import MemoryDb

Masflow = Callable[..., tuple[int, str, str]]
RULES = {**Rules(capacity=2, lower=10.0).__dict__}


@pytest.fixture
def masflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Masflow:
    """`masflow("memory", …)` runs the program in this process: (exit code, output, error output)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["masflow", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return int(code), out, err

    return run


def turn(name: str, reward: float, situation: str, recalled: tuple[int, ...] = ()) -> Experience:
    return Experience(name, situation, f"reply\tof {name}", reward, f"task {name}", recalled)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps: `solver` and `critic` share a store, `judge` has its own."""
    stores = {"pair": ["solver", "critic"], "judge": ["judge"]}
    options = {"stores": stores, "rewards": ["r"], "recall": 1, "rules": RULES}
    stages = [{"name": "evolve", "op": "memory", "options": options}]
    (tmp_path / "plan.json").write_text(json.dumps({"stages": stages}))
    steps = [
        [turn("a", 1.0, "add 3 and 4"), turn("b", 0.0, "what else")],
        [turn("c", 1.0, "name a river"), turn("d", 1.0, "add 3 and 4"), turn("e", 0.0, "what else")],
        [*(turn(f"f{i:02}", 1.0, "add 3 and 4") for i in range(60)), turn("g", 0.0, "what else", (2,))],
    ]
    now = {"pair": Memory("pair"), "judge": Memory("judge")}
    with MemoryDb(tmp_path / "memory.sqlite") as db:
        for step, turns in enumerate(steps, 1):
            after = {"pair": evolve(now["pair"], turns, step, Rules(**RULES)), "judge": Evolved(now["judge"])}
            db.write(step, now, after)
            now = {name: one.memory for name, one in after.items()}
    return tmp_path


def test_every_record_comes_with_its_history(run: Path, masflow: Masflow):
    code, out, err = masflow("memory", run, "--json")
    assert code == 0, err
    pair, judge = json.loads(out)
    assert (pair["store"], pair["roles"], pair["step"]) == ("pair", ["solver", "critic"], 3)
    assert (judge["store"], judge["records"]) == ("judge", [])
    first, second = pair["records"]
    assert (first["situation"], first["is_there"], second["is_there"]) == ("add 3 and 4", True, False)
    told = [(h["step"], h["event"], h["turn"]) for h in first["history"]]
    assert told[:2] == [(1, "inserted", "a"), (2, "merged", "d")] and told[2] == (3, "merged", "f00")
    # Step 2: mean of 1, 0, 1, 1, 0 is 0.6, so c scores 0.4. Step 3: 66 rewards, 63 of them 1, so that 10 %
    # (place 6.5) is a 1: g failed and costs 63 / 66 from the 0.4·exp(-1 / 100) that is left.
    events = [(h["step"], h["event"], h["turn"]) for h in second["history"]]
    assert events == [(2, "inserted", "c"), (3, "decayed", None), (3, "penalised", "g"), (3, "deleted", "g")]
    scores = [h["score"] for h in second["history"]]
    assert scores[:3] == pytest.approx([0.4, 0.396020, 0.396020 - 63 / 66], abs=1e-5)


def test_people_read_it_a_line_an_event(run: Path, masflow: Masflow):
    code, out, _ = masflow("memory", run)
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "pair of solver, critic: 1 records, 1 gone, after step 3"
    assert "    strategy: reply\\tof c" in lines  # what a terminal would obey is spelled out
    assert "    step 2: inserted by turn c, score 0.400 (reward 1)" in lines
    assert lines[-1] == "judge: 0 records, after step 3"


def test_a_role_has_the_store_that_it_shares(run: Path, masflow: Masflow):
    code, out, _ = masflow("memory", run, "--role", "critic", "--json")
    assert code == 0 and [store["store"] for store in json.loads(out)] == ["pair"]
    code, _, err = masflow("memory", run, "--role", "critik")
    assert code == 3 and "these have: solver, critic, judge" in err and "write 'critic'" in err


def test_what_is_no_run_with_a_memory_is_told(run: Path, masflow: Masflow, tmp_path: Path):
    code, _, err = masflow("memory", tmp_path / "nothing")
    assert code == 3 and "no run at" in err and "Traceback" not in err
    (run / "plan.json").write_text('{"stages": [{"name": "evolve", "op": "none", "options": {}}]}')
    code, _, err = masflow("memory", run)
    assert code == 3 and "has no memory" in err and "memory_evolution" in err
