"""What the tests of several trainer processes run: the same work alone and as one of two ranks.

As a program: `rank_party.py RANK ADDRESSES FOLDER` does all of it as one rank and leaves its finds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base
from masflow.models.experience import Row
from masflow.models.packs import Budget
from masflow.models.policies import Policies
from masflow.models.ranks import Ranks
from masflow.models.trainer import Learner, Trainer
from masflow.models.weights import gathered
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.spec.mapping import ConfigBase, Lora, Optimizer

WORDS = "red green blue what is the colour of sky grass sea say: answer one two three"
OPTIMIZER = Optimizer(lr=3e-3, eps=1e-6)
LOSS = LossSpec(kl_weight=0.2, entropy=0.05)
PAID = LossSpec(kl_weight=0.2, pays_kl=True, importance_cap=1.5, ratio="sequence", epochs=2)
"""Each token has an advantage that all ranks' tokens of its role decide on."""
BUDGET = Budget(tokens=160, logits=1500)
"""Small, so that a rank has several micro-batches, and not as many as the other, and scores them in parts."""
CASES: dict[str, dict[str, Any]] = {
    "full": {"train": "full", "family": "qwen3", "width": 1 << 20},
    "frozen": {"train": "full", "family": "qwen3", "freeze": ("embeddings",)},
    "untied": {"train": "full", "family": "gpt2", "width": 1 << 20},
    "lora": {"train": "lora", "family": "llama", "recompute": True},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 2},
    "gpt2": {},
}


class Party:
    """One process's model, policies and trainer of a case."""

    def __init__(self, case: str, folder: Path, ranks: Ranks | None = None):
        self.folder, self.ranks = folder, ranks
        run_dir = _bases(folder) / case
        model = _model(CASES[case], run_dir)
        base = load_base(model, run_dir, seed=3)
        self.policies = Policies(model, base, seed=3)
        backbone = Backbone(base.model, recompute=CASES[case].get("recompute", False))
        # As if it were wide, attention is taken in blocks; the narrow ones have their masks.
        budget = replace(BUDGET, width=CASES[case].get("width", 0))
        self.trainer = Trainer(backbone, folder / "dump", budget, ranks)
        self.policies.rebind(ranks is None or ranks.is_first)
        self.names = list(self.policies.by_name)

    def weights(self) -> dict[str, torch.Tensor]:
        found = self.policies.base.model.named_parameters()
        return {name: gathered(p.detach()).clone() for name, p in found}

    def update(self, policy: str, rows: list[Row], step: int, **kwargs: Any) -> dict[str, float]:
        items = kwargs.pop("items", None) or make_items(rows, kwargs.pop("minibatches", 1))
        loss = kwargs.pop("loss", LossSpec())
        with self.policies.learning(policy) as learner:
            off = self.policies.without_adapter
            return self.trainer.update(learner, items, rows, loss, OPTIMIZER, step, 20, off)

    def gradient(self, policy: str, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Of one update that doesn't move the weights."""
        wide = LossSpec(clip_low=0.99, clip_high=1e3)  # whatever the rows, the gradient isn't cut to 0
        learner = self.policies.learners[policy]
        return _gradient(self, learner, lambda: self.update(policy, rows, 0, loss=wide))


def _gradient(party: Party, learner: Learner, work: Callable[[], Any]) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}

    def look(*_: object) -> None:
        for name, p in learner.parameters.items():
            assert p.grad is not None, name
            seen[name] = gathered(p.grad).clone()

    optimizer = learner.ready(OPTIMIZER, 0.0)
    before = {n: p.detach().clone() for n, p in learner.parameters.items()}
    handle = optimizer.register_step_pre_hook(look)
    work()
    handle.remove()
    with torch.no_grad():
        for name, p in learner.parameters.items():
            p.copy_(before[name])
    learner.optimizer = None
    return seen


def _bases(folder: Path) -> Path:
    """The nearest folder of bases: who comes first makes them, the others find them."""
    return next((f / "bases" for f in folder.parents if (f / "bases").is_dir()), folder.parents[1] / "bases")


def _model(case: dict[str, Any], folder: Path) -> ModelIR:
    folder.mkdir(parents=True, exist_ok=True)
    words = folder / "words.jsonl"
    if not words.is_file():
        words.write_text(json.dumps({"text": WORDS}) + "\n")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    if case["family"] == "gpt2":
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 128}
    settings = {"model_type": case["family"], **sizes, **FAMILIES[case["family"]]}
    base = ConfigBase.model_validate(
        {
            "config": settings,
            "tokenizer": {"wordpiece": {"files": (str(words),)}},
            "freeze": case.get("freeze", ()),
            "init": {"embedding_std": 0.3},
        }
    )
    names = ("asker", "solver") if case["train"] == "lora" else ("team",)
    policies = tuple(
        PolicyIR(f"m/{n}" if case["train"] == "lora" else "m", "m", n, (n,), True, OPTIMIZER, None)
        for n in names
    )
    return ModelIR("m", base, "hash", case["train"], policies, Lora(rank=4, alpha=8))


def make_rows(count: int, seed: int = 0, policy: str = "m") -> list[Row]:
    """Conversations: each prompt has several samples, and some go on from a sample."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []

    def draw(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(5, 60, size=int(rng.integers(low, high))))

    prompt: tuple[int, ...] = ()
    while len(rows) < count:
        if len(rows) % 4 == 0:
            prompt = draw(8, 40)
        start = prompt
        if len(rows) % 4 == 3:
            start = rows[-1].prompt_ids + rows[-1].reply_ids + draw(2, 5)
        reply = draw(2, 9)
        logprobs = tuple(float(x) for x in -4.0 + 0.3 * rng.normal(size=len(reply)))
        rows.append(Row(f"t{len(rows)}", policy, start, reply, logprobs, 0, "", "", 0.8))
    return rows


def make_items(rows: list[Row], minibatches: int = 1) -> list[TrainRow]:
    rng = np.random.default_rng(5)
    weight = 1 / len(rows)
    return [
        TrainRow(
            r.turn_id,
            r.policy,
            float(rng.normal()),
            weight / len(r.reply_ids),
            i % minibatches,
            r.temperature,
            "ab"[i % 2],
            float(rng.normal()),
        )
        for i, r in enumerate(rows)
    ]


# -- the work, alone or together ------------------------------------------------------------------


def work(case: str, folder: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Gradients, metrics, and the weights after a warm start and some updates of every policy."""
    party = Party(case, folder, ranks)
    found: dict[str, Any] = {"start": party.weights(), "gradients": {}, "metrics": []}
    for number, policy in enumerate(party.names):
        rows = make_rows(11 + number, number, policy)
        found["gradients"][policy] = party.gradient(policy, rows)
        found["gradients"][f"{policy}, one row"] = party.gradient(policy, rows[:1])
    assert all(torch.equal(found["start"][n], w) for n, w in party.weights().items())
    demonstrations = [replace(row, logprobs=(), temperature=1.0) for row in make_rows(9, 7)]
    for step in range(2):
        found["metrics"].append(_warm(party, demonstrations, step))
    party.policies.reset_optimizers()
    party.policies.snapshot_reference()
    for step in range(3):
        for number, policy in enumerate(party.names):
            rows = make_rows(6 + 3 * number + step, 10 * step + number, policy)
            metrics = party.update(policy, rows, step, minibatches=2, loss=(LossSpec(), LOSS, PAID)[step])
            party.policies.versions[policy] += 1
            found["metrics"].append(metrics)
    found["weights"] = party.weights()
    probe = make_rows(3, 99)
    found["logprobs"] = party.trainer.logprobs(probe, [1.0] * len(probe))
    saved = folder.parent / "saved" / case
    saved.mkdir(parents=True, exist_ok=True)
    party.policies.save(saved)
    payload = party.policies.payload(party.names[0])
    parameters = list(party.policies.base.model.parameters())
    found["numbers"] = sum(p.numel() for p in parameters)
    found["local_numbers"] = sum(_local(p).numel() for p in parameters)
    found["payload"] = {n: torch.from_numpy(a.copy()) for n, a in payload.tensors.items()}
    return found


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _warm(party: Party, rows: list[Row], step: int) -> dict[str, float]:
    if party.policies.has_adapters:
        with party.policies.learning_backbone() as learner:
            return party.trainer.supervise(learner, rows, OPTIMIZER, step, 20)
    with party.policies.learning(party.names[0]) as learner:
        return party.trainer.supervise(learner, rows, OPTIMIZER, step, 20)


def go_on(case: str, folder: Path, saved: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """Load what was saved with another number of ranks, and train one step more of each policy."""
    party = Party(case, folder, ranks)
    party.policies.load(saved)
    found: dict[str, Any] = {"loaded": party.weights()}
    for number, policy in enumerate(party.names):
        party.update(policy, make_rows(8, 40 + number, policy), 3, loss=LOSS)
    found["weights"] = party.weights()
    return found


def poisoned(case: str, folder: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """A NaN in one row stops every rank with one message; afterwards the trainer works on."""
    party = Party(case, folder, ranks)
    policy, before = party.names[0], party.weights()
    rows = make_rows(10, 0, policy)
    found: dict[str, Any] = {"messages": []}
    for bad in (0, 4, 9):
        items = make_items(rows)
        items[bad] = replace(items[bad], advantage=math.nan)
        try:
            party.update(policy, rows, 6, items=items)
        except RunError as error:
            found["messages"].append(str(error))
    items = [replace(item, token_weight=3e38) for item in make_items(rows)]
    try:
        party.update(policy, rows, 8, items=items)
    except RunError as error:
        found["messages"].append(str(error))
    found["unmoved"] = all(torch.equal(before[n], w) for n, w in party.weights().items())
    found["metrics"] = [party.update(policy, rows, 0)]
    return found


def as_rank(rank: int, addresses: list[str], folder: Path) -> None:
    """Everything with each strategy; then rank 1 dies while rank 0 waits for it."""
    torch.set_num_threads(1)
    for strategy, address in zip(("fsdp2", "ddp"), addresses, strict=False):
        ranks = Ranks(rank, 2, address, strategy, timeout_s=60)
        mine = folder / strategy / f"rank{rank}"
        for case in CASES:
            torch.save(work(case, mine / case, ranks), mine / f"{case}.pt")
            alone = folder / "alone" / "saved" / case
            torch.save(go_on(case, mine / f"{case}-on", alone, ranks), mine / f"{case}-on.pt")
        torch.save(poisoned("full", mine / "poisoned", ranks), mine / "poisoned.pt")
        ranks.close()
    ranks = Ranks(rank, 2, addresses[2], timeout_s=60)
    party = Party("full", folder / "ddp" / f"rank{rank}" / "dying", ranks)
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    try:
        party.update("m", make_rows(6), 0)
    except RunError as error:
        torch.save({"message": str(error), "seconds": time.monotonic() - began}, folder / "dying.pt")
    ranks.close()


if __name__ == "__main__":
    as_rank(int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3]))
