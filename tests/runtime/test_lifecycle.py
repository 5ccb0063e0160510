"""What a run keeps, who may use its folder, and what its tasks are drawn from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.runtime import checkpoints, hub
from masflow.runtime.checkpoints import RunState, best_step, listed, prune, save
from masflow.runtime.controller import train
from masflow.runtime.report import eval_text, scores
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.spec.runtime import Runtime

Toy = Callable[..., Path]
QUICK = ("steps: 4, batch: 4", "steps: 1, batch: 4")
MIXED = (
    ("{train: tasks.jsonl", "{train: [{path: tasks.jsonl, weight: 1}, {path: few.jsonl, weight: 2}]"),
    ("eval: held_out.jsonl}", "eval: [held_out.jsonl, {path: few.jsonl, name: seen}]}"),
)


def steps(root: Path) -> list[int]:
    return [int(p.name.split("_")[1]) for p in listed(root)]


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == kind]


def test_retention_is_the_newest_the_best_the_start_and_every_nth(tmp_path: Path):
    for step in range(21):
        save(tmp_path, RunState(warmed=True, step=step), {})
        prune(tmp_path, keep=2, best=7 if step >= 7 else None, every=5)
    # start, every fifth, the best, two before the last, the last
    assert steps(tmp_path) == [0, 5, 7, 10, 15, 18, 19, 20]


def test_a_run_keeps_by_rule_and_saves_what_it_keeps_for_good(toy: Toy, tmp_path: Path):
    schedule = "steps: 7, tasks_per_step: 3, save_every: 2, eval_every: 1, keep: 1, keep_every: 3"
    plan = compile_experiment(
        toy(QUICK, ("steps: 4, tasks_per_step: 3, seed: 0, save_every: 1, keep: 8", schedule))
    )
    train(plan, tmp_path / "run")
    root = tmp_path / "run/checkpoints"
    evals = checkpoints.read_state(root / "step_000007").evals
    # saved: 0, 2, 4, 6 (save_every), 3, 6 (keep_every), 7 (the end); 1 and 5 were scored alone
    scores = {step: evals[str(step)]["metrics"]["echoed"] for step in (0, 2, 3, 4, 6, 7)}
    best = min(step for step, score in scores.items() if score == max(scores.values()))
    # kept: the start, 3 and 6 for good, one before the last, the last, the best
    assert set(steps(root)) == {0, 3, 6, 7, best}
    assert best_step(checkpoints.read_state(root / "step_000007"), root) == best


def test_the_best_is_the_best_of_those_that_are_there(tmp_path: Path):
    def scored(value: float) -> dict[str, Any]:
        return {"headline": "f1", "metrics": {"f1": value}}

    evals = {"0": scored(0.1), "1": scored(0.9), "2": scored(0.5), "4": scored(0.5)}
    state = RunState(warmed=True, step=4, evals=evals)
    assert best_step(state, tmp_path) is None
    for step in (0, 2, 4):
        save(tmp_path, RunState(warmed=True, step=step, evals=evals), {})
    assert best_step(state, tmp_path) == 2


HOLD = """
import sys, time
from pathlib import Path
from masflow.runtime.rundir import RunDir
with RunDir(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_uses_is_refused_until_that_process_is_gone(toy: Toy, tmp_path: Path):
    plan, out = compile_experiment(toy(QUICK), overrides={"train.steps": "1"}), tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=rf"in use by another run \(process {holder.pid}\)"):
            train(plan, out)
    finally:
        holder.kill()
        holder.communicate()
    assert train(plan, out)["steps"] == 1
    # Finished, it is still a run's folder.
    with pytest.raises(RunError, match="holds a run already"):
        train(plan, out)


def few(experiment: Path) -> Path:
    """A second source of two rows."""
    rows = [{"word": word, "answer": word} for word in ("grey", "brown")]
    (experiment.parent / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return experiment


def test_a_mixture_is_drawn_by_its_weights_and_told_by_its_sources(toy: Toy, tmp_path: Path):
    plan = compile_experiment(few(toy(QUICK, *MIXED)))
    train(plan, tmp_path / "run")
    found = records(tmp_path / "run", "train")
    drawn: Counter[str] = Counter()
    for record in found:
        drawn.update({name: one["tasks"] for name, one in record["sources"].items()})
        weighed = [
            one["rewards"]["echoed"] * one["tasks"] for one in record["sources"].values() if one["tasks"]
        ]
        assert sum(weighed) / 3 == pytest.approx(record["rewards"]["echoed"])
    assert drawn == {"tasks": 4, "few": 8}  # of 12 tasks one third and two thirds; `few` has 2 rows
    before, after = records(tmp_path / "run", "eval")
    told = scores({"eval_before": before, "eval_after": after})[1]
    assert "team echoed on held_out" in told and "team echoed on seen" in told
    assert re.search(r"source +tasks +echoed\n +held_out +3 .*\n +seen +2 ", eval_text(after))
    for record in (before, after):
        assert {name: one["tasks"] for name, one in record["sources"].items()} == {"held_out": 3, "seen": 2}
        whole = sum(one["rewards"]["echoed"] * one["tasks"] for one in record["sources"].values()) / 5
        assert whole == pytest.approx(record["metrics"]["echoed"])


def test_a_mixture_resumes_where_it_stood(toy: Toy, tmp_path: Path):
    plan = compile_experiment(few(toy(QUICK, *MIXED)))
    train(plan, tmp_path / "whole")
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 2)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "parts", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "parts", resume=True)
    whole, parts = ([{**r, "time": 0} for r in records(tmp_path / n, "train")] for n in ("whole", "parts"))
    assert whole == parts
    weights = [
        load_file(tmp_path / name / "checkpoints/step_000004/models/policy/policy.safetensors")
        for name in ("whole", "parts")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_limit_on_held_out_rows_takes_some_of_every_source(toy: Toy, tmp_path: Path):
    experiment = few(toy(QUICK, *MIXED))
    plan = compile_experiment(experiment, overrides={"eval.limit": "2", "train.steps": "1"})
    train(plan, tmp_path / "run")
    [record, *_] = records(tmp_path / "run", "eval")
    assert {name: one["tasks"] for name, one in record["sources"].items()} == {"held_out": 1, "seen": 1}


def test_what_a_folder_refuses_is_told_before_a_cluster_is_joined(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy(QUICK))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"kind": "train"}\n')
    away = replace(plan, runtime=Runtime(backend="ray", address="127.0.0.1:9"))
    with pytest.raises(RunError, match="holds a run already"):
        hub.train(away, tmp_path / "run")
    with pytest.raises(RunError, match="holds no run to resume"):
        hub.train(away, tmp_path / "other", resume=True)
    assert not (tmp_path / "other").exists()
    with pytest.raises(RunError, match="no Ray cluster answers"):
        hub.train(away, tmp_path / "other")
