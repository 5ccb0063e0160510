"""The small question answering experiments take every step of a run, cut short."""

import json
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.runtime.launch import launch

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "examples" / "small"
SHORT = {
    "warm_start.steps": "60",
    "warm_start.batch": "16",
    "warm_start.optimizer.warmup_steps": "5",
    "train.steps": "1",
    "train.eval_every": "1",
    "train.tasks_per_step": "8",
    "eval.limit": "16",
}
ROLES = {
    "qd_answer": {"decomposer", "answerer"},
    "qd_evidence": {"decomposer", "extractor", "answerer"},
    "m_ask": {"planner", "searcher", "summariser", "updater", "answerer"},
    **{key: {"solo"} for key in ("single_qd_answer", "single_qd_evidence", "single_m_ask")},
}


@pytest.mark.parametrize("name", ROLES)
def test_every_role_has_a_model_of_its_own_by_flag_alone(name):
    shared, separate = (
        compile_experiment(SMALL / f"{name}.yaml", mapping=ROOT / "mappings" / f"{mapping}.yaml")
        for mapping in ("shared", "separate")
    )
    assert {policy.name for policy in shared.policies} == {"policy"}
    assert {policy.name for policy in separate.policies} == {f"own.{role}" for role in ROLES[name]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "qd_evidence" else pytest.mark.learning) for n in ROLES]
)
def test_a_small_experiment_warms_up_every_role_and_takes_a_step(name, tmp_path):
    launch(SMALL / f"{name}.yaml", None, None, SHORT, tmp_path / "run", False, as_json=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["policies"]["policy"]["loss"] for line in lines if line["kind"] == "warm_start"]
    assert len(losses) == 60 and losses[-1] < losses[0] / 2
    (step,) = (line for line in lines if line["kind"] == "train")
    assert set(step["roles"]) == ROLES[name]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, 1]
