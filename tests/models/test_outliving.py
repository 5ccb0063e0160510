"""What a process did before leaves no trace in what it draws and learns next: a resumed one did nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.bare import BareSpeaker
from masflow.models.engine import Request, SamplingParams
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime import model_group
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.worker import Worker
from masflow.trace import Message

MakePlan = Callable[..., Plan]


@contextmanager
def _group(plan: Plan, run_dir: Path) -> Iterator[tuple[ModelGroup, Worker]]:
    with closing(ModelGroup(plan.models[0], plan, run_dir)) as group:
        [actor] = group.learners
        assert isinstance(actor, LocalActor) and isinstance(actor.instance, Worker)
        yield group, actor.instance


def _requests(name: str, count: int = 4) -> list[Request]:
    sampling = SamplingParams(temperature=0.8, max_tokens=6)
    words = (Message("user", "what is the colour of grass"),)
    return [Request(f"{name}-{i}", "m", words, sampling, seed=i) for i in range(count)]


def _update(group: ModelGroup) -> dict[str, float]:
    replies = group.generate(_requests("turn"))
    items = [TrainRow(r.turn_id, "m", (-1.0) ** i, 0.1, 0, 0.8) for i, r in enumerate(replies)]
    return group.update("m", items, LossSpec(), 0, 10)


def test_who_speaks_is_found_out_before_anything_is_trained(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as (group, worker):
        chosen = worker.backbone.bare
        assert chosen is not None
        _update(group)
        assert worker.backbone.bare is chosen


def test_rounding_of_many_layers_hides_no_model_from_the_bare_decoder() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    backbone = Backbone(LlamaForCausalLM(config).requires_grad_(False))
    for _ in range(3):
        with torch.no_grad():
            for weight in backbone.model.parameters():
                weight.copy_(weight[torch.randperm(len(weight))])
        backbone.bare = None
        assert BareSpeaker.of(backbone) is not None


def test_a_first_update_looks_at_the_gap_of_its_policy_as_one_after_a_resume(
    group_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for folder in ("through", "resumed"):
        with _group(group_plan(), tmp_path / folder) as (group, _):
            if folder == "through":
                group.save(tmp_path / "saved")
            else:
                group.load(tmp_path / "saved")
            prove = group.prove_delivery
            monkeypatch.setattr(group, "prove_delivery", lambda p, prove=prove: _far(group, prove(p)))
            found.append(_update(group))
    assert found[0] == found[1] and "old_gap" in found[0]


def _far(group: ModelGroup, delivery: Any) -> Any:
    """As if what speaks were in another precision."""
    group._gaps[delivery.policy] = 2 * model_group.REUSE_NATS
    return delivery


@pytest.mark.parametrize("joins", [True, False])
def test_after_an_interruption_in_the_middle_replies_are_those_of_a_fresh_process(
    joins: bool, group_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _group(group_plan(), tmp_path / "fresh") as (group, _):
        wanted = group.generate(_requests("later"))
    with _group(group_plan(), tmp_path / "hit") as (group, worker):
        engine = worker.engine
        if not joins:
            engine._adapter_of = None
        for at, error in ((0, KeyboardInterrupt), (1, RunError), (3, MemoryError)):
            speaker: Any = engine.speaker()
            steps = iter(range(at))

            def step(
                token_B: torch.Tensor, plain: Any = speaker.step, left: Any = steps, e: Any = error
            ) -> Any:
                if next(left, None) is None:
                    raise e("here")
                return plain(token_B)

            with monkeypatch.context() as patch, pytest.raises(error):
                patch.setattr(speaker, "step", step)
                group.generate(_requests(f"lost {at}"))
            assert engine.speaker().num_rows == 0 and not engine._asked and not engine._done
            assert group.prove_delivery("m").logprob_gap < 1e-4
        assert group.generate(_requests("later")) == wanted
