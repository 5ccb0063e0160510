"""Payloads: what leaves a trainer arrives bit for bit, adapters alone, and a torn one is refused by name."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.bases import load_base
from masflow.models.policies import Policies
from masflow.models.publishing import Payload, Probe, as_tensor
from masflow.models.weights import checksum, digest_of

MakePlan = Callable[..., Plan]


def _policies(plan: Plan, run_dir: Path) -> Policies:
    return Policies(plan.models[0], load_base(plan.models[0], run_dir, plan.train.seed), plan.train.seed)


def _move(policies: Policies, *, backbone: bool = False) -> None:
    """Change what training would change."""
    torch.manual_seed(4)
    learners = [policies.backbone] if backbone else list(policies.learners.values())
    with torch.no_grad():
        for learner in learners:
            for parameter in learner.parameters.values():
                parameter += 0.1 * torch.randn_like(parameter)
    for name in policies.versions:
        policies.versions[name] += 1


def _everything(policies: Policies) -> dict[str, torch.Tensor]:
    found = {n: p.detach().clone() for n, p in policies.base.model.named_parameters()}
    return found


def _same(a: Policies, b: Policies) -> bool:
    first, second = _everything(a), _everything(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def _sent(payload: Payload) -> Payload:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(payload))


@pytest.mark.parametrize(("train", "freeze"), [("full", ()), ("full", ("embeddings",)), ("none", ())])
def test_a_full_policy_arrives_bit_for_bit(
    group_plan: MakePlan, config_base: Callable[..., object], tmp_path: Path, train: str, freeze: tuple[str]
) -> None:
    plan = group_plan(train, base=config_base(freeze=freeze))
    trainer, speaker = _policies(plan, tmp_path / "a"), _policies(plan, tmp_path / "b")
    assert _same(trainer, speaker)
    _move(trainer)
    payload = trainer.payload("m")
    assert not payload.base and not _same(trainer, speaker)
    speaker.receive(_sent(payload))
    assert _same(trainer, speaker) and speaker.versions == {"m": 1}
    assert payload.checksum == checksum(speaker.learners["m"].parameters)


def test_one_adapter_travels_alone_and_reaches_only_its_policy(group_plan: MakePlan, tmp_path: Path) -> None:
    # FIELD_PROBLEMS: "the adapter never reached the rollout engine"; "helpers read the adapter called
    # 'default' only".
    plan = group_plan("lora", ("asker", "solver", "judge"))
    trainer, speaker = _policies(plan, tmp_path / "a"), _policies(plan, tmp_path / "b")
    _move(trainer)
    payload = trainer.payload("m/solver")
    adapter = sum(p.numel() * 4 for p in trainer.learners["m/solver"].parameters.values())
    assert payload.num_bytes == adapter and not payload.base
    before = checksum(speaker.learners["m/asker"].parameters)
    speaker.receive(_sent(payload))
    for name in ("asker", "solver", "judge"):
        mine, theirs = (p.learners[f"m/{name}"].parameters for p in (trainer, speaker))
        assert (checksum(mine) == checksum(theirs)) == (name == "solver")
    assert checksum(speaker.learners["m/asker"].parameters) == before
    assert speaker.versions == {"m/asker": 0, "m/solver": 1, "m/judge": 0}
    for name in ("asker", "judge"):
        speaker.receive(trainer.payload(f"m/{name}"))
    assert _same(trainer, speaker)


def test_a_warm_started_backbone_goes_along_once(group_plan: MakePlan, tmp_path: Path) -> None:
    plan = group_plan("lora", ("asker", "solver"))
    trainer, speaker = _policies(plan, tmp_path / "a"), _policies(plan, tmp_path / "b")
    with trainer.learning_backbone():
        _move(trainer, backbone=True)
    # What one new worker gets is not yet with the others.
    assert trainer.payload("m/solver", whole=True).base
    first, second = trainer.payload("m/asker"), trainer.payload("m/solver")
    assert set(first.base) == set(trainer.backbone.parameters) and not second.base
    speaker.receive(_sent(first))
    speaker.receive(_sent(second))
    assert _same(trainer, speaker)
    # A rollout worker that was started again has nothing but the base.
    late = _policies(plan, tmp_path / "c")
    late.receive(trainer.payload("m/asker", whole=True))
    late.receive(trainer.payload("m/solver"))
    assert _same(trainer, late)
    # What it saves is what a trainer would save: the backbone is part of it.
    (tmp_path / "saved").mkdir()
    late.save(tmp_path / "saved")
    again = _policies(plan, tmp_path / "d")
    again.load(tmp_path / "saved")
    assert _same(trainer, again) and set(again.payload("m/asker").base) == set(first.base)


def test_bfloat16_travels_as_its_bits(group_plan: MakePlan, tmp_path: Path) -> None:
    plan = group_plan()
    plan = replace(plan, models=(replace(plan.models[0], dtype="bfloat16"),))
    trainer, speaker = _policies(plan, tmp_path / "a"), _policies(plan, tmp_path / "b")
    _move(trainer)
    payload = _sent(trainer.payload("m"))
    name = next(iter(payload.tensors))
    assert payload.tensors[name].dtype == np.uint16 and payload.dtypes[name] == "bfloat16"
    wanted = trainer.learners["m"].parameters[name]
    assert torch.equal(as_tensor(payload.tensors[name], "bfloat16"), wanted)
    speaker.receive(payload)
    assert _same(trainer, speaker)


def test_training_goes_on_while_a_payload_travels(group_plan: MakePlan, tmp_path: Path) -> None:
    trainer = _policies(group_plan(), tmp_path)
    payload = trainer.payload("m")
    _move(trainer)
    payload.verify()


@pytest.mark.parametrize("damage", ["bit", "lost", "shape"])
def test_a_damaged_payload_is_refused_by_policy_and_tensor(
    group_plan: MakePlan, tmp_path: Path, damage: str
) -> None:
    plan = group_plan("lora", ("asker", "solver"))
    trainer, speaker = _policies(plan, tmp_path / "a"), _policies(plan, tmp_path / "b")
    _move(trainer)
    payload = _sent(trainer.payload("m/solver"))
    name = sorted(payload.tensors)[3]
    if damage == "bit":
        payload.tensors[name].view(np.uint8).reshape(-1)[5] ^= 1
    elif damage == "lost":
        del payload.tensors[name]
    else:
        wrong = np.zeros((2, 2), np.float32)
        payload.tensors[name] = wrong
        payload.checksums[name] = digest_of(name, wrong)
    before = _everything(speaker)
    with pytest.raises(RunError, match=rf"'m/solver' version 1: tensor '{name}'"):
        speaker.receive(payload)
    assert all(torch.equal(before[n], w) for n, w in _everything(speaker).items())
    assert speaker.versions["m/solver"] == 0


def test_arrays_that_may_not_be_written_are_taken(group_plan: MakePlan, tmp_path: Path) -> None:
    plan = group_plan()
    trainer, speaker = _policies(plan, tmp_path / "a"), _policies(plan, tmp_path / "b")
    _move(trainer)
    payload = _sent(trainer.payload("m"))
    for array in payload.tensors.values():
        array.flags.writeable = False
    speaker.receive(payload)
    assert _same(trainer, speaker)


def test_a_probe_tells_the_mean_gap() -> None:
    probe = Probe((1, 2), (3, 4), (-0.5, -1.0))
    assert probe.gap([-0.5, -1.25]) == 0.125
    assert math.isnan(probe.gap([math.nan, -1.0]))
