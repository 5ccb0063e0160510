"""Settings of the engine follow each model to the worker that speaks for it; adapters speak as they come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from masflow.compiler import compile_experiment
from masflow.models.bare import BareSpeaker
from masflow.models.engine import Request, SamplingParams
from masflow.models.speaking import ModuleSpeaker
from masflow.models.transformers_engine import TransformersEngine
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.team import Team
from masflow.runtime.worker import Worker
from masflow.spec.runtime import Runtime
from masflow.trace import Message

Toy = Callable[..., Path]
SHARED = "mapping: {models: {policy: {roles: rest}}}"
EACH = "mapping: {models: {own: {roles: rest, per: role}}}"
ADAPTERS = "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 2}, adapters: per_role}}}"
OWN = """runtime:
  backend: ray
  threads: 1
  engine: {max_batch_tokens: 300}
  models:
    own.caller: {rollout: {engine: {decoder: modules, prefix_cache_bytes: 0, max_batch_tokens: 77}}}
algorithm:"""


def test_a_models_own_engine_settings_reach_its_worker(toy: Toy, tmp_path: Path) -> None:
    # FIELD_PROBLEMS, Mapping: a model's own batch size is ignored because code reads the base config.
    plan = compile_experiment(toy((SHARED, EACH), ("algorithm:", OWN)))

    def engine(name: str) -> TransformersEngine:
        [model] = [one for one in plan.models if one.name == name]
        with closing(ModelGroup(model, plan, tmp_path / name)) as group:
            [actor] = group.learners
            assert isinstance(actor, LocalActor) and isinstance(actor.instance, Worker)
            assert isinstance(actor.instance.engine, TransformersEngine)
            return actor.instance.engine

    told, usual = engine("own.caller"), engine("own.echoer")
    assert isinstance(told.speaker(), ModuleSpeaker) and isinstance(usual.speaker(), BareSpeaker)
    assert (told.max_batch_tokens, usual.max_batch_tokens) == (77, 300)
    assert told._prefixes is None and usual._prefixes is not None


def test_requests_of_two_adapters_join_one_batch_as_they_come(toy: Toy, tmp_path: Path) -> None:
    plan = compile_experiment(toy((SHARED, ADAPTERS)))
    with closing(Team(replace(plan, runtime=Runtime(deterministic=False, threads=1)), tmp_path)) as team:
        assert team.stream is not None
        first, second = (policy.name for policy in team.policies)
        said = (Message("user", "say red"),)
        asked = [
            Request(f"{policy}-{i}", policy, said, SamplingParams(2.0, max_tokens=2 + 6 * i), i)
            for i in range(3)
            for policy in (first, second)
        ]
        wanted = {r.turn_id: r.text for r in team.generate(asked)}
        before = team.traffic().batches
        found: dict[str, str] = {}
        team.stream.submit([request for request in asked if request.policy == first])
        found |= {r.turn_id: r.text for r in team.stream.collect()}
        team.stream.submit([request for request in asked if request.policy == second])
        while more := team.stream.collect():
            found |= {r.turn_id: r.text for r in more}
        assert found == wanted
        assert team.traffic().batches - before <= 2
