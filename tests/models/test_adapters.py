"""Adapters side by side in one batch against each alone, as PEFT computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from masflow.compiler.plan import Plan
from masflow.models import adapters
from masflow.models.adapters import StackedAdapters
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base
from masflow.models.policies import Policies
from masflow.spec.mapping import Lora

Make = Callable[..., Backbone]
NAMES = ("a", "b", "c", "d")


def _adapted(make: Make, family: str = "qwen3", dtype: torch.dtype = torch.float32) -> Backbone:
    """Four adapters with weights that change what the model says."""
    backbone = make(family, dtype)
    targets = "all-linear" if family == "gpt2" else ("q_proj", "v_proj", "down_proj")
    adapters.attach(backbone.model, dict.fromkeys(NAMES, Lora(rank=4, alpha=8, targets=targets)), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        for path, weight in adapters.adapter_parameters(backbone.model, name).items():
            if "lora_B" in path:
                weight.data.normal_(0, 0.3, generator=generator)
    return backbone


def _alone(backbone: Backbone, ids_BT: Tensor, names: Sequence[str | None]) -> Tensor:
    """Every row on its own, PEFT's way."""
    out = []
    for ids_T, name in zip(ids_BT, names, strict=True):
        if name is None:
            with adapters.switched_off(backbone.model):
                out.append(backbone.logits(backbone.hidden(ids_T[None])[0]))
        else:
            adapters.activate(backbone.model, name)
            out.append(backbone.logits(backbone.hidden(ids_T[None])[0]))
    return torch.stack(out)


def _together(
    backbone: Backbone, stacked: StackedAdapters, ids_BT: Tensor, names: Sequence[str | None]
) -> Tensor:
    with stacked.rows(names):
        hidden = backbone.hidden(ids_BT)
    return torch.stack([backbone.logits(h) for h in hidden])


IDS = torch.randint(5, 140, (7, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gpt2"])
@pytest.mark.parametrize(
    "names", [("a", "b", "b", "c", None, "d", "d"), ("c",) * 7, (None,) * 7, (None, *"bbbbbb")]
)
def test_rows_of_different_adapters_are_as_each_alone(
    backbone: Make, family: str, names: tuple[str | None, ...]
) -> None:
    model = _adapted(backbone, family)
    stacked = StackedAdapters(model.model, NAMES)
    alone = _alone(model, IDS, names)
    torch.testing.assert_close(_together(model, stacked, IDS, names), alone, rtol=1e-5, atol=2e-5)
    assert len({float(row.sum()) for row in _alone(model, IDS[:1].expand(5, -1), (*NAMES, None))}) == 5


@torch.no_grad()
def test_float32_adapters_stand_on_a_bf16_backbone(backbone: Make) -> None:
    model = _adapted(backbone, dtype=torch.bfloat16)
    names = ("a", "b", "b", "c", None, "d", "d")
    together = _together(model, StackedAdapters(model.model, NAMES), IDS, names)
    alone = _alone(model, IDS, names)
    assert float((together - alone).abs().max()) < 0.03 * float(alone.abs().max())


@torch.no_grad()
def test_ranks_may_differ(backbone: Make) -> None:
    model = backbone("llama")
    for name, rank in (("a", 2), ("b", 5)):
        adapters.attach(model.model, {name: Lora(rank=rank, alpha=8)}, seed=rank)
        for path, weight in adapters.adapter_parameters(model.model, name).items():
            if "lora_B" in path:
                weight.data.normal_(0, 0.3)
    names = ("a", "b", "a", None, "b", "b", "a")
    together = _together(model, StackedAdapters(model.model, ["a", "b"]), IDS, names)
    torch.testing.assert_close(together, _alone(model, IDS, names), rtol=1e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "assigned", "through data"])
@pytest.mark.parametrize("names", ["aabbccd", "aaaaaaa"])
def test_changed_weights_speak_at_once(backbone: Make, change: str, names: str) -> None:
    model = _adapted(backbone)
    stacked = StackedAdapters(model.model, NAMES)
    before = _together(model, stacked, IDS, tuple(names))
    for weight in adapters.adapter_parameters(model.model, "a").values():
        if change == "in place":
            weight.mul_(2)
        elif change == "assigned":
            weight.data = weight * 2
        else:
            weight.data.mul_(2)
            stacked.refresh()  # what leaves no trace must be told
    after = _together(model, stacked, IDS, tuple(names))
    torch.testing.assert_close(after, _alone(model, IDS, tuple(names)), rtol=1e-5, atol=2e-5)
    assert not torch.equal(after[0], before[0])


@torch.no_grad()
def test_behind_the_block_everything_is_as_before(backbone: Make) -> None:
    model = _adapted(backbone)
    adapters.activate(model.model, "b")
    before = model.hidden(IDS)
    _together(model, StackedAdapters(model.model, NAMES), IDS, tuple("abcdabc"))
    assert torch.equal(model.hidden(IDS), before)


def test_what_is_no_plain_lora_is_not_stacked(backbone: Make) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = backbone("llama").model
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], use_dora=True), model, adapter_name="a")
    assert StackedAdapters.of(model, ["a"]) is None
    with pytest.raises(ValueError, match="no plain LoRA"):
        StackedAdapters(model, ["a"])


def test_no_two_policies_share_an_adapter_however_alike_they_are_called(
    group_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    names = ("a/b", "a_b", "a.b", "a%2Fb")
    model = group_plan(train="lora", names=names).models[0]
    policies = Policies(model, load_base(model, tmp_path, 0), 0)
    weights = [w for learner in policies.learners.values() for w in learner.parameters.values()]
    assert len({id(w) for w in weights}) == len(weights) > 0
    assert len({policies.adapter_of(policy) for policy in policies.by_name}) == len(names)
