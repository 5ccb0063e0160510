"""What rows share is computed once, and every gradient is that of the rows taken one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base, make_model
from masflow.models.experience import Row
from masflow.models.packs import Budget
from masflow.models.policies import Policies
from masflow.models.trainer import Trainer
from masflow.models.tree_attention import tree_attention
from masflow.models.tree_blocks import Block, blocks_of, restricted
from masflow.spec.mapping import ConfigBase, Lora, Optimizer

MakeBase = Callable[..., ConfigBase]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
GROUPED = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "mistral": GROUPED,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "phi": SMALL,
    "phi3": {**GROUPED, "pad_token_id": 0},
    "smollm3": {**GROUPED, "pad_token_id": 0},
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "granite": {**GROUPED, "logits_scaling": 2.0, "attention_multiplier": 0.3},
    "gpt_neox": SMALL,
    "starcoder2": GROUPED,
    "stablelm": GROUPED,
}
OTHERS = {"gemma", "phi3", "smollm3", "olmo2", "cohere", "granite", "gpt_neox", "starcoder2", "stablelm"}
DENSE = ("gemma2", "stablelm")
"""Under one mask instead of blocks: scores are capped; layers don't hand on what they are called with."""
EVERY = [pytest.param(f, marks=pytest.mark.slow) if f in OTHERS else f for f in FAMILIES]
WIDE = Budget(width=1 << 20)
"""As for a model so wide that blocks pay for trees this small."""


def _rows() -> list[Row]:
    """Two groups of samples, some of which begin alike, and a conversation of three turns."""
    rng = np.random.default_rng(0)

    def draw(size: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(5, 60, size=size))

    pairs = []
    for _ in range(2):
        prompt, start = draw(24), draw(3)
        pairs += [(prompt, draw(2 + k)) for k in range(4)] + [(prompt, start + draw(3)) for _ in range(2)]
    history = draw(17)
    for _ in range(3):
        pairs.append((history, reply := draw(5)))
        history += reply + draw(4)
    return [Row(f"t{i}", "m", p, r, (), 0, "", "", 0.5 + i % 2) for i, (p, r) in enumerate(pairs)]


def _loss(scores_BT: torch.Tensor) -> torch.Tensor:
    """Any function of the log-probs, with another gradient for each token."""
    weights_T = torch.arange(1, scores_BT.shape[1] + 1, dtype=scores_BT.dtype).sin()
    return (scores_BT.exp() * weights_T + 0.3 * scores_BT).sum()


def _plain(model: Any, rows: list[Row]) -> None:
    """Each row by itself, through the whole model as transformers has it."""
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.reply_ids])
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV / row.temperature, -1)
        _loss(logprobs_TV.gather(1, torch.tensor(row.reply_ids)[:, None]).T).backward()


def _gap(trainer: Trainer, rows: list[Row], trained: dict[str, Any]) -> float:
    """The largest difference of a weight's gradient, as a share of its largest entry."""
    found: list[dict[str, torch.Tensor]] = []
    for is_plain in (True, False):
        for parameter in trained.values():
            parameter.grad = None
        if is_plain:
            _plain(trainer.backbone.model, rows)
        else:
            for batch in trainer.pack(rows, [row.temperature for row in rows]):
                _loss(trainer.score(batch).logprobs_BT * 1.0).backward()
        found.append({n: p.grad.clone() for n, p in trained.items() if p.grad is not None})
    wanted, shared = found
    assert set(wanted) == set(shared) and wanted
    return max(float((shared[n] - w).abs().max() / w.abs().max().clamp_min(1e-9)) for n, w in wanted.items())


@pytest.fixture
def base_of(config_base: MakeBase) -> Callable[..., ConfigBase]:
    """`base_of(family, **fields)`: a tiny model of any family over the test's words."""

    def make(family: str, **fields: Any) -> ConfigBase:
        settings = {"model_type": family, **FAMILIES[family], **fields}
        if family != "gpt2":
            settings = {"max_position_embeddings": 256, **settings}
        return config_base("llama").model_copy(update={"config": settings})

    return make


@pytest.mark.parametrize("family", EVERY)
def test_gradients_of_trees_are_those_of_rows_one_by_one(
    base_of: Callable[..., ConfigBase], tokenizer: Any, tmp_path: Path, family: str
) -> None:
    model = make_model(base_of(family), tokenizer, seed=1).to(torch.float64)
    trainer, rows = Trainer(Backbone(model), tmp_path, WIDE), _rows()
    packed = trainer.pack(rows, [1.0] * len(rows))
    assert all((batch.blocks is not None) == (family not in DENSE) for batch in packed)
    assert trainer.backbone.takes_places == (family in ("llama", "qwen2", "qwen3", "mistral"))
    assert sum(batch.ids_ST.numel() for batch in packed) < 0.6 * sum(row.num_tokens for row in rows)
    assert _gap(trainer, rows, dict(model.named_parameters())) < 1e-5
    trainer.backbone.takes_blocks = False
    dense = Trainer(trainer.backbone, tmp_path)
    assert all(batch.blocks is None for batch in dense.pack(rows, [1.0] * len(rows)))
    assert _gap(dense, rows, dict(model.named_parameters())) < 1e-5


@pytest.mark.parametrize("family", EVERY)
def test_so_are_those_of_adapters(base_of: Callable[..., ConfigBase], tmp_path: Path, family: str) -> None:
    policy = PolicyIR("m/a", "m", "a", ("a",), True, Optimizer())
    model = ModelIR("m", base_of(family), "hash", "lora", (policy,), Lora(rank=4, alpha=8))
    base = load_base(model, tmp_path, 0)
    backbone, policies = Backbone(base.model), Policies(model, base, 0)
    with torch.no_grad():
        for name, p in policies.learners["m/a"].parameters.items():
            p.copy_(torch.sin(torch.arange(p.numel()).reshape(p.shape) + len(name)) * 0.1)
    with policies.learning("m/a") as learner:
        assert _gap(Trainer(backbone, tmp_path, WIDE), _rows(), learner.parameters) < 1e-5


@pytest.mark.parametrize("window", [20, 30, 200])
@pytest.mark.parametrize("family", ["gemma2", "mistral", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_rows_beyond_a_window_are_taken_one_by_one(
    base_of: Callable[..., ConfigBase], tokenizer: Any, tmp_path: Path, family: str, window: int
) -> None:
    fields = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen3" else {}
    model = make_model(base_of(family, sliding_window=window, **fields), tokenizer, seed=1).to(torch.float64)
    trainer, rows = Trainer(Backbone(model), tmp_path, WIDE), _rows()
    assert trainer.backbone.window == window
    assert _gap(trainer, rows, dict(model.named_parameters())) < 1e-5
    numbers = [n for batch in trainer.pack(rows, [1.0] * len(rows)) for n in batch.rows]
    assert sorted(numbers) == list(range(len(rows)))


tries = st.lists(st.integers(0, 3), min_size=0, max_size=40)


def _seen(blocks: tuple[Block, ...], num: int) -> list[list[int]]:
    """What each node looks at, over all blocks."""
    seen: list[list[int]] = [[] for _ in range(num)]
    for block in blocks:
        (a, b), (c, d) = block.rows, block.keys
        rows, keys = (b - a) // block.copies, (d - c) // block.copies
        for copy in range(block.copies):
            for i in range(rows):
                assert block.opens != bool(seen[a + copy * rows + i])
            for i in range(rows):
                end = keys - (rows - 1 - i) if block.is_causal else keys
                seen[a + copy * rows + i] += range(c + copy * keys, c + copy * keys + end)
    return seen


def _parents(steps: list[int], stem: int) -> list[int]:
    """A run of `stem` nodes, then a node at a time: under the last one, or under one of those above it."""
    parents = list(range(-1, stem - 1))
    for step in steps:
        at = len(parents) - 1
        for _ in range(step * 2):
            at = max(parents[at], 0)
        parents.append(at)
    return parents


@given(tries, st.integers(1, 400), st.data())
def test_blocks_of_some_rows_show_them_the_same(steps: list[int], stem: int, data: st.DataObject) -> None:
    parents = _parents(steps, stem)
    places = sorted(data.draw(st.sets(st.integers(0, len(parents) - 1), min_size=1)))
    blocks = blocks_of(parents)
    every = _seen(blocks, len(parents))
    some = _seen(restricted(blocks, places), len(places))
    assert some == [every[place] for place in places]


@given(tries, st.integers(1, 400))
def test_blocks_show_each_node_its_ancestors_once(steps: list[int], stem: int) -> None:
    parents = _parents(steps, stem)
    for node, found in enumerate(_seen(blocks_of(parents), len(parents))):
        wanted = [node]
        while parents[wanted[-1]] >= 0:
            wanted.append(parents[wanted[-1]])
        assert sorted(found) == wanted[::-1]


@pytest.mark.parametrize("width", [1 << 20, 1])
def test_sharing_is_switched_off(
    base_of: Callable[..., ConfigBase], tokenizer: Any, tmp_path: Path, width: int
) -> None:
    model = make_model(base_of("llama"), tokenizer, seed=1).to(torch.float64)
    trainer, rows = Trainer(Backbone(model), tmp_path, Budget(shares=False, width=width)), _rows()
    packed = trainer.pack(rows, [1.0] * len(rows))
    assert all((batch.blocks is not None) == (width > 1) for batch in packed)
    assert sum(batch.ids_ST.numel() for batch in packed) >= sum(row.num_tokens - 1 for row in rows)
    assert _gap(trainer, rows, dict(model.named_parameters())) < 1e-5


@pytest.mark.parametrize("places", [None, [0, 130, 131, 299, 310, 311, 340]])
def test_long_runs_in_strips_give_the_numbers_of_one_mask(places: list[int] | None) -> None:
    """A run of 300 nodes, under it a second one of 200, and two leaves of 9 under that; float64."""
    parents = [*range(-1, 499), 499, *range(500, 508), 499, *range(509, 517)]
    parents[400] = 299  # a fork: 300 … 399 is one branch, all others hang on 299
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, len(parents), 8, dtype=torch.float64) for _ in range(3))
    blocks, kept = blocks_of(parents), list(range(len(parents))) if places is None else places
    assert any(block.is_causal and block.rows != block.keys for block in blocks)
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[node] = mask[parent] if parent >= 0 else False
        mask[node, node] = True
    found = []
    for with_blocks in (False, True):
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        asked = own[0][:, :, kept]
        if with_blocks:
            out = tree_attention(asked, own[1], own[2], restricted(blocks, kept), 0.3)
        else:
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(asked, own[1], own[2], attn_mask=mask[kept], scale=0.3)
        (out * out.detach().cos()).sum().backward()
        found.append([out.detach(), *(x.grad for x in own)])
    for wanted, got in zip(*found, strict=True):
        assert wanted is not None and torch.allclose(wanted, got, rtol=1e-9, atol=1e-11)
