"""Gradient checkpointing: the same gradients, bit for bit, from less memory, and in updates alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base, make_model
from masflow.models.decoding import Job, decode
from masflow.models.engine import SamplingParams
from masflow.models.experience import Row
from masflow.models.policies import Policies
from masflow.models.trainer import Trainer
from masflow.spec.mapping import ConfigBase, Lora, Optimizer

MakeBase = Callable[..., ConfigBase]
ROWS = [
    Row(f"t{i}", "m", tuple(range(5, 25 + i)), (8, 9, 10 + i % 3, 1), (-2.0,) * 4, 0, "", "")
    for i in range(6)
]


@contextmanager
def _kept_bytes(model: Any) -> Iterator[dict[int, int]]:
    """Bytes that the forward pass keeps for the backward pass, weights aside, by storage."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []  # so that no storage is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def _gradients(backbone: Backbone, tmp_path: Path, trained: dict[str, Any]) -> tuple[dict[str, Any], int]:
    trainer = Trainer(backbone, tmp_path)
    for parameter in trained.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    [batch] = trainer.pack(ROWS, [1.0] * len(ROWS))
    with _kept_bytes(backbone.model) as kept:
        hidden = backbone.hidden(batch.ids_ST, batch.mask, batch.positions_ST)
    backbone.logits(hidden).logsumexp(-1).sum().backward()
    return {name: p.grad.clone() for name, p in trained.items()}, sum(kept.values())


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_gradients_are_the_same_bit_for_bit_from_less_memory(
    config_base: MakeBase, tokenizer: Any, tmp_path: Path, family: str
) -> None:
    layers = {"n_layer": 6} if family == "gpt2" else {"num_hidden_layers": 6}
    model = make_model(config_base(family, **layers), tokenizer, seed=1)
    trained = dict(model.named_parameters())
    wanted, plain = _gradients(Backbone(model), tmp_path, trained)
    found, lean = _gradients(Backbone(model, recompute=True), tmp_path, trained)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert plain > 5 * lean  # a layer's input is kept instead of all that it computes


@pytest.fixture
def adapted(config_base: MakeBase, tmp_path: Path) -> Callable[[bool], tuple[Backbone, Policies]]:
    """`adapted(recompute)`: a frozen base under an adapter that isn't fresh."""

    def make(recompute: bool) -> tuple[Backbone, Policies]:
        policy = PolicyIR("m/a", "m", "a", ("a",), True, Optimizer(lr=1e-2))
        model = ModelIR("m", config_base("llama"), "hash", "lora", (policy,), Lora(rank=4, alpha=8))
        base = load_base(model, tmp_path, 0)
        backbone, policies = Backbone(base.model, recompute), Policies(model, base, 0)
        with torch.no_grad():
            for name, p in policies.learners["m/a"].parameters.items():
                p.copy_(torch.sin(torch.arange(p.numel()).reshape(p.shape) + len(name)) * 0.1)
        return backbone, policies

    return make


def test_adapters_on_a_frozen_base_learn_the_same(adapted: Callable[..., Any], tmp_path: Path) -> None:
    ends = []
    for recompute in (False, True):
        backbone, policies = adapted(recompute)
        trainer = Trainer(backbone, tmp_path)
        for step in range(3):
            with policies.learning("m/a") as learner:
                trainer.supervise(learner, ROWS, Optimizer(lr=1e-2), step, 3)
        ends.append({n: p.detach().clone() for n, p in policies.learners["m/a"].parameters.items()})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_decoding_and_scoring_compute_once_with_their_cache(
    adapted: Callable[..., Any], tmp_path: Path
) -> None:
    def run(recompute: bool) -> tuple[Any, Any, int]:
        backbone, _ = adapted(recompute)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        backbone.model.model.layers[0].register_forward_pre_hook(count)
        job = Job((5, 6, 7), SamplingParams(0.0, max_tokens=5), 0)
        drawn = decode(backbone, [job], frozenset())
        return drawn, Trainer(backbone, tmp_path).logprobs(ROWS, [1.0] * len(ROWS)), calls

    assert run(True) == run(False)


def test_the_policy_of_a_run_recomputes_in_its_update_alone(
    adapted: Callable[..., Any], tmp_path: Path
) -> None:
    backbone, policies = adapted(True)
    seen: list[bool] = []
    inner = backbone.model.model.layers[0].mlp
    inner.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    trainer = Trainer(backbone, tmp_path)
    trainer.logprobs(ROWS, [1.0] * len(ROWS))
    assert seen == [False]
    seen.clear()
    with policies.learning("m/a") as learner:
        trainer.supervise(learner, ROWS, Optimizer(lr=1e-2), 0, 1)
    assert seen == [True, True]  # once forward, once again on the way back
    assert not any(m.training for m in backbone.model.modules())


def test_an_architecture_that_cannot_recompute_says_so(config_base: MakeBase, tokenizer: Any) -> None:
    model = make_model(config_base("llama"), tokenizer, 0)
    model.supports_gradient_checkpointing = False
    with pytest.raises(RunError, match="type 'llama' can't recompute"):
        Backbone(model, recompute=True)
