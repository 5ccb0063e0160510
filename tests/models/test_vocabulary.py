"""A large vocabulary in training: the same numbers in parts, within the memory that the budget says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from masflow.models.backbone import Backbone
from masflow.models.bases import make_model
from masflow.models.experience import Row
from masflow.models.packs import Budget, budget_of
from masflow.models.trainer import Trainer
from masflow.spec.mapping import ConfigBase

MakeBase = Callable[..., ConfigBase]
VOCABULARY, BYTES = 49152, 4


@pytest.fixture(scope="module")
def wide(config_base: MakeBase, tokenizer: Any) -> Backbone:
    """A narrow model over SmolLM2's number of tokens."""
    narrow = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = make_model(config_base("llama", vocab_size=VOCABULARY, **narrow), tokenizer, seed=1)
    return Backbone(model.requires_grad_(True))


def _rows(samples: int, length: int) -> list[Row]:
    """Samples of one prompt: one tree."""
    rng = np.random.default_rng(0)
    replies = rng.integers(0, VOCABULARY, size=(samples, length))
    return [
        Row(f"t{i}", "m", tuple(range(40)), tuple(map(int, r)), (), 0, "", "") for i, r in enumerate(replies)
    ]


def _run(model: Backbone, tmp_path: Path, rows: list[Row], logits: int, entropy: Any) -> tuple[Any, ...]:
    trainer = Trainer(model, tmp_path, Budget(logits=logits))
    sums, gradient = [], {}
    for parameter in model.model.parameters():
        parameter.grad = None
    for batch in trainer.pack(rows, [0.7 if i % 2 else 1.0 for i in range(len(rows))]):
        scores = trainer.score(batch, entropy)
        (scores.logprobs_BT.sum() + 0.1 * scores.entropy_BT.sum()).backward()
        sums += [scores.logprobs_BT.detach().sum(), scores.entropy_BT.detach().sum()]
    for name, parameter in model.model.named_parameters():
        gradient[name] = parameter.grad.clone()
    return torch.stack(sums).reshape(-1, 2).sum(0), gradient


@pytest.mark.parametrize("entropy", ["none", "measured", "trained"])
def test_parts_give_the_same_numbers_and_gradients(wide: Backbone, tmp_path: Path, entropy: str) -> None:
    rows = _rows(samples=3, length=7)
    whole, wanted = _run(wide, tmp_path, rows, 1 << 26, entropy)
    for parts in (1, 2 * VOCABULARY, 5 * VOCABULARY):
        found, gradient = _run(wide, tmp_path, rows, parts, entropy)
        assert torch.allclose(found, whole, rtol=1e-5)
        for name, value in wanted.items():
            assert float((gradient[name] - value).abs().max()) < 1e-5 * max(1.0, float(value.abs().max()))


def _peak_bytes(work: Callable[[], object]) -> int:
    """The most that was allocated at once while `work` ran, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    recorded: Any = found.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(held.max())


@pytest.mark.parametrize(("entropy", "numbers"), [("measured", 3), ("trained", 5)])
def test_a_tree_of_many_predictions_stays_within_the_budget(
    wide: Backbone, tmp_path: Path, entropy: str, numbers: int
) -> None:
    rows = _rows(samples=4, length=40)
    weights = sum(p.numel() for p in wide.model.parameters()) * BYTES  # their gradients are there too
    for budget in (20 * VOCABULARY, 40 * VOCABULARY):
        peak = _peak_bytes(lambda budget=budget: _run(wide, tmp_path, rows, budget, entropy))
        assert numbers * budget * BYTES < peak + weights and peak < numbers * budget * BYTES + 3 * weights
    whole = _peak_bytes(lambda: _run(wide, tmp_path, rows, 1 << 40, entropy))
    assert whole > 3 * peak  # 157 predictions (four rows share one), and not 40 of them


def test_the_budget_of_smollm2_bounds_its_activations_and_logits() -> None:
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=30, hidden_size=576, vocab_size=VOCABULARY, num_attention_heads=9
    )
    budget = budget_of(config)
    assert budget.tokens == 723  # 2 GB / (4 bytes · 40 numbers · 30 layers · 576)
    assert 3 * BYTES * budget.logits == 0.75 * (1 << 30)
