"""Logits, log-probs, loss and gradients in one pass: the numbers of autograd, from a part of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from masflow.models import fused
from masflow.models.backbone import Backbone
from masflow.models.bases import make_model
from masflow.models.experience import Row
from masflow.models.fused import fused_loss
from masflow.models.packs import Budget, MicroBatch, pack
from masflow.models.trainer import Trainer
from masflow.spec.mapping import ConfigBase

FACTOR = 1.7


def _batch(vocab_size: int, samples: int = 5, length: int = 9) -> MicroBatch:
    """One prompt's samples, two of which begin alike, at two temperatures."""
    rng = np.random.default_rng(0)
    replies = [tuple(map(int, rng.integers(0, vocab_size, size=length))) for _ in range(samples)]
    replies[1] = replies[0][:4] + replies[1][4:]
    rows = [Row(f"t{i}", "m", (1, 2, 3), r, (), 0, "", "") for i, r in enumerate(replies)]
    temperatures = [0.6 if i == samples - 1 else 1.0 for i in range(samples)]
    (batch,) = pack(rows, temperatures, vocab_size=vocab_size, budget=Budget(logits=1 << 40))
    return batch


def _loss(logprobs_n: Tensor, entropy_n: Tensor, place_n: Tensor, trained: bool) -> Tensor:
    weights_n = (place_n + 1).to(logprobs_n.dtype).sin()
    entropy_n = entropy_n if trained else entropy_n.detach()
    return logprobs_n.exp() * weights_n - 0.3 * logprobs_n**2 + 0.2 * entropy_n**2 * weights_n


def _by_autograd(head: nn.Linear, hidden_UD: Tensor, batch: MicroBatch, trained: bool) -> Tensor:
    logits_UV = head(hidden_UD) * FACTOR / batch.temperature_U.to(hidden_UD.dtype)[:, None]
    logprobs_UV = torch.log_softmax(logits_UV, -1)
    entropy_U = -(logprobs_UV.exp() * logprobs_UV).sum(-1)
    logprobs_N = logprobs_UV[batch.prediction_N, batch.target_N]
    return _loss(logprobs_N, entropy_U[batch.prediction_N], torch.arange(len(logprobs_N)), trained).sum()


@pytest.mark.parametrize("rows", [1, 4, 256])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_entry_of_every_gradient_is_that_of_autograd(
    monkeypatch: pytest.MonkeyPatch, rows: int, trained: bool, bias: bool
) -> None:
    monkeypatch.setattr(fused, "_ROWS", rows)
    batch = _batch(vocab_size=31)
    torch.manual_seed(0)
    head = nn.Linear(7, 31, bias=bias, dtype=torch.float64)
    hidden_UD = torch.randn(len(batch.source_U), 7, dtype=torch.float64, requires_grad=True)
    found = []
    for fuse in (False, True):
        head.zero_grad()
        hidden_UD.grad = None
        if fuse:
            loss = fused_loss(head, FACTOR, hidden_UD, batch, lambda a, b, c: _loss(a, b, c, trained))
        else:
            loss = _by_autograd(head, hidden_UD, batch, trained)
        (2.5 * loss).backward()
        found.append([loss.detach(), hidden_UD.grad, *(p.grad for p in head.parameters())])
    for wanted, got in zip(*found, strict=True):
        assert wanted is not None and torch.allclose(wanted, got, rtol=1e-10, atol=1e-12)


def test_a_frozen_head_in_half_precision_passes_its_gradient_on() -> None:
    batch = _batch(vocab_size=31)
    torch.manual_seed(0)
    head = nn.Linear(16, 31, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    hidden_UD = torch.randn(len(batch.source_U), 16, dtype=torch.bfloat16, requires_grad=True)
    assert fused.can_fuse(head) and not fused.can_fuse(nn.Linear(16, 31, dtype=torch.bfloat16))
    grads = []
    for loss_of in (
        lambda: _by_autograd(head, hidden_UD, batch, False),
        lambda: fused_loss(head, FACTOR, hidden_UD, batch, lambda a, b, c: _loss(a, b, c, False)),
    ):
        hidden_UD.grad = None
        loss_of().backward()
        assert hidden_UD.grad is not None and head.weight.grad is None
        grads.append(hidden_UD.grad.float())
    assert float((grads[0] - grads[1]).abs().max()) < 0.02 * float(grads[0].abs().max())


def _peak_bytes(work: Callable[[], object]) -> int:
    """The most that was allocated at once while `work` ran, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    recorded: Any = found.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    held = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(held.max())


@pytest.mark.parametrize("vocab_size", [49152, pytest.param(150_000, marks=pytest.mark.slow)])
def test_a_large_vocabulary_takes_a_quarter_of_the_memory_and_the_largest_little_more_time(
    vocab_size: int,
) -> None:
    """1,024 tokens, against log_softmax of all logits and the gradients of autograd."""
    batch = _batch(vocab_size, samples=32, length=32)
    head = nn.Linear(64, vocab_size, bias=False)
    hidden_UD = torch.randn(len(batch.source_U), 64, requires_grad=True)

    def plain() -> None:
        logprobs_UV = torch.log_softmax(head(hidden_UD), -1)
        logprobs_UV[batch.prediction_N, batch.target_N].sum().backward()

    def lean() -> None:
        fused_loss(head, 1.0, hidden_UD, batch, lambda logprobs_n, *_: logprobs_n).backward()

    assert _peak_bytes(lean) <= 0.25 * _peak_bytes(plain)
    if vocab_size > 100_000:
        pairs = [(_seconds(lean), _seconds(plain)) for _ in range(5)]
        assert sorted(a / b for a, b in pairs)[2] <= 1.15


def _seconds(work: Callable[[], object]) -> float:
    """Processor time."""
    start = time.process_time()
    work()
    return time.process_time() - start


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_models_update_goes_through_it_and_a_wrapped_head_does_not(
    config_base: Callable[..., ConfigBase], tokenizer: Any, tmp_path: Path, family: str
) -> None:
    model = make_model(config_base(family), tokenizer, seed=1).to(torch.float64)
    trainer = Trainer(Backbone(model), tmp_path)
    rows = [Row(f"t{i}", "m", (5, 6, 7), (8 + i, 9, 10), (), 0, "", "") for i in range(4)]
    (batch,) = trainer.pack(rows, [1.0] * 4)
    calls: list[int] = []

    def loss_n(logprobs_n: Tensor, entropy_n: Tensor, place_n: Tensor) -> Tensor:
        calls.append(len(place_n))
        return _loss(logprobs_n, entropy_n, place_n, True)

    grads = []
    for head in (trainer.backbone.head, nn.Sequential(trainer.backbone.head)):
        trainer.backbone.head = head
        model.zero_grad()
        trainer.scorer(batch, "trained", loss_n).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert calls == [12, 12] and grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[0][n], grads[1][n], rtol=1e-6, atol=1e-12) for n in grads[0])
