"""The trainer's laws: gradients add up, ratios start at 1, non-finite values stop the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.decoding import Job, decode
from masflow.models.engine import SamplingParams
from masflow.models.experience import Row
from masflow.models.packs import Budget, budget_of
from masflow.models.trainer import Learner, Trainer, learning_rate
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.spec.mapping import Optimizer

Make = Callable[..., Backbone]
TEMPERATURE = 0.7


def _sampled(backbone: Backbone, count: int = 6, samples: int = 3) -> list[Row]:
    rng = np.random.default_rng(3)
    prompts = [
        tuple(int(i) for i in rng.integers(5, 140, size=int(rng.integers(3, 12)))) for _ in range(count)
    ]
    jobs = [
        Job(p, SamplingParams(TEMPERATURE, max_tokens=2 + (s + i) % 5), 10 * i + s)
        for i, p in enumerate(prompts)
        for s in range(samples)
    ]
    drawn = decode(backbone, jobs, frozenset({1}))
    return [
        Row(f"t{i}", "m", job.prompt_ids, tuple(r.ids), tuple(r.logprobs), 0, "", "", TEMPERATURE)
        for i, (job, r) in enumerate(zip(jobs, drawn, strict=True))
    ]


def _items(rows: list[Row], minibatches: int = 1) -> list[TrainRow]:
    rng = np.random.default_rng(5)
    return [
        TrainRow(
            r.turn_id,
            "m",
            float(rng.normal()),
            1 / (len(rows) * len(r.reply_ids)),
            i % minibatches,
            TEMPERATURE,
        )
        for i, r in enumerate(rows)
    ]


def _learner(backbone: Backbone) -> Learner:
    return Learner("m", {n: p.requires_grad_(True) for n, p in backbone.model.named_parameters()})


def _trainer(backbone: Backbone, tmp_path: Path, budget: Budget | None = None) -> Trainer:
    return Trainer(backbone, tmp_path / "nonfinite", budget)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_fresh_rows_have_the_engines_logprobs(
    backbone: Make, tmp_path: Path, family: str, attention: str
) -> None:
    model = backbone(family, attention=attention)
    rows = _sampled(model)
    for budget in (Budget(), Budget(tokens=1)):
        scored = _trainer(model, tmp_path, budget).logprobs(rows, [TEMPERATURE] * len(rows))
        gaps = [
            abs(a - b)
            for row, mine in zip(rows, scored, strict=True)
            for a, b in zip(row.logprobs, mine, strict=True)
        ]
        assert max(gaps) < 1e-4


@pytest.mark.parametrize("loss", [LossSpec(), LossSpec(kl_weight=0.3, kl_estimator="k3", entropy=0.2)])
def test_the_micro_batch_gradient_equals_the_full_one(backbone: Make, tmp_path: Path, loss: LossSpec) -> None:
    """Against an independent loop: one row at a time, whole logits, autograd, float64."""
    model = backbone("llama", torch.float64)
    rows = _sampled(model)
    items = _items(rows)
    old = [tuple(lp + 0.1 * math.sin(k) for k, lp in enumerate(row.logprobs)) for row in rows]
    rows = [replace(row, logprobs=o) for row, o in zip(rows, old, strict=True)]
    learner = _learner(model)
    learner.has_reference, learner.reference = (
        True,
        {n: p.detach() * 1.05 for n, p in learner.parameters.items()},
    )
    wanted = _plain_gradient(model, learner, rows, items, loss)
    for budget in (Budget(), Budget(tokens=1), Budget(tokens=40)):
        found = _gradient_of_update(model, learner, rows, items, loss, tmp_path, budget)
        assert max(float((found[n] - wanted[n]).abs().max()) for n in wanted) < 1e-6


def _gradient_of_update(
    model: Backbone,
    learner: Learner,
    rows: list[Row],
    items: list[TrainRow],
    loss: LossSpec,
    tmp_path: Path,
    budget: Budget,
) -> dict[str, torch.Tensor]:
    """Read off the gradient as what `update` hands to the optimizer."""
    seen: dict[str, torch.Tensor] = {}
    spec = Optimizer(lr=1e-30, max_grad_norm=1e9)
    optimizer = learner.ready(spec, spec.lr)

    def look(*_: object) -> None:
        for name, p in learner.parameters.items():
            assert p.grad is not None
            seen[name] = p.grad.clone()

    handle = optimizer.register_step_pre_hook(look)
    _trainer(model, tmp_path, budget).update(learner, items, rows, loss, spec, 0, 1)
    handle.remove()
    learner.optimizer = None
    return seen


def _plain_gradient(
    model: Backbone, learner: Learner, rows: list[Row], items: list[TrainRow], loss: LossSpec
) -> dict[str, torch.Tensor]:
    def logprobs(row: Row) -> torch.Tensor:
        ids = torch.tensor([row.prompt_ids + row.reply_ids])
        return torch.log_softmax(model.model(ids, use_cache=False).logits[0] / TEMPERATURE, -1)

    total = torch.zeros((), dtype=torch.float64)
    for row, item in zip(rows, items, strict=True):
        start = len(row.prompt_ids) - 1
        all_TV = logprobs(row)[start:-1]
        with learner.as_reference(), torch.no_grad():
            reference_TV = logprobs(row)[start:-1]
        picked = torch.tensor(row.reply_ids)[:, None]
        lp, ref = all_TV.gather(1, picked)[:, 0], reference_TV.gather(1, picked)[:, 0]
        ratio = (lp - torch.tensor(row.logprobs, dtype=torch.float64)).exp()
        token = -torch.minimum(ratio * item.advantage, ratio.clamp(0.8, 1.2) * item.advantage)
        token = token + loss.kl_weight * ((ref - lp).exp() - (ref - lp) - 1)
        token = token - loss.entropy * -(all_TV.exp() * all_TV).sum(-1)
        total = total + item.token_weight * token.sum()
    grads = torch.autograd.grad(total, list(learner.parameters.values()))
    return dict(zip(learner.parameters, grads, strict=True))


def test_the_first_ratio_is_one(backbone: Make, tmp_path: Path) -> None:
    model = backbone()
    rows = _sampled(model)
    metrics = _trainer(model, tmp_path).update(
        _learner(model), _items(rows), rows, LossSpec(), Optimizer(lr=1e-3), 0, 10
    )
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5) and metrics["clip_frac"] == 0
    assert metrics["kl_old"] == pytest.approx(0.0, abs=1e-6)


def test_rows_scored_anew_have_the_ratios_of_the_weights_as_they_are(backbone: Make, tmp_path: Path) -> None:
    model = backbone()
    rows = _sampled(model)
    off = [replace(row, logprobs=tuple(lp - 0.25 for lp in row.logprobs)) for row in rows]
    spec = Optimizer(lr=1e-3)
    trainer, learner = _trainer(model, tmp_path), _learner(model)
    metrics = trainer.update(learner, _items(rows), off, LossSpec(), spec, 0, 10, rescore=True)
    assert metrics["old_gap"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5) and metrics["kl_old"] < 1e-6


def test_each_minibatch_is_one_optimizer_step(backbone: Make, tmp_path: Path) -> None:
    model = backbone()
    rows = _sampled(model)
    learner = _learner(model)
    metrics = _trainer(model, tmp_path).update(
        learner, _items(rows, 3), rows, LossSpec(), Optimizer(lr=1e-2), 0, 10
    )
    assert learner.optimizer is not None
    assert metrics["optimizer_steps"] == 3
    assert {int(state["step"]) for state in learner.optimizer.state.values()} == {3}
    assert metrics["ratio"] != pytest.approx(1.0, abs=1e-6)


def test_advantages_push_probabilities_their_way(backbone: Make, tmp_path: Path) -> None:
    model = backbone("llama")
    rows = _sampled(model, count=2, samples=1)
    items = [TrainRow("t0", "m", 1.0, 0.1, 0, TEMPERATURE), TrainRow("t1", "m", -1.0, 0.1, 0, TEMPERATURE)]
    trainer, learner = _trainer(model, tmp_path), _learner(model)
    before = [sum(lps) for lps in trainer.logprobs(rows, [TEMPERATURE] * 2)]
    for step in range(3):
        trainer.update(learner, items, rows, LossSpec(clip_low=10, clip_high=10), Optimizer(lr=1e-3), step, 3)
    after = [sum(lps) for lps in trainer.logprobs(rows, [TEMPERATURE] * 2)]
    assert after[0] > before[0] and after[1] < before[1]


def test_supervised_loss_goes_down_and_is_the_mean_over_tokens(backbone: Make, tmp_path: Path) -> None:
    model = backbone("gpt2")
    rows = _sampled(model)
    trainer, learner = _trainer(model, tmp_path), _learner(model)
    lps = trainer.logprobs(rows, [1.0] * len(rows))
    mean = -sum(map(sum, lps)) / sum(map(len, lps))
    losses = [trainer.supervise(learner, rows, Optimizer(lr=3e-3), s, 20)["loss"] for s in range(20)]
    assert losses[0] == pytest.approx(mean, rel=1e-5)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("poison", ["weight", "advantage"])
def test_a_non_finite_value_stops_names_the_turn_and_dumps(
    backbone: Make, tmp_path: Path, poison: str
) -> None:
    # FIELD_PROBLEMS, Silent failures: NaN, then "!!!!" for ever.
    model = backbone("llama")
    rows = _sampled(model)
    learner, items = _learner(model), _items(rows)
    before = {n: p.detach().clone() for n, p in learner.parameters.items()}
    if poison == "advantage":
        items[4] = replace(items[4], advantage=math.nan)
    else:
        learner.parameters["lm_head.weight"].data[rows[4].reply_ids[0]] = math.inf
        before["lm_head.weight"] = learner.parameters["lm_head.weight"].detach().clone()
    with pytest.raises(RunError, match=r"non-finite loss; turns .*t[04].*nonfinite-m-step8\.pt"):
        _trainer(model, tmp_path).update(learner, items, rows, LossSpec(), Optimizer(), 7, 10)
    dumped = torch.load(tmp_path / "nonfinite" / "nonfinite-m-step8.pt", weights_only=True)
    assert "t4" in dumped["bad"] and len(dumped["rows"]) == len(rows)
    assert all(torch.equal(before[n], p) for n, p in learner.parameters.items())


def test_a_non_finite_gradient_stops(backbone: Make, tmp_path: Path) -> None:
    model = backbone("llama")
    rows = _sampled(model)
    items = [replace(item, token_weight=3e38) for item in _items(rows)]
    with pytest.raises(RunError, match="non-finite"):
        _trainer(model, tmp_path).update(_learner(model), items, rows, LossSpec(), Optimizer(), 0, 1)


def test_kl_without_a_reference_is_an_error(backbone: Make, tmp_path: Path) -> None:
    model = backbone()
    rows = _sampled(model)
    with pytest.raises(RunError, match="no reference"):
        _trainer(model, tmp_path).update(
            _learner(model), _items(rows), rows, LossSpec(kl_weight=0.1), Optimizer(), 0, 1
        )


def test_the_schedule_by_hand() -> None:
    # 2 warm-up steps, then from 1 to 0.1 over steps 2 … 6: linear falls by 0.225 a step.
    linear = Optimizer(lr=1.0, warmup_steps=2, schedule="linear", final_lr_frac=0.1)
    assert [round(learning_rate(linear, s, 7), 4) for s in range(7)] == [
        0.5,
        1.0,
        1.0,
        0.775,
        0.55,
        0.325,
        0.1,
    ]
    cosine = linear.model_copy(update={"schedule": "cosine"})
    assert learning_rate(cosine, 4, 7) == pytest.approx(0.55) and learning_rate(
        cosine, 6, 7
    ) == pytest.approx(0.1)
    constant = Optimizer(lr=0.5)
    assert {learning_rate(constant, s, 5) for s in range(9)} == {0.5}


def test_larger_models_get_smaller_micro_batches(backbone: Make) -> None:
    config = backbone().model.config
    assert budget_of(config).tokens == 8192
    # 24 layers of 896: 2e9 / (160 * 24 * 896) = 581 tokens.
    assert budget_of(SimpleNamespace(num_hidden_layers=24, hidden_size=896)).tokens == 581
