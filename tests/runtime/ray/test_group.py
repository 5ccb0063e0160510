"""A model group on Ray with scripted workers: speed, deaths, repeats, models that learn at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.errors import RunError
from masflow.models.engine import Request, SamplingParams
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime.cluster import RayBackend
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.team import Team
from masflow.spec.mapping import Optimizer
from masflow.spec.runtime import Place, RolloutWorkers, Runtime
from masflow.trace import Message
from tests.runtime.ray.plain_actors import ScriptedWorker


def _plan(*models: str, train: str = "full", workers: int = 1, deterministic: bool = True) -> Plan:
    place = Place(rollout=RolloutWorkers(workers=workers))
    made = tuple(
        ModelIR(
            name,
            None,
            "",
            train,  # type: ignore[arg-type]
            (PolicyIR(name, name, None, (name,), train == "full", Optimizer()),),
            place=place,
        )
        for name in models
    )
    runtime = Runtime(backend="ray", deterministic=deterministic, start_timeout_s=60, call_timeout_s=60)
    return Plan("flow", {}, models=made, runtime=runtime)


def _requests(policy: str, count: int, first: int = 0) -> list[Request]:
    params = SamplingParams(max_tokens=8)
    return [
        Request(f"{policy}-{i}", policy, (Message("user", f"question {i}"),), params, i)
        for i in range(first, first + count)
    ]


@pytest.fixture
def speakers(backend: RayBackend, tmp_path: Path) -> Callable[..., ModelGroup]:
    """`speakers(workers)`: a frozen scripted model with so many rollout workers, ready."""

    def make(workers: int) -> ModelGroup:
        plan = _plan("m", train="frozen", workers=workers)
        group = ModelGroup(plan.models[0], plan, tmp_path, backend, ScriptedWorker)
        group.ready()
        return group

    return make


def test_calls_are_batched_fifteen_hundred_turns_a_second(speakers: Callable[..., ModelGroup]) -> None:
    group = speakers(1)
    group.generate(_requests("m", 64))
    best = 0.0
    for _ in range(5):  # the machine may be busy with something else
        began = time.monotonic()
        for batch in range(8):
            assert len(group.generate(_requests("m", 64, 64 * batch))) == 64
        best = max(best, 512 / (time.monotonic() - began))
        group.clear_rows()
    assert best > 1500, f"{best:.0f} turns/s"


def test_runtime__one_dead_worker_ends_the_job__it_is_started_again(
    speakers: Callable[..., ModelGroup],
) -> None:
    """Row of FIELD_PROBLEMS, Runtime: one dead worker ends the job."""
    group = speakers(2)
    asked = _requests("m", 10)
    before = group.generate(asked)
    victim = group.speakers[1].call("pid").get(30.0)
    os.kill(victim, signal.SIGKILL)
    calls = group.submit(asked)
    found = group.gather(calls)
    assert [found[r.turn_id] for r in asked] == before
    assert len(group.incidents) == 1 and "'m/worker1' died" in group.incidents[0]
    assert group.speakers[1].call("pid").get(30.0) != victim


def test_runtime__a_retried_request_arrives_twice__and_is_kept_once(
    speakers: Callable[..., ModelGroup],
) -> None:
    """Row of FIELD_PROBLEMS, Runtime: a retried request arrives twice and crashes the buffer."""
    group = speakers(1)
    asked = _requests("m", 3)
    first = [group.speakers[0].call("generate", asked) for _ in range(3)]
    assert len({str(pending.get(30.0).replies) for pending in first}) == 1
    rows = group.store.call("known", [r.turn_id for r in asked] * 2).get(30.0)
    assert len({row.turn_id for row in rows}) == 3
    assert [r.turn_id for r in group.generate(asked)] == [r.turn_id for r in asked]


def test_a_dead_store_stops_the_run_and_says_how_to_go_on(speakers: Callable[..., ModelGroup]) -> None:
    group = speakers(1)
    group.store.kill()
    with pytest.raises(RunError, match=r"(?s)'m/store' died.*--resume --out "):
        group.generate(_requests("m", 2))


def test_models_learn_at_once(backend: RayBackend, tmp_path: Path) -> None:
    plan = _plan("a", "b")
    team = Team(plan, tmp_path, backend=backend, worker=ScriptedWorker)
    rows = {name: [TrainRow(f"{name}-0", name, 1.0, 1.0, 0, 1.0)] for name in ("a", "b")}
    team.update(rows, LossSpec(), 0, 2)  # imports what the message needs, which takes its time
    found = team.update(rows, LossSpec(), 1, 2)
    assert list(found) == ["a", "b"] and found["a"]["version"] == found["b"]["version"] == 2.0
    assert max(m["began"] for m in found.values()) < min(m["ended"] for m in found.values())
    team.close()


def test_a_free_worker_takes_what_is_queued(backend: RayBackend, tmp_path: Path) -> None:
    plan = replace(_plan("m", train="frozen", workers=2, deterministic=False))
    team = Team(plan, tmp_path, backend=backend, worker=ScriptedWorker)
    assert team.stream is not None
    team.stream.submit(_requests("m", 8))
    got: set[str] = set()
    while more := team.stream.collect():
        if not got:  # while others are under way
            team.stream.submit(_requests("m", 4, 8))
        got |= {reply.turn_id for reply in more}
    assert got == {f"m-{i}" for i in range(12)}
    assert team.traffic().replies == 12 and team.traffic().batches >= 3
    team.close()
