"""Critics in their models' processes on Ray: the same numbers as in one process, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.models.saving import checksum
from masflow.runtime import controller, hub
from masflow.runtime.rundir import read_metrics

Toy = Callable[..., Path]
RAY = "{backend: ray, deterministic: true, threads: 1, start_timeout_s: 120, call_timeout_s: 120}"
CHANGES = (
    ("{policy: {roles: rest}}", "{a: {roles: [caller]}, b: {roles: [echoer]}}"),
    ("{use: grpo, samples: 4, updates_per_step: 2}", "{use: ALGORITHM, samples: 2, updates_per_step: 2}"),
    ("data: {train: tasks.jsonl, eval: held_out.jsonl}", "data: {train: tasks.jsonl}"),
)


def told(out: Path) -> list[dict[str, Any]]:
    records = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    return [{"critics": r["critics"], "policies": r["policies"]} for r in records]


def weights(out: Path) -> dict[str, str]:
    folder = out / "checkpoints/step_000002/models"
    return {str(f.relative_to(folder)): checksum(load_file(f)) for f in folder.rglob("*.safetensors")}


def run(toy_at: Toy, root: Path, algorithm: str, runtime: str, num_steps: int, **more: Any) -> Path:
    experiment = toy_at(root / "toy", *CHANGES, ("steps: 4, tasks", f"steps: {num_steps}, tasks"))
    experiment.write_text(experiment.read_text().replace("ALGORITHM", algorithm))
    file, out = root / "runtime.yaml", root / runtime[10:13]
    file.write_text(runtime)
    train = controller.train if "local" in runtime else hub.train
    train(compile_experiment(experiment, runtime=file), out, **more)
    return out


def test_a_central_critic_and_two_models_on_ray_end_where_one_process_ends(
    toy_at: Toy, ray_up: None, tmp_path: Path
) -> None:
    alone = run(toy_at, tmp_path, "mappo", "{backend: local}", 2)
    run(toy_at, tmp_path, "mappo", RAY, 1)
    out = run(toy_at, tmp_path, "mappo", RAY, 2, resume=True)
    assert told(out) == told(alone)
    assert weights(out) == weights(alone)
    assert {f for f in weights(out) if "critics" in f} == {"a/critics/team.safetensors"}
