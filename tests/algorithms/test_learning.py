"""Every algorithm learns a toy of about ten seconds: two roles that must say nothing but 'blue'.

Before RL they say it once in three hundred words; 32 steps of 8 tasks bring most algorithms above 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from masflow.compiler import compile_experiment
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics
from masflow.spec.experiment import ALGORITHMS

Toy = Callable[..., Path]
GRPO = "algorithm: {use: grpo, samples: 4, updates_per_step: 2}"
SCHEDULE = "train: {steps: 4, tasks_per_step: 3, seed: 0, save_every: 1, keep: 8, optimizer: {lr: 1.0e-2}}"
LONGER = "train: {steps: 32, tasks_per_step: 8, seed: 0, optimizer: {lr: 1.0e-2}}"
TEAM = """
rewards:
  - {name: blue, use: "echo.py:blue", otherwise: 0,
     args: {said: "{{ call.text }} {{ echo.text }}"}}
"""
TURNS = """
rewards:
  - {name: blue, use: "echo.py:blue", level: turn, otherwise: 0,
     args: {said: "{{ result.text }} {{ result.text }}"}}
"""
BLUE = """
def blue(said: str) -> float:
    return said.split().count("blue") / 6
"""
"""Share of the six words that both may say."""
APART = ("at_grpo",)
"""Compares turns by their own rewards."""
FIRST = ("grpo", "gspo", "turn_ppo", "at_grpo")
"""Stand for all where time is short."""
IN_CALLS = ("m_grpo",)
"""Needs sub-agents in a sub-workflow, which the toy has not."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST else pytest.mark.learning)
        for name in ALGORITHMS
        if name not in IN_CALLS
    ],
)
def test_it_learns_a_toy(toy: Toy, tmp_path: Path, name: str):
    samples = ", samples: 4" if name in ("ppo", "turn_ppo", "ippo", "mappo") else ""
    # All of the toy's replies fill their budget of three words, which dapo's published penalty is about.
    more = ", overlong: false" if name == "dapo" else samples
    algorithm = f"algorithm: {{use: {name}{more}, updates_per_step: 2}}"
    file = toy((GRPO, algorithm), (SCHEDULE, LONGER))
    workflow = file.with_name("echo_workflow.yaml")
    head = workflow.read_text().split("rewards:")[0].rstrip()
    workflow.write_text(head + (TURNS if name in APART else TEAM))
    file.with_name("echo.py").write_text(BLUE)
    train(compile_experiment(file), tmp_path / "run")
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    rewards = [record["rewards"]["blue"] for record in steps]
    ratios = [abs(m["ratio"] - 1) for record in steps for m in record["policies"].values()]
    assert max(ratios) > 1e-4, "every ratio is 1: two updates a batch are off-policy"
    assert fmean(rewards[:3]) < 0.05 and fmean(rewards[-3:]) > 0.25, rewards
