"""Policies that start from an earlier run's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.worker import Worker
from masflow.spec.mapping import Optimizer
from masflow.trace import Message, Turn

MakePlan = Callable[..., Plan]


@contextmanager
def _group(plan: Plan, run_dir: Path) -> Iterator[ModelGroup]:
    with closing(ModelGroup(plan.models[0], plan, run_dir)) as group:
        yield group


def _inside(group: ModelGroup) -> Worker:
    """The one worker of a group in this process."""
    [actor] = group.learners
    assert isinstance(actor, LocalActor) and isinstance(actor.instance, Worker)
    return actor.instance


def _teach(group: ModelGroup, policy: str) -> None:
    """One supervised step, so that the weights are no longer the base's."""
    turn = Turn(
        "d", (), "n", "asker", "asker", policy, 1, (Message("user", "what is sky"),), "blue", None, True, "ok"
    )
    group.add_rows([turn])
    group.supervise(policy, ["d"], Optimizer(lr=0.05), 0, 1)


def _as_run(group: ModelGroup, run: Path, step: int = 1) -> str:
    """Write a checkpoint in the layout of a run's; the reference to it."""
    place = run / "checkpoints" / f"step_{step:06d}"
    group.save(place / "models" / group.model.name)
    (place / "state.json").write_text(json.dumps({"step": step}))
    return str(run)


def _weights(group: ModelGroup, policy: str) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in _inside(group).policies.learners[policy].parameters.items()}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_full_starts_from_full_without_its_optimizer(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path / "a") as first:
        _teach(first, "m")
        run = _as_run(first, tmp_path / "day1", 3)
        with _group(group_plan(init=f"{run}@3", seed=8), tmp_path / "b") as second:
            assert _same(_weights(first, "m"), _weights(second, "m"))
            assert _inside(second).policies.learners["m"].optimizer is None and second.versions() == {"m": 0}
    absent = group_plan(init=f"{run}@4")
    with pytest.raises(RunError, match="no checkpoint of step '4'"):
        ModelGroup(absent.models[0], absent, tmp_path / "c")


def test_adapters_start_from_a_full_policy(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(names=("asker", "judge")), tmp_path / "a") as first:
        _teach(first, "m")
        run = _as_run(first, tmp_path / "day1")
        with _group(group_plan("lora", ("asker", "judge"), init=run), tmp_path / "b") as second:
            backbone = {n: p.detach() for n, p in _inside(second).policies.backbone.parameters.items()}
            assert _same(_weights(first, "m"), backbone)
            second.save(tmp_path / "saved")
        with _group(group_plan("lora", ("asker", "judge")), tmp_path / "c") as third:
            third.load(tmp_path / "saved")
            assert _same(
                backbone, {n: p.detach() for n, p in _inside(third).policies.backbone.parameters.items()}
            )


def test_an_adapter_starts_from_the_adapter_of_its_role(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("lora", ("asker", "judge")), tmp_path / "a") as first:
        _teach(first, "m")  # the shared backbone
        _teach(first, "m/judge")
        run = _as_run(first, tmp_path / "day1")
        with _group(group_plan("lora", ("judge",), init=run, seed=4), tmp_path / "b") as second:
            assert _same(_weights(first, "m/judge"), _weights(second, "m/judge"))
            assert not _same(_weights(first, "m/asker"), _weights(second, "m/judge"))
            assert _same(
                {n: p.detach() for n, p in _inside(first).policies.backbone.parameters.items()},
                {n: p.detach() for n, p in _inside(second).policies.backbone.parameters.items()},
            )


def test_a_frozen_policy_keeps_what_it_started_from(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path / "a") as first:
        _teach(first, "m")
        run = _as_run(first, tmp_path / "day1")
        with _group(group_plan("frozen", init=run), tmp_path / "b") as second:
            second.save(tmp_path / "saved")
        with _group(group_plan("frozen"), tmp_path / "b") as resumed:
            assert not _same(_weights(first, "m"), _weights(resumed, "m"))
            resumed.load(tmp_path / "saved")
            assert _same(_weights(first, "m"), _weights(resumed, "m"))


@pytest.mark.parametrize("train", ["full", "lora", "frozen"])
def test_weights_that_the_base_freezes_come_along_from_a_run_of_another_seed(
    group_plan: MakePlan, config_base: Any, tmp_path: Path, train: str
) -> None:
    base = config_base(freeze=("embeddings",))
    with _group(group_plan(base=base), tmp_path / "a") as first:
        _teach(first, "m")
        run = _as_run(first, tmp_path / "day1")
        embeddings = _inside(first).base.model.get_input_embeddings().weight.clone()
    plan = group_plan(train, base=base, init=run, seed=8)
    with _group(plan, tmp_path / "b") as second:
        assert torch.equal(_inside(second).base.model.get_input_embeddings().weight, embeddings)
        second.save(tmp_path / "saved")
    with _group(group_plan(train, base=base, seed=8), tmp_path / "b") as resumed:
        assert not torch.equal(_inside(resumed).base.model.get_input_embeddings().weight, embeddings)
        resumed.load(tmp_path / "saved")
        assert torch.equal(_inside(resumed).base.model.get_input_embeddings().weight, embeddings)


def test_a_frozen_base_is_not_written_into_checkpoints(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("frozen"), tmp_path / "a") as group:
        group.save(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (("lora", ("asker",)), ("full", ("asker",)), "holds the adapter"),
        (("lora", ("a", "b")), ("lora", ("c",)), "can't tell which policy"),
    ],
)
def test_what_does_not_fit_is_said(
    group_plan: MakePlan, tmp_path: Path, before: Any, after: Any, message: str
) -> None:
    with _group(group_plan(*before), tmp_path / "a") as first:
        run = _as_run(first, tmp_path / "day1")
    plan = group_plan(*after, init=run)
    with pytest.raises(RunError, match=message):
        ModelGroup(plan.models[0], plan, tmp_path / "b")


def test_other_shapes_are_refused(group_plan: MakePlan, config_base: Any, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path / "a") as first:
        run = _as_run(first, tmp_path / "day1")
    wider = group_plan(base=config_base(intermediate_size=64), init=run)
    with pytest.raises(RunError, match="has shape"):
        ModelGroup(wider.models[0], wider, tmp_path / "b")
