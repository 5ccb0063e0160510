"""Runs whose roles hold conversations: what they go on from is computed once, and a run still repeats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.models.saving import checksum
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

Toy = Callable[..., Path]
LONG = "red green blue white black pink grey brown " * 4
TALK = (
    (
        '{prompt: "say {{ word }}"',
        f'{{conversation: role, next_prompt: "say it", prompt: "{LONG} {{{{ word }}}}"',
    ),
    (
        "edges: [start -> call -> echo -> end]",
        "edges: [start -> call, call -> call when visits.call < 3, call -> echo -> end]",
    ),
)
SIZES = ("max_position_embeddings: 64", "max_position_embeddings: 96")
STEPS = ("steps: 4, tasks_per_step: 3", "steps: 3, tasks_per_step: 3")
COLD = ("warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n", "")


def _steps(out: Path) -> list[dict[str, Any]]:
    found = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    return [{k: v for k, v in r.items() if k != "time"} for r in found]


def _weights(out: Path) -> list[str]:
    return [checksum(load_file(f)) for f in sorted(out.glob("checkpoints/step_000003/**/*.safetensors"))]


def test_a_run_with_a_prefix_cache_repeats_and_resumes_bit_for_bit(toy: Toy, tmp_path: Path) -> None:
    experiment = toy(SIZES, STEPS, COLD, workflow=TALK)
    plan = compile_experiment(experiment)
    train(plan, tmp_path / "whole")

    def stop(kind: str, facts: dict[str, Any]) -> None:
        if kind == "train" and facts["step"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(plan, tmp_path / "parts", on_event=stop)
    assert len(_steps(tmp_path / "parts")) < 3
    train(plan, tmp_path / "parts", resume=True)
    whole = _steps(tmp_path / "whole")
    assert len(whole) == 3 and all(step["cached_tokens"] > 100 for step in whole)
    assert json.dumps(whole) == json.dumps(_steps(tmp_path / "parts"))
    assert _weights(tmp_path / "whole") == _weights(tmp_path / "parts") != []


def test_a_run_without_one_draws_the_same_replies(toy: Toy, tmp_path: Path) -> None:
    experiment = toy(
        SIZES, ("steps: 4, tasks_per_step: 3", "steps: 1, tasks_per_step: 3"), COLD, workflow=TALK
    )
    off = compile_experiment(experiment, overrides={"runtime.engine.prefix_cache_bytes": "0"})
    train(compile_experiment(experiment), tmp_path / "on")
    train(off, tmp_path / "off")
    [on], [plain] = _steps(tmp_path / "on"), _steps(tmp_path / "off")
    assert on.pop("cached_tokens") > 100 and "cached_tokens" not in plain
    assert (on["rewards"], on["tokens"], on["roles"]) == (plain["rewards"], plain["tokens"], plain["roles"])
