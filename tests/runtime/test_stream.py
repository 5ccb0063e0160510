"""Requests that are answered as they come: a worker that dies among them, and models that speak at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.engine import Request, SamplingParams
from masflow.runtime.controller import train
from masflow.runtime.local import LocalBackend
from masflow.runtime.rundir import read_metrics
from masflow.runtime.team import Team
from masflow.runtime.worker import Worker
from masflow.spec.runtime import Place, Runtime
from masflow.trace import Message

Toy = Callable[..., Path]
TWO = Place.model_validate({"placement": "separate", "rollout": {"workers": 2}})


@pytest.fixture
def free(toy: Toy) -> Plan:
    """The toy plan, two workers that speak and one that learns, without barriers."""
    plan = compile_experiment(toy())
    models = tuple(replace(model, place=TWO) for model in plan.models)
    return replace(plan, models=models, runtime=Runtime(deterministic=False, threads=1))


def _requests(count: int) -> list[Request]:
    asked = (Message("user", "say red"),)
    return [Request(f"t{i}", "policy", asked, SamplingParams(max_tokens=3), i) for i in range(count)]


def test_a_worker_that_dies_with_requests_comes_back_and_answers_them(free: Plan, tmp_path: Path) -> None:
    backend = LocalBackend()
    team = Team(free, tmp_path, backend=backend)
    try:
        assert team.stream is not None
        wanted = {r.turn_id: r.text for r in team.generate(_requests(8))}
        backend.actors["policy/rollout1"].kill()
        team.stream.submit(_requests(8))
        found: dict[str, str] = {}
        while more := team.stream.collect():
            found |= {reply.turn_id: reply.text for reply in more}
        assert found == wanted
        assert ["'policy/rollout1' died" in text for text in team.incidents()] == [True]
    finally:
        team.close()


def test_requests_join_those_that_are_being_answered_and_short_replies_come_first(
    toy: Toy, tmp_path: Path
) -> None:
    plan = replace(compile_experiment(toy()), runtime=Runtime(deterministic=False, threads=1))
    team = Team(plan, tmp_path)
    try:
        assert team.stream is not None
        said = (Message("user", "say red"),)
        asked = [Request(f"l{i}", "policy", said, SamplingParams(2.0, max_tokens=40), i) for i in range(40)]
        heard = team.generate(asked)
        long = [a for a, r in zip(asked, heard, strict=True) if r.reply_tokens > 9][:4]
        short = [Request(f"s{i}", "policy", said, SamplingParams(2.0, max_tokens=2), i) for i in range(4)]
        assert len(long) == 4
        wanted = {r.turn_id: r.text for r in team.generate([*long, *short])}
        before = team.traffic()
        team.stream.submit([*long, short[0]])
        found = team.stream.collect()
        assert [r.turn_id for r in found] == ["s0"]
        team.stream.submit(short[1:])
        later: list[str] = []
        while more := team.stream.collect():
            later += [reply.turn_id for reply in more]
            found += more
        assert {r.turn_id: r.text for r in found} == wanted
        assert set(later[:3]) == {"s1", "s2", "s3"}
        # One batch that others joined, not one after the other.
        assert team.traffic().batches - before.batches <= 3
        team.stream.submit(long)
        team.stream.collect()
        team.stream.clear()
        team.stream.submit(short)
        rest: set[str] = set()
        while more := team.stream.collect():
            rest |= {reply.turn_id for reply in more}
        assert rest == {request.turn_id for request in short}
    finally:
        team.close()


def test_a_whole_run_without_barriers_outlives_a_worker_and_not_its_trainer(
    free: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LocalBackend] = []

    class Watched(LocalBackend):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("masflow.runtime.team.LocalBackend", Watched)
    warnings: list[str] = []

    def watch(kind: str, facts: dict[str, Any]) -> None:
        if kind == "warning":
            warnings.append(facts["message"])
        if kind == "train" and facts["step"] == 1:
            made[-1].actors["policy/rollout0"].kill()
        if kind == "train" and facts["step"] == 3:
            made[-1].actors["policy/trainer0"].kill()

    out = tmp_path / "run"
    with pytest.raises(RunError, match=f"(?s)'policy/trainer0' died.*--resume --out {out}"):
        train(free, out, on_event=watch)
    assert any("'policy/rollout0' died" in text and "last published" in text for text in warnings)
    assert train(free, out, resume=True)["steps"] == 4
    steps = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert all(
        f["delivery_gap"] < 1e-4 and f["staleness"] == 0 for r in steps for f in r["policies"].values()
    )


def test_all_models_are_asked_before_any_is_waited_for(toy: Toy, tmp_path: Path) -> None:
    """Groups speak at once where their processes are apart."""
    told: list[tuple[str, str]] = []

    class Later:
        """A call that is made when it is waited for, as one in another process may be."""

        def __init__(self, name: str, method: str, pending: Any):
            self.name, self.method, self.pending = name, method, pending

        def done(self) -> bool:
            return True

        def get(self, timeout_s: float) -> Any:
            if self.method == "generate":
                told.append(("waits", self.name))
            return self.pending.get(timeout_s)

    class Apart(LocalBackend):
        def spawn(self, name: str, cls: type, *args: Any, ask: Any = None) -> Any:
            actor: Any = super().spawn(name, cls, *args, ask=ask)
            if not issubclass(cls, Worker):
                return actor
            call = actor.call

            def asked(method: str, *args: Any) -> Any:
                if method == "generate":
                    told.append(("asks", name))
                return Later(name, method, call(method, *args))

            actor.call = asked
            return actor

    mapping = "mapping: {models: {own: {roles: rest, per: role}}}"
    plan = compile_experiment(toy(("mapping: {models: {policy: {roles: rest}}}", mapping)))
    team = Team(plan, tmp_path, backend=Apart())
    try:
        params = SamplingParams(max_tokens=2)
        team.generate(
            [Request(p, p, (Message("user", "say red"),), params, 0) for p in ("own.caller", "own.echoer")]
        )
    finally:
        team.close()
    assert [what for what, _ in told] == ["asks", "asks", "waits", "waits"]
    assert len({who for what, who in told if what == "asks"}) == 2
