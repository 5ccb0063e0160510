"""Whole runs of the toy team whose models speak through vLLM: they learn, are proven, resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.models.vllm_engine import VllmEngine
from masflow.runtime import trial
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

SHARED = "mapping: {models: {policy: {roles: rest}}}"
LORA = "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 4}, adapters: per_role}}}"
RUNTIME = "runtime: {deterministic: false, threads: 1, engine: {use: vllm, memory_frac: 0.1}}\n"
VLLM = ("algorithm:", f"{RUNTIME}algorithm:")
HEADS = ("head_dim: 8", "head_dim: 32")
"""The smallest that vLLM's attention on a CPU takes."""


@pytest.fixture
def team(toy):
    """`team(*changes)`: the toy team's plan, with heads that vLLM takes."""
    return lambda *changes: compile_experiment(toy(HEADS, *changes))


def trained(out: Path) -> list[dict]:
    return [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]


@pytest.mark.parametrize("mapping", [SHARED, LORA], ids=["shared", "lora_per_role"])
def test_a_run_learns_through_vllm_and_every_publication_is_proven(team, tmp_path: Path, mapping):
    plan = team(VLLM, (SHARED, mapping))
    result = train(plan, tmp_path / "run")
    assert result["steps"] == 4
    policies = [facts for record in trained(tmp_path / "run") for facts in record["policies"].values()]
    assert policies
    assert all(facts["delivery_gap"] < 1e-4 for facts in policies)
    assert max(facts["version"] for facts in policies) >= 4 + 1
    # Trainer and engine agree on what was sampled: the first update's ratios begin at 1.
    assert all(abs(facts["ratio_mean"] - 1) < 0.05 for facts in policies if "ratio_mean" in facts)


def test_a_run_resumes_and_its_checkpoint_speaks_the_same_in_both_engines(team, tmp_path: Path):
    short = ("steps: 4, tasks", "steps: 2, tasks")
    train(team(VLLM, short), tmp_path / "run")
    train(team(VLLM, ("steps: 4, tasks", "steps: 3, tasks")), tmp_path / "run", resume=True)
    assert [record["step"] for record in trained(tmp_path / "run")] == [1, 2, 3]
    ours = trial.evaluate_checkpoint(team(), str(tmp_path / "run"), "eval", None, 0)
    theirs = trial.evaluate_checkpoint(team(VLLM), str(tmp_path / "run"), "eval", None, 0)
    assert theirs["metrics"] == ours["metrics"]


def test_a_later_run_starts_from_adapters_that_vllm_is_given_before_it_speaks(team, tmp_path: Path):
    warm = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}"
    train(team((SHARED, LORA)), tmp_path / "first")
    again = team(VLLM, (SHARED, LORA), (warm, f"init: {tmp_path / 'first'}"))
    ours = trial.evaluate_checkpoint(team((SHARED, LORA)), str(tmp_path / "first"), "eval", None, 0)
    result = train(again, tmp_path / "second")
    assert result["eval_before"]["metrics"] == ours["metrics"]


def test_two_models_have_an_engine_each(team, tmp_path: Path):
    mapping = "mapping: {models: {own: {roles: rest, per: role}}}"
    train(
        team(VLLM, (SHARED, mapping), ("steps: 4, tasks", "steps: 2, tasks")),
        tmp_path / "r",
    )
    names = {name for record in trained(tmp_path / "r") for name in record["policies"]}
    assert names == {"own.caller", "own.echoer"}


def test_a_publication_that_does_not_arrive_ends_the_run_and_names_the_policy(
    team, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(VllmEngine, "receive", lambda self, payload: None)
    with pytest.raises(RunError, match="policy 'policy' was not delivered"):
        train(team(VLLM), tmp_path / "run")


def test_apart_a_worker_that_only_speaks_is_sent_what_another_trains(team, tmp_path: Path):
    """Two workers in this process: the trainer's weights reach the other one's vLLM as a payload."""
    plan = team(VLLM)
    placed = plan.models[0].place.model_copy(update={"placement": "separate"})
    plan = replace(plan, models=(replace(plan.models[0], place=placed),))
    train(plan, tmp_path / "run")
    assert all(f["delivery_gap"] < 1e-4 for r in trained(tmp_path / "run") for f in r["policies"].values())


def test_on_ray_a_worker_with_vllm_is_sent_what_the_trainer_trains(team, tmp_path: Path):
    on_ray = "runtime: {backend: ray, threads: 1, engine: {use: vllm, memory_frac: 0.1}}\n"
    plan = team(("algorithm:", f"{on_ray}algorithm:"), ("steps: 4, tasks", "steps: 2, tasks"), (SHARED, LORA))
    train(plan, tmp_path / "run")
    found = [f for r in trained(tmp_path / "run") for f in r["policies"].values()]
    assert found and all(facts["delivery_gap"] < 1e-4 for facts in found)
