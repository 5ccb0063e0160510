"""A team that remembers: what is recalled where, versioned with checkpoints, never of the same task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.errors import RunError, SpecError
from masflow.memory.recall import Snapshot
from masflow.memory.records import Memory, Record, task_key
from masflow.memory.store import MemoryDb
from masflow.runtime.controller import train
from masflow.runtime.memories import Memories, held_out_keys, options_of
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.tracedb import TraceDb
from masflow.runtime.trial import evaluate_checkpoint

Toy = Callable[..., Path]
SHORT = (
    ("steps: 4, tasks", "steps: 3, tasks"),
    ("eval: {samples: 1}", "eval: {limit: 1}"),
    ("steps: 4, batch: 4, optimizer: {lr: 5.0e-3}", "steps: 40, batch: 4, optimizer: {lr: 2.0e-2}"),
)
USES = (
    ('"say {{ word }}"', '"{% for m in memory %}hear {{ m.strategy }} {% endfor %}say {{ word }}"'),
    (
        '"hear {{ call.text }}"',
        '"{{ memory[0].situation if memory else none or word }} hear {{ call.text }}"',
    ),
)
ROLES = ["caller", "echoer"]


def remembering(toy: Toy, settings: str = "", workflow: Any = USES, passes: str = "") -> Path:
    file = toy(*SHORT, workflow=workflow)
    reward = file.parent / "echo.py"
    reward.write_text(reward.read_text().replace(" + 0.1 * (len(said) % 2)", ""))
    own = f"memory_evolution: {{rewards: [echoed], merge: 1.0, demonstrations: false{settings}}}"
    file.write_text(file.read_text() + f"passes: [{passes}{own}]\n")
    return file


def records(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != "time"} for one in read_metrics(out / "metrics.jsonl")]


def memory(out: Path) -> list[Any]:
    """All that a run's memory holds, step by step."""
    with MemoryDb(out / "memory.sqlite", read_only=True) as db:
        return [*(db.at(step, db.names()) for step in range(db.last_step() + 1)), db.events()]


def at(out: Path, step: int) -> dict[str, Memory]:
    with MemoryDb(out / "memory.sqlite", read_only=True) as db:
        return db.at(step, db.names())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, toy_at: Toy) -> tuple[Path, Path]:
    """(experiment, the folder of its run) of a team that remembers."""
    root = tmp_path_factory.mktemp("memory")

    def toy(*changes: Any, workflow: Any) -> Path:
        return toy_at(root / "toy", *changes, workflow=workflow)

    file = remembering(toy)
    train(compile_experiment(file), root / "run")
    return file, root / "run"


def test_a_team_remembers_and_the_trace_tells_what_each_turn_was_reminded_of(whole: tuple[Path, Path]):
    _, out = whole
    steps = [one for one in records(out) if one["kind"] == "train"]
    assert all(set(one["memory"]) == set(ROLES) for one in steps)
    stores = at(out, 3)
    assert {n: len(m.records) for n, m in stores.items()} == {
        n: counts["records"] for n, counts in steps[-1]["memory"].items()
    }
    assert all(stores[name].records and len(stores[name].rewards) == 36 for name in ROLES)
    sources = {r.source: r for m in stores.values() for r in m.records}
    recalled = 0
    with TraceDb(out / "trace.sqlite", read_only=True) as db:
        for step in (1, 2, 3):
            before = at(out, step - 1)
            for one in db.trajectories(step, "train"):
                task = task_key(one.trajectory.task, ["answer"])
                for turn in one.trajectory.turns:
                    found = one.trajectory.recalled[turn.id]
                    there = {r.id: r for r in before[found.store].records}
                    assert found.store == turn.role
                    assert set(found.records) <= set(there)  # of the step's beginning
                    assert all(there[number].task != task for number in found.records)
                    said = [there[number].strategy for number in found.records]
                    if turn.role == "caller":
                        assert found.situation == f"say {one.trajectory.task['word']}"
                        told = "".join(f"hear {text} " for text in said) + found.situation
                        assert turn.messages[-1].content.split() == told.split()
                    recalled += len(said)
                    if turn.id in sources:
                        assert (sources[turn.id].strategy, sources[turn.id].task) == (turn.text, task)
            assert step > 1 or recalled == 0
    assert recalled > 0


def test_siblings_are_reminded_of_the_same(whole: tuple[Path, Path]):
    prompts: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    with TraceDb(whole[1] / "trace.sqlite", read_only=True) as db:
        for one in db.trajectories(split="train"):
            first = one.trajectory.turns[0]
            place = (one.trajectory.key.step, one.trajectory.key.slot)
            prompts.setdefault(place, set()).add(one.trajectory.recalled[first.id].records)
    assert len(prompts) == 9 and all(len(found) == 1 for found in prompts.values())


def test_nothing_held_out_is_kept_and_evaluation_remembers_without_learning(whole: tuple[Path, Path]):
    file, out = whole
    held_out = held_out_keys(compile_experiment(file))
    assert len(held_out) == 3
    kept = {r.task for step in range(4) for m in at(out, step).values() for r in m.records}
    assert kept and not kept & held_out
    before = memory(out)
    found = evaluate_checkpoint(compile_experiment(file), str(out), "eval", None, 0)
    assert found["episodes"] == 3 and memory(out) == before
    with TraceDb(out / "trace.sqlite", read_only=True) as db:
        [last] = db.trajectories(3, "eval")
    assert any(found.records for found in last.trajectory.recalled.values())


def test_a_training_row_that_is_held_out_too_is_never_kept(toy: Toy, tmp_path: Path):
    file = remembering(toy)
    rows = [json.loads(line) for line in (file.parent / "tasks.jsonl").read_text().splitlines()]
    cheat = "".join(
        json.dumps({**row, "word": f" {row['word'].upper()}", "answer": "x"}) + "\n" for row in rows
    )
    with (file.parent / "held_out.jsonl").open("a") as held_out:
        held_out.write(cheat)  # other letters and another answer: still the same words
    train(compile_experiment(file), tmp_path / "run")
    assert all(m.records == () and m.rewards == () for m in at(tmp_path / "run", 3).values())


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(whole: tuple[Path, Path], tmp_path: Path):
    file, out = whole
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 2)

    plan = compile_experiment(file)
    with pytest.raises(Interrupted):
        train(plan, tmp_path / "run", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "run", resume=True)
    assert records(tmp_path / "run") == records(out)
    assert memory(tmp_path / "run") == memory(out)


def test_a_memory_that_is_ahead_of_the_checkpoint_goes_back(whole: tuple[Path, Path], tmp_path: Path):
    file, out = whole
    plan, run = compile_experiment(file), tmp_path / "run"
    train(plan.__class__(**{**plan.__dict__, "train": plan.train.model_copy(update={"steps": 2})}), run)
    with MemoryDb(run / "memory.sqlite") as db:  # a step whose checkpoint was never written
        now = db.at(2, ROLES)
        db.write(3, now, {})
    train(plan, run, resume=True)
    assert memory(run) == memory(out)
    (run / "memory.sqlite").unlink()
    with pytest.raises(RunError, match="has the memory of step 0, and the checkpoint is of step 3"):
        train(
            plan.__class__(**{**plan.__dict__, "train": plan.train.model_copy(update={"steps": 4})}),
            run,
            True,
        )


KILLED = """
import sys
from pathlib import Path
from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.runtime.controller import train
told = lambda kind, facts: print(kind, flush=True)
train(compile_experiment(Path(sys.argv[1])), Path(sys.argv[2]), on_event=told)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_run_goes_on_as_if_it_had_not_been(whole: tuple[Path, Path], tmp_path: Path, number: int):
    file, out = whole
    run = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(file), str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            number -= line == "train\n"
            if not number:
                break
        time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    train(compile_experiment(file), run, resume=True)
    assert records(run) == records(out) and memory(run) == memory(out)


def test_a_prompt_that_doesnt_mention_memory_is_told_at_the_end_of_its_system_message(
    toy: Toy, tmp_path: Path
):
    file = remembering(toy, ", recall: 1, roles: [echoer]", workflow=())
    file.write_text(file.read_text().replace("embeddings: 64", "embeddings: 256"))
    train(compile_experiment(file), tmp_path / "run")
    told = 0
    with TraceDb(tmp_path / "run" / "trace.sqlite", read_only=True) as db:
        for one in db.trajectories(split="train"):
            before = at(tmp_path / "run", one.trajectory.key.step - 1)["echoer"]
            there = {r.id: r for r in before.records}
            caller, echoer = one.trajectory.turns
            assert caller.id not in one.trajectory.recalled and len(caller.messages) == 1
            found = one.trajectory.recalled[echoer.id]
            assert found.situation == echoer.messages[-1].content
            if not found.records:
                assert len(echoer.messages) == 1
                continue
            record, told = there[found.records[0]], told + 1
            text = f"What worked in similar situations:\n\n{record.situation}\n-> {record.strategy}"
            assert (echoer.messages[0].role, echoer.messages[0].content) == ("system", text)
    assert told > 0


def test_explain_tells_who_remembers_and_what_decides(toy: Toy):
    told = explain(compile_experiment(remembering(toy, ", share: {team: [caller, echoer]}, recall: 2")))
    assert "memory of team: caller, echoer: 2 records recalled before a turn, of 512 at most" in told
    assert "which echoed decide of" in told
    assert "memory of caller; echoer: 3 records" in explain(compile_experiment(remembering(toy)))


def test_several_roles_may_share_one_store(toy: Toy, tmp_path: Path):
    file = remembering(toy, ", share: {team: [caller, echoer]}")
    train(compile_experiment(file), tmp_path / "run")
    stores = at(tmp_path / "run", 3)
    assert list(stores) == ["team"] and len(stores["team"].rewards) == 72
    with TraceDb(tmp_path / "run" / "trace.sqlite", read_only=True) as db:
        roles = {turn.id: turn.role for one in db.trajectories() for turn in one.trajectory.turns}
    assert {roles[r.source] for r in stores["team"].records} <= set(ROLES)


@pytest.mark.parametrize("others", ["", "top_k: {k: 2}, "])
def test_it_goes_with_node_sampling_and_top_k(toy: Toy, tmp_path: Path, others: str):
    file = remembering(toy, passes="node_sampling: {samples: 3}, " + others)
    file.write_text(file.read_text().replace("samples: 4, updates", "updates"))
    train(compile_experiment(file), tmp_path / "run")
    contexts: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    with TraceDb(tmp_path / "run" / "trace.sqlite", read_only=True) as db:
        for one in db.trajectories(split="train"):
            for turn in one.trajectory.turns:
                found = one.trajectory.recalled[turn.id]
                key = (one.trajectory.key.step, one.trajectory.key.slot, found.store, found.situation)
                contexts.setdefault(key, set()).add(found.records)
    assert contexts and all(len(found) == 1 for found in contexts.values())
    assert any(m.records for m in at(tmp_path / "run", 3).values())


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        ("{rewards: [ecoed]}", "unknown-reward", "write 'echoed'"),
        ("{rewards: [echoed], roles: [caler]}", "unknown-role", "write 'caller'"),
        ("{rewards: [echoed], share: {team: [caller, nobody]}}", "unknown-role", "known: caller, echoer"),
        ("{rewards: [echoed], share: {a: [caller], b: [caller]}}", "memory-twice", "leave 'caller' in one"),
        ("{rewards: [echoed], share: {caller: [echoer]}}", "memory-name", "give it another name"),
        ("{}", "pass-setting", "rewards"),
        ("{rewards: []}", "pass-setting", "rewards"),
        ("{rewards: [echoed], upper: 40}", "pass-setting", "upper"),
        ("{rewards: [echoed], capasity: 4}", "pass-setting", "capacity"),
    ],
)
def test_what_cant_be_is_refused_with_its_place(toy: Toy, settings: str, code: str, told: str):
    file = toy(*SHORT)
    file.write_text(file.read_text() + f"passes: [memory_evolution: {settings}]\n")
    with pytest.raises(SpecError) as error:
        compile_experiment(file)
    [problem] = error.value.problems
    assert (problem.code, problem.line) == (code, len(file.read_text().splitlines()))
    assert told in f"{problem.message} {problem.fix}"


def test_without_the_pass_there_is_no_memory(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy(*SHORT))
    assert options_of(plan) is None and Memories.of(plan, tmp_path) is None


def test_a_memory_of_no_run_recalls_nothing():
    record = Record(1, "say red", "red", 1.0, 1, 0, 1, 1, "t", "k")
    view = Snapshot({"caller": Memory("caller", (record,))}, {"caller": "caller", "echoer": "echoer"}, 1)
    assert view.recall("echoer", "say red", "other")[1] == []
    assert view.recall("caller", "say red", "other")[1] == [record]
