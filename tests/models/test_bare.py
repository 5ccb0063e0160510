"""The decoder without modules against the modules, run plainly on whole rows."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from masflow.models import adapters, bare, bare_arena
from masflow.models.adapters import StackedAdapters
from masflow.models.backbone import Backbone
from masflow.models.bare import BareSpeaker
from masflow.models.bare_arena import split_blocks
from masflow.models.speaking import ModuleSpeaker, Opening, Prefix, Speaker
from masflow.spec.mapping import Lora

VOCAB = 96
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama, scaled rotary": ("llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, scaled rotary": ("qwen3", {"head_dim": 8, "rope_parameters": YARN}),
}
NAMES = ("a", "b", "c")


def make(kind: str, dtype: torch.dtype = torch.float32) -> Backbone:
    family, settings = KINDS[kind]
    config = AutoConfig.for_model(family, **{**BASE, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for path, parameter in model.named_parameters():
            if path.endswith("bias") or "norm" in path:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return Backbone(model.to(dtype).requires_grad_(False))


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Backbone, StackedAdapters]:
    backbone = make(kind, dtype)
    adapters.attach(backbone.model, dict.fromkeys(NAMES, Lora(rank=4, alpha=8, targets="all-linear")), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        for path, weight in adapters.adapter_parameters(backbone.model, name).items():
            if "lora_B" in path:
                weight.data.normal_(0, 0.2, generator=generator)
    return backbone, StackedAdapters(backbone.model, NAMES)


def plain(backbone: Backbone, ids: list[int], adapter: str | None, is_adapted: bool) -> Tensor:
    """(V,) log-probs of the next token by the modules, run on the whole row."""
    hidden = lambda: backbone.logits(backbone.hidden(torch.tensor([ids]))[0, -1:])[0]  # noqa: E731
    with torch.no_grad():
        if not is_adapted:
            return hidden().log_softmax(-1)
        if adapter is None:
            with adapters.switched_off(backbone.model):
                return hidden().log_softmax(-1)
        adapters.activate(backbone.model, adapter)
        return hidden().log_softmax(-1)


class Party:
    """A speaker with, beside it, what every row has been fed."""

    def __init__(self, backbone: Backbone, stacked: StackedAdapters | None = None, bound: float = 1e-5):
        speaker = BareSpeaker.of(backbone, stacked)
        assert speaker is not None
        self.speaker, self.backbone, self.stacked, self.bound = speaker, backbone, stacked, bound
        self.rows: list[tuple[list[int], str | None]] = []
        self.rng = np.random.default_rng(0)

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(int(i) for i in self.rng.integers(3, VOCAB, size=length))

    def admit(self, *openings: Opening) -> None:
        logits = self.speaker.admit(openings)
        new = [([*o.ids], o.adapter) for o in openings for _ in range(o.copies)]
        self.rows += [(list(ids), name) for ids, name in new]
        self.compare(logits, self.rows[-len(new) :])

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            fed = [int(i) for i in self.rng.integers(3, VOCAB, size=len(self.rows))]
            logits = self.speaker.step(torch.tensor(fed))
            for (ids, _), token in zip(self.rows, fed, strict=True):
                ids.append(token)
            self.compare(logits, self.rows)

    def leave(self, rows: list[int], keep: bool = False) -> list[Prefix | None]:
        kept = self.speaker.leave(rows, [keep] * len(rows))
        self.rows = [row for i, row in enumerate(self.rows) if i not in rows]
        assert self.speaker.num_rows == len(self.rows)
        return kept

    def compare(self, logits: Tensor, rows: list[tuple[list[int], str | None]]) -> None:
        assert logits.shape == (len(rows), VOCAB) and logits.dtype == torch.float32
        for logits_V, (ids, name) in zip(logits, rows, strict=True):
            expected_V = plain(self.backbone, ids, name, self.stacked is not None)
            likely = expected_V > -20  # below, float32 itself is coarser than the bound
            gap = (logits_V.log_softmax(-1) - expected_V)[likely].abs().max()
            assert float(gap) <= self.bound * max(1.0, float(logits_V.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_and_go_and_say_what_the_modules_say(kind: str) -> None:
    party = Party(make(kind))
    party.admit(Opening(party.prompt(9), copies=3), Opening(party.prompt(9), copies=3))
    party.step(2)
    party.leave([1])
    party.step()
    party.admit(Opening(party.prompt(3)), Opening(party.prompt(40), copies=2), Opening(party.prompt(11)))
    party.step(2)
    party.leave([0, 5, 6])
    party.step()
    party.leave([2, 1])
    party.step()
    party.leave(list(range(len(party.rows))))
    party.admit(Opening(party.prompt(1), copies=2))
    party.step(2)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_conversation_goes_on_from_its_prefix(kind: str) -> None:
    party = Party(make(kind))
    party.admit(Opening(party.prompt(9), copies=2), Opening(party.prompt(5), copies=2))
    party.step(3)
    said = [ids for ids, _ in party.rows]
    kept = party.leave([3, 0, 2], keep=True)
    assert [p.length if p else 0 for p in kept] == [len(said[3]), len(said[0]), len(said[2])] == [8, 12, 8]
    assert kept[0] is not None and kept[0].keys[0].shape[1] == 8
    party.step()
    party.admit(
        Opening((*said[3], *party.prompt(4)), prefix=kept[0], copies=3),
        Opening((*said[0], *party.prompt(7)), prefix=kept[1]),
        Opening(party.prompt(6)),
        Opening((*said[2], *party.prompt(4)), prefix=kept[2], copies=3),
    )
    party.step(2)
    again = party.leave([1, 4], keep=True)
    assert [p.length if p else 0 for p in again] == [14, 21]


@pytest.mark.parametrize("kind", ["llama, tied, biases", "mistral", "qwen2", "qwen3"])
def test_rows_of_all_adapters_speak_together(kind: str) -> None:
    party = Party(*adapted(kind))
    party.admit(Opening(party.prompt(6), "a", copies=2), Opening(party.prompt(6), "c", copies=2))
    party.step(2)
    party.admit(Opening(party.prompt(4), None), Opening(party.prompt(8), "b", copies=3))
    party.step(2)
    party.leave([0, 1, 2, 3, 4])
    party.step(2)


@pytest.mark.parametrize("kind", ["llama, tied, biases", "qwen3"])
def test_an_adapter_alone_is_added_up_until_others_join(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "FEW", 1)
    party = Party(*adapted(kind))
    model = party.backbone.bare[1]
    party.admit(Opening(party.prompt(6), "a", copies=2))
    party.step(3)
    assert model.merged == "a" and model.layers[0].qkv._merged == "a"
    party.admit(Opening(party.prompt(4), "b"), Opening(party.prompt(4), None))
    party.step(3)
    assert model.has_copies and model.merged is None
    party.leave([0, 1, 3])
    party.step(3)  # the copies that are there serve one adapter too
    party.admit(Opening(party.prompt(5), "b"))
    party.step(2)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_bf16_differs_by_rounding(is_adapted: bool) -> None:
    backbone, stacked = (
        adapted("llama", torch.bfloat16) if is_adapted else (make("llama", torch.bfloat16), None)
    )
    party = Party(backbone, stacked, bound=0.1)
    name = "b" if is_adapted else None
    party.admit(Opening(party.prompt(9), name, copies=3), Opening(party.prompt(20), copies=2))
    party.step(2)


@pytest.mark.parametrize("change", ["in place", "assigned", "through data", "moved and back"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_weights_are_never_stale(change: str, is_adapted: bool) -> None:
    backbone, stacked = adapted("llama") if is_adapted else (make("llama"), None)
    party = Party(backbone, stacked)
    name = "b" if is_adapted else None
    ids = party.prompt(5)
    party.admit(Opening(ids, name))
    party.step()
    party.leave([0])
    for weight in backbone.model.parameters():
        with torch.no_grad():
            if change == "in place":
                weight.mul_(1.1)
            elif change == "through data":
                weight.data.mul_(1.1)
            elif change == "assigned":
                weight.data = weight * 1.1
            else:
                own, weight.data = weight.data, weight * 1.1
                weight.data = own.mul_(0.9)
    party.admit(Opening(ids, name))
    party.step()


def test_an_update_in_place_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "FEW", 1)
    backbone = make("llama")
    party = Party(backbone)
    backbone.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(backbone.model.parameters(), lr=0.01, fused=True)
    for _ in range(3):  # that kind of step leaves no trace at a parameter
        party.admit(Opening(party.prompt(5), copies=2))
        party.step(3)
        party.leave([0, 1])
        backbone.model(torch.tensor([party.prompt(8)])).logits.logsumexp(-1).sum().backward()
        optimizer.step()


def test_rows_under_way_go_on_with_new_weights_that_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "FEW", 1)
    backbone = make("llama")
    party = Party(backbone)
    party.admit(Opening(party.prompt(5), copies=2))
    party.step(3)
    head = backbone.model.lm_head.weight  # keys and values don't depend on it
    with torch.no_grad():
        head.data.mul_(2)
    BareSpeaker.forget(backbone)
    party.step(2)


@pytest.mark.parametrize("kind", ["llama, tied, biases", "qwen3"])
@pytest.mark.parametrize("room", [0, 2**26])
def test_steps_are_the_same_with_as_many_copies_as_may_be(
    kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare, "FEW", 1)
    monkeypatch.setattr(bare, "MAX_COPIES", room)
    party = Party(*adapted(kind))
    party.admit(Opening(party.prompt(6), "a", copies=3), Opening(party.prompt(6), "b"))
    party.step(3)
    held = sum(joint._copy is not None for joint in party.backbone.bare[1].joints)
    assert held == 0 if room == 0 else held > 0
    party.leave([0, 1, 2, 3])
    assert all(joint._copy is None for joint in party.backbone.bare[1].joints)


def test_what_it_does_not_know_is_left_to_the_modules() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=VOCAB)
    backbone = Backbone(AutoModelForCausalLM.from_config(config))
    assert BareSpeaker.of(backbone) is None


def test_a_model_that_says_otherwise_is_left_to_the_modules() -> None:
    backbone = make("llama")
    for layer in backbone.model.model.layers:
        layer.self_attn.scaling *= 2 if layer.self_attn.layer_idx else 1
    assert BareSpeaker.of(backbone) is None


@pytest.mark.parametrize("padding", [0, 4096])
def test_rows_that_join_late_speak_beside_the_others_whatever_is_put_together(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare_arena, "_PADDING", padding)
    party = Party(make("qwen3"))
    for length, copies in ((9, 3), (7, 1), (40, 2), (8, 3), (3, 1), (12, 2)):
        party.admit(Opening(party.prompt(length), copies=copies))
        party.step(2)
    assert len(party.speaker._blocks) <= 4 if padding == 0 else len(party.speaker._blocks) == 1
    party.step(33)  # beyond the room that there is at first
    said = [ids for ids, _ in party.rows]
    kept = party.leave([11, 3, 1], keep=True)
    party.admit(*[Opening((*said[row], 5, 6), prefix=p) for row, p in zip((11, 3, 1), kept, strict=True)])
    party.step(2)
    party.leave([0, 1, 2])
    party.step(2)


_PARTIES: dict[str, tuple[Backbone, StackedAdapters]] = {}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["llama", "qwen3"]))
def test_in_whatever_order_rows_come_and_go_they_say_what_the_modules_say(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bare, "FEW", rng.choice([0, 1, 4]))
        patch.setattr(bare, "MAX_TOKENS", rng.choice([20, 1024]))
        for name, values in (("_PADDING", (0, 100, 4096)), ("_APART", (1, 4)), ("_STEP", (2, 32))):
            patch.setattr(bare_arena, name, rng.choice(values))
        if kind not in _PARTIES:
            _PARTIES[kind] = adapted(kind)
        party = Party(*_PARTIES[kind])
        party.admit(Opening(party.prompt(4), "a", copies=2))
        kept: list[tuple[list[int], str | None, Prefix]] = []
        for _ in range(rng.randrange(3, 9)):
            what = rng.choice(["admit", "step", "leave"]) if party.rows else "admit"
            if what == "admit":
                party.admit(*[_opening(rng, party, kept) for _ in range(rng.randrange(1, 4))])
            elif what == "step":
                party.step(rng.randrange(1, 4))
            else:
                gone = rng.sample(range(len(party.rows)), rng.randrange(1, len(party.rows) + 1))
                said = [party.rows[row] for row in gone]
                prefixes = party.leave(gone, keep=True)
                kept += [(ids, name, p) for (ids, name), p in zip(said, prefixes, strict=True) if p]


def _opening(rng: random.Random, party: Party, kept: list[tuple[list[int], str | None, Prefix]]) -> Opening:
    """A new prompt, or one that goes on from a row that left."""
    copies = rng.choice([1, 1, 2, 5])
    if kept and rng.random() < 0.5:
        ids, name, prefix = rng.choice(kept)
        assert prefix.length == len(ids)
        return Opening((*ids, *party.prompt(rng.randrange(1, 6))), name, prefix, copies)
    return Opening(party.prompt(rng.choice([1, 2, 6, 6, 20])), rng.choice([None, *NAMES]), None, copies)


def test_blocks_hold_prompts_of_like_length_and_as_many_rows() -> None:
    openings = [Opening((1,) * n, copies=c) for n, c in ((500, 1), (30, 8), (32, 8), (31, 1), (30, 8))]
    blocks = split_blocks(openings)
    assert sorted(u for block in blocks for u in block) == [0, 1, 2, 3, 4]
    assert [0] in blocks and [1, 2, 4] in blocks


def _cost(speaker: Speaker, openings: list[Opening]) -> float:
    """Processor seconds of ten steps, the quickest of each."""
    speaker.admit(openings)
    token_B = torch.full((speaker.num_rows,), 5)
    for _ in range(6):
        speaker.step(token_B)
    times = []
    for _ in range(10):
        start = time.process_time()
        speaker.step(token_B)
        times.append(time.process_time() - start)
    speaker.leave(list(range(speaker.num_rows)), [False] * speaker.num_rows)
    return min(times)


def _ratio(ours: Callable[[], float], theirs: Callable[[], float]) -> float:
    """How often as much they cost, the middle of seven pairs."""
    return statistics.median(theirs() / ours() for _ in range(7))


@pytest.mark.slow
def test_steps_cost_less_than_those_of_modules() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 1024}
    config = AutoConfig.for_model("llama", **{**BASE, **sizes})
    backbone = Backbone(AutoModelForCausalLM.from_config(config).requires_grad_(False))
    shape = Lora(rank=16, alpha=32, targets="all-linear")
    adapters.attach(backbone.model, dict.fromkeys((*NAMES, "d"), shape), seed=0)
    stacked = StackedAdapters(backbone.model, (*NAMES, "d"))
    assert (speaker := BareSpeaker.of(backbone, stacked)) is not None
    prompts = [tuple(range(k, k + 32)) for k in range(3, 7)]
    few = [Opening(prompts[0], "a", copies=8)]
    assert _ratio(lambda: _cost(speaker, few), lambda: _cost(ModuleSpeaker(backbone, stacked), few)) > 1.6
    four = [Opening(p, name, copies=8) for p, name in zip(prompts, (*NAMES, "d"), strict=True)]
    apart = lambda: sum(_cost(ModuleSpeaker(backbone, stacked), [one]) for one in four)  # noqa: E731
    assert _ratio(lambda: _cost(speaker, four), apart) > 2
    assert _ratio(lambda: _cost(ModuleSpeaker(backbone, stacked), four), apart) > 1.4
    long = [Opening(tuple(k % 90 + 3 for k in range(512)), "a", copies=8)]
    assert _ratio(lambda: _cost(speaker, long), lambda: _cost(ModuleSpeaker(backbone, stacked), long)) > 1.7
