"""A team trains on actions drawn at its nodes: resumed, traced, explained; what can't be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain, plan_summary
from masflow.errors import SpecError
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.tracedb import TraceDb

Toy = Callable[..., Path]
SHORT = (("steps: 4, tasks", "steps: 2, tasks"), ("eval: {samples: 1}", "eval: {limit: 1}"))
FEWER = ("samples: 4, updates", "updates")
OWN = (("level: role, roles: [caller], weight: 0", "level: turn, roles: [caller]"),)


def sampling(toy: Toy, settings: str, change: tuple[str, str] = FEWER, workflow: Any = ()) -> Path:
    file = toy(*SHORT, change, workflow=workflow)
    file.write_text(file.read_text() + f"passes: [node_sampling: {{{settings}}}]\n")
    return file


def records(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != "time"} for one in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize(
    "settings", ["samples: 3, continuations: 2", "samples: 3, max_nodes: 1", "samples: 3, credit: splice"]
)
def test_a_run_repeats_resumes_and_records_every_fork_once(toy: Toy, tmp_path: Path, settings: str):
    plan = compile_experiment(sampling(toy, settings))
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 1)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "run", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "run", resume=True)
    train(plan, tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    record = next(r for r in records(tmp_path / "run") if r["kind"] == "train")
    drawn = record["nodes"]
    assert record["episodes"] == 9 and sum(record["outcomes"].values()) == 3
    assert record["batch"]["trainable_turns"] == 3 * drawn["contexts"] > 0
    with TraceDb(tmp_path / "run" / "trace.sqlite", read_only=True) as db:
        played, advantages = db.trajectories(1, "train"), db.advantages(1)
    turns = [turn.id for one in played for turn in one.trajectory.turns]
    assert len(turns) == len(set(turns)) == sum(drawn[k] for k in drawn if k.endswith("_turns"))
    bases = [one.trajectory for one in played if not one.trajectory.key.fork]
    assert len(bases) == 3 and len({one.trajectory.id for one in played}) == len(played)
    forks = {turn.id for one in played if one.trajectory.key.fork for turn in one.trajectory.turns}
    suffixes = [
        t for one in played for t in one.trajectory.turns if one.trajectory.key.fork and t.superstep > 1
    ]
    assert suffixes and advantages and set(advantages) <= set(turns) and set(advantages) & forks


def test_local_credit_trains_what_pays_by_the_turn(toy: Toy, tmp_path: Path):
    plan = compile_experiment(sampling(toy, "samples: 3, credit: local", workflow=OWN))
    train(plan, tmp_path / "run")
    record = next(r for r in records(tmp_path / "run") if r["kind"] == "train")
    assert record["nodes"]["suffix_turns"] == 0
    assert record["batch"]["caller/trainable_turns"] == 9


def test_explain_shows_how_actions_are_drawn(toy: Toy):
    plan = compile_experiment(sampling(toy, "samples: 3, continuations: 2, temperature: 1.2"))
    told = explain(plan)
    assert "sampler nodes: 3 tasks x 3 samples, temperature 1.2" in told
    assert "3 actions from one context at every trained turn of a base episode; credit rollout" in told
    assert "6·N·(N-1)/2 turns behind them" in told
    assert {g["expected_size"] for g in plan_summary(plan)["groups"]} == {3}
    assert plan_summary(plan)["sampler"] == {
        "kind": "nodes",
        "samples": 3,
        "credit": "rollout",
        "continuations": 2,
    }


@pytest.mark.parametrize(
    ("settings", "change", "code", "said"),
    [
        ("samples: 3", ("seed: 0", "seed: 1"), "samples-twice", "so does algorithm.samples"),
        ("samples: 1", FEWER, "pass-setting", "'samples' is 1; it must be at least 2"),
        (
            "credit: splice, continuations: 2",
            FEWER,
            "option-without-effect",
            "with 'splice' it has no effect",
        ),
        ("credit: locl", FEWER, "pass-setting", "known: rollout, splice, fixed_suffix, local"),
        (
            "samples: 3, temperature: 1.2",
            ("samples: 4, updates", "temperature: 0.7, updates"),
            "temperature-twice",
            "so does algorithm.temperature",
        ),
        ("credit: local", FEWER, "no-local-reward", "a turn's own rewards only"),
        ("credit: local, continuations: 2", FEWER, "option-without-effect", "continuations"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(
    toy: Toy, settings: str, change: tuple[str, str], code: str, said: str
):
    with pytest.raises(SpecError) as caught:
        compile_experiment(sampling(toy, settings, change))
    problem = next(p for p in caught.value.problems if p.code == code)
    assert said in problem.message and problem.line > 0
