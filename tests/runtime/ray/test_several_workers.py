"""Whole runs with two trainers and two rollout workers a model: what one of each comes to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.engine import Request, SamplingParams
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime import checkpoints
from masflow.runtime.cluster import RayBackend
from masflow.runtime.controller import train
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.rundir import read_metrics
from masflow.spec.runtime import Place
from masflow.trace import Message

Toy = Callable[..., Path]
STAR = """
backend: ray
deterministic: true
threads: 1
start_timeout_s: 120
call_timeout_s: 120
defaults: {{placement: separate, rollout: {{workers: 2}}, trainer: {{workers: 2, strategy: {strategy}}}}}
"""
FULL = ("algorithm: {use: grpo,", "algorithm: {use: grpo, kl: {weight: 0.1},")
ADAPTERS = (
    "mapping: {models: {policy: {roles: rest}}}",
    "mapping: {models: {policy: {roles: rest, train: lora, adapters: per_role}}}",
)


def _plans(experiment: Path, strategy: str, **overrides: str) -> tuple[Plan, Plan]:
    """The experiment in one process, and on the star."""
    star = experiment.parent / f"{strategy}.yaml"
    star.write_text(STAR.format(strategy=strategy), encoding="utf-8")
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    alone = compile_experiment(experiment, overrides=dotted)
    return alone, compile_experiment(experiment, runtime=star, overrides=dotted)


def _weights(out: Path) -> dict[str, torch.Tensor]:
    place = checkpoints.latest(out / "checkpoints")
    assert place is not None
    files = sorted(place.rglob("*.safetensors"))
    assert files
    return {f"{file.name}:{n}": w for file in files for n, w in load_file(file).items()}


def _gap(one: Path, other: Path) -> float:
    a, b = _weights(one), _weights(other)
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def _moved(out: Path) -> float:
    places = sorted((out / "checkpoints").glob("step_*"))
    first, last = (
        {f"{f.name}:{n}": w for f in place.rglob("*.safetensors") for n, w in load_file(f).items()}
        for place in (places[0], places[-1])
    )
    return max(float((first[n] - last[n]).abs().max()) for n in first.keys() & last.keys())


@pytest.mark.parametrize(("change", "strategy"), [(FULL, "fsdp2"), (ADAPTERS, "ddp")])
def test_two_and_two_learn_what_one_and_one_learn(
    toy: Toy, tmp_path: Path, ray_up: None, change: tuple[str, str], strategy: str
) -> None:
    alone, star = _plans(toy(change), strategy, train__steps="3")
    assert alone.digest == star.digest
    train(alone, tmp_path / "alone")
    train(star, tmp_path / "star")
    moved = _moved(tmp_path / "alone")
    assert moved > 1e-3
    # Gradients add up in another order; Adam lifts that rounding where a gradient is next to nothing.
    assert _gap(tmp_path / "alone", tmp_path / "star") < 1e-3 * moved
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "star"))
    assert [r["kind"] for r in one] == [r["kind"] for r in two]
    assert _losses(two) == pytest.approx(_losses(one), rel=1e-4, abs=1e-6)
    # What four processes saved, one goes on from.
    longer, _ = _plans(toy(change), strategy, train__steps="4")
    for name in ("alone", "star"):
        train(longer, tmp_path / name, resume=True)
    assert _gap(tmp_path / "alone", tmp_path / "star") < 1e-3 * moved


def _losses(records: list[dict[str, Any]]) -> list[float]:
    found = [value for r in records for key, value in sorted(_flat(r)) if key.endswith("loss")]
    assert len(found) > 3
    return found


def _flat(record: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in record.items():
        inner = f"{path}/{key}"
        pairs += _flat(value, inner) if isinstance(value, dict) else [(inner, value)]
    return pairs


def test_a_trainer_that_dies_among_several_ends_the_run_at_once_and_is_named(
    toy: Toy, tmp_path: Path, backend: RayBackend
) -> None:
    _, plan = _plans(toy(ADAPTERS), "ddp")
    place = Place.model_validate({"trainer": {"workers": 2}})
    plan = replace(plan, models=(replace(plan.models[0], place=place),))
    group = ModelGroup(plan.models[0], plan, tmp_path / "run", backend)
    group.ready()
    policy = plan.policies[0].name

    def step(number: int) -> dict[str, float]:
        asked = [
            Request(f"{number}.{i}", policy, (Message("user", "say red"),), SamplingParams(max_tokens=3), i)
            for i in range(4)
        ]
        rows = [
            TrainRow(reply.turn_id, policy, (-1.0) ** i, 0.1, 0, 1.0)
            for i, reply in enumerate(group.generate(asked))
        ]
        return group.update(policy, rows, LossSpec(), number, 4)

    assert step(0)["version"] == 1
    group.learners[1].kill()
    began = time.monotonic()
    with pytest.raises(RunError, match=r"(?s)'policy/trainer1' died.*--resume --out "):
        step(1)
    assert time.monotonic() - began < 30
    group.close()
