"""Whole runs on Ray against the same run in one process: equal to the last bit, through stops and deaths."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.saving import checksum
from masflow.runtime import controller, hub
from masflow.runtime.cluster import RayActor, RayPending
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.team import Team

Toy = Callable[..., Path]
RAY = "{backend: ray, deterministic: true, threads: 1, start_timeout_s: 120, call_timeout_s: 120}"
APART = RAY.replace("}", ", defaults: {placement: separate}}")
FIVE = ("steps: 4, tasks_per_step: 3", "steps: 5, tasks_per_step: 3")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory, toy_at: Toy) -> Callable[[str], Plan]:
    """`plans(runtime)`: the toy experiment on a runtime."""
    root = tmp_path_factory.mktemp("toy")
    experiment = toy_at(root, FIVE)
    # Slow enough that a stop, which takes some tenths of a second to arrive, comes before the run's end.
    slow = "    time.sleep(0.03)\n    print('rewarding', said)\n    return"
    text = (root / "echo.py").read_text().replace("    return", slow)
    (root / "echo.py").write_text("import time\n" + text)

    def plan(runtime: str) -> Plan:
        file = root / "runtime.yaml"
        file.write_text(runtime)
        return compile_experiment(experiment, runtime=file)

    return plan


@pytest.fixture(scope="module")
def alone(plans: Callable[[str], Plan], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, from beginning to end."""
    out = tmp_path_factory.mktemp("alone") / "run"
    controller.train(plans("{backend: local}"), out)
    return out


def _records(out: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k != "time"} for record in read_metrics(out / "metrics.jsonl")
    ]


def _weights(out: Path, step: int = 5) -> dict[str, str]:
    folder = out / f"checkpoints/step_{step:06d}/models"
    return {str(f.relative_to(folder)): checksum(load_file(f)) for f in folder.rglob("*.safetensors")}


def test_a_run_on_ray_stopped_and_killed_ends_where_one_process_ends(
    plans: Callable[[str], Plan],
    alone: Path,
    ray_up: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan, out, stop = plans(RAY), tmp_path / "run", StopFlag()
    kinds: list[str] = []

    def stop_after_one(kind: str, facts: dict[str, Any]) -> None:
        kinds.append(kind)
        stop.requested = stop.requested or kind == "train"

    with pytest.raises(Interrupted, match=f"continue with --resume --out {out}"):
        hub.train(plan, out, on_event=stop_after_one, stop=stop)
    assert kinds[0] == "start" and {"warm_start", "eval", "stage", "warning", "checkpoint"} <= set(kinds)
    assert capsys.readouterr().err.count("rewarding") > 20

    def kill_after_three(kind: str, facts: dict[str, Any]) -> None:
        if kind == "train" and facts["step"] >= 3:
            command, process = map(int, (out / ".lock").read_text().split())
            assert command == os.getpid()  # whom somebody who wants the folder has to stop
            os.kill(process, signal.SIGKILL)

    with pytest.raises(RunError, match=f"(?s)'controller' died.*--resume --out {out}"):
        hub.train(plan, out, resume=True, on_event=kill_after_three)
    hub.train(plan, out, resume=True)
    assert _weights(out) == _weights(alone)
    assert json.dumps(_records(out)) == json.dumps(_records(alone))
    assert all(r["concurrency"] > 1 for r in _records(out) if r["kind"] == "train")


class Messages:
    """Bytes of everything that the hub sends and gets, and how many of them are text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.sent = self.text = 0
        call, get = RayActor.call, RayPending.get

        def counted_call(actor: RayActor, method: str, *args: Any) -> RayPending:
            self.sent += len(cloudpickle.dumps([a for a in args if not isinstance(a, RayPending)]))
            if method == "generate":
                self.text += sum(len(m.content.encode()) for request in args[0] for m in request.messages)
            return call(actor, method, *args)

        def counted_get(pending: RayPending, timeout_s: float) -> Any:
            value = get(pending, timeout_s)
            self.sent += len(cloudpickle.dumps(value))
            if pending.method == "generate":
                self.text += sum(len(reply.text.encode()) for reply in value.replies)
            return value

        monkeypatch.setattr(RayActor, "call", counted_call)
        monkeypatch.setattr(RayPending, "get", counted_get)


def test_workers_apart_give_the_same_weights_one_comes_back_and_the_others_death_ends_the_run(
    plans: Callable[[str], Plan], alone: Path, ray_up: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teams: list[Team] = []

    class Watched(Team):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            teams.append(self)

    monkeypatch.setattr(controller, "Team", Watched)
    messages = Messages(monkeypatch)
    counts: list[tuple[int, int, int]] = []
    warnings: list[str] = []

    def watch(kind: str, facts: dict[str, Any]) -> None:
        if kind == "warning":
            warnings.append(facts["message"])
        if kind != "train":
            return
        turns = sum(role["turns"] for role in facts["roles"].values())
        counts.append((messages.sent, messages.text, turns))
        [group] = teams[-1].groups.values()
        if facts["step"] == 2:
            group.speakers[0].kill()  # type: ignore[union-attr]
        if facts["step"] == 4:
            group.learners[0].kill()  # type: ignore[union-attr]

    out = tmp_path / "run"
    with pytest.raises(RunError, match=f"(?s)'policy/trainer0' died.*--resume --out {out}"):
        controller.train(plans(APART), out, on_event=watch)
    assert [r.get("worker_restarts") for r in _records(out) if r["kind"] == "train"] == [None, None, 1, None]
    assert any("'policy/rollout0' died" in w and "last published weights" in w for w in warnings)
    (sent, text, _), (sent_after, text_after, turns) = counts[0], counts[1]
    a_turn = (sent_after - sent - (text_after - text)) / turns
    assert 0 < a_turn <= 4096, f"{a_turn:.0f} bytes a turn beside its text"
    controller.train(plans("{backend: local}"), out, resume=True)
    assert _weights(out) == _weights(alone)
    ours, theirs = _records(out), _records(alone)
    # Apart a trainer's probe is compared, together a reply of the engine: each gap is rounding of its own.
    gaps = [f.pop("delivery_gap", 0.0) for r in (*ours, *theirs) for f in r.get("policies", {}).values()]
    assert gaps and max(gaps) < 1e-5
    assert [r.get("policies") for r in ours] == [r.get("policies") for r in theirs]
