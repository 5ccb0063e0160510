"""Settings of algorithms followed from an experiment to what a run reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

Toy = Callable[..., Path]
GRPO = "algorithm: {use: grpo, samples: 4, updates_per_step: 2}"
TWO = ("train: {steps: 4,", "train: {steps: 2,")


def steps(out: Path) -> list[dict[str, Any]]:
    found = [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]
    return [record["policies"]["policy"] for record in found]


def test_importance_sampling_and_a_paid_kl_are_reported_by_a_run(toy: Toy, tmp_path: Path):
    """Engine and trainer are one model here: the mismatch is rounding. Two passes over two mini-batches."""
    algorithm = "algorithm: {use: reinforce_pp, samples: 4, importance: {}, epochs: 2, updates_per_step: 2}"
    train(compile_experiment(toy((GRPO, algorithm), TWO)), tmp_path / "run")
    for found in steps(tmp_path / "run"):
        assert found["optimizer_steps"] == 4 and abs(found["ratio"] - 1) > 1e-5
        assert found["tis_mean"] == pytest.approx(1.0, abs=1e-4) and found["tis_frac"] == 0
        assert 0 <= found["mismatch"] < 1e-8 and found["old_gap"] < 1e-4
    first, second = (found["kl_ref"] for found in steps(tmp_path / "run"))
    assert abs(first) < 1e-6 < abs(second)  # before the first update nobody is away from the reference


def test_without_importance_sampling_log_probs_are_not_computed_again(toy: Toy, tmp_path: Path):
    algorithm = "algorithm: {use: cispo, samples: 4, updates_per_step: 2}"
    train(compile_experiment(toy((GRPO, algorithm), TWO)), tmp_path / "run")
    assert not any("mismatch" in found or "old_gap" in found for found in steps(tmp_path / "run"))


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("use: dapo", ("clip -0.2 +0.28", "weight token_mean", "dynamic sampling, at most 4 rounds")),
        ("use: dapo", ("long replies pay up to 1",)),
        ("use: gspo", ("ratio sequence", "clip -0.0003 +0.0004")),
        ("use: cispo", ("cispo clip -1 +4",)),
        ("use: reinforce_pp", ("kl 0.01 (k1, in the reward)", "advantage batch_norm")),
        ("use: grpo, epochs: 3, dual_clip: 3", ("passes 3", "dual clip 3")),
        ("use: grpo, importance: {cap: 4}", ("importance weights up to 4",)),
        ("use: grpo, clip: none", ("no clip",)),
        ("use: ppo", ("gamma 1, lambda 0.95",)),
    ],
)
def test_explain_tells_what_an_algorithm_came_to(toy: Toy, algorithm: str, says: tuple[str, ...]):
    text = " ".join(explain(compile_experiment(toy((GRPO, f"algorithm: {{{algorithm}}}")))).split())
    for words in says:
        assert words in text, text
