"""Keys and values that prompts go on from: found by what they hold, bounded, never older than the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from masflow.compiler.graph import Graph, RoleIR
from masflow.compiler.plan import Plan
from masflow.models.backbone import Backbone
from masflow.models.decoding import Drawing, Job, Sampled
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.prefixes import PrefixCache
from masflow.models.speaking import ModuleSpeaker, Prefix
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.worker import Worker
from masflow.spec.mapping import Optimizer
from masflow.trace import Message

Make = Callable[..., Backbone]


def _prefix(length: int) -> Prefix:
    """40 bytes a token: one layer, one head, D = 5."""
    keys = torch.arange(length * 5, dtype=torch.float32).view(1, length, 5)
    return Prefix(length, (keys,), (keys + 0.5,))


def _ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 140, size=count).tolist())


def test_the_longest_known_beginning_is_found_and_always_shorter_than_the_prompt() -> None:
    cache = PrefixCache(10**6)
    one, other = _ids(100), (*_ids(60), *_ids(40, seed=1))
    cache.keep("p", one, _prefix(100))
    cache.keep("p", other, _prefix(100))
    lengths = {}
    for name, ids in {
        "continued": (*other, 7, 8),
        "the same": one,
        "a branch": (*one[:77], 1, 2, 3),
        "too little": (*one[:20], *_ids(50, seed=2)),
        "unknown": _ids(80, seed=3),
    }.items():
        found = cache.find("p", ids)
        lengths[name] = found.length if found else 0
        if found is not None:
            assert torch.equal(found.keys[0], _prefix(100).keys[0][:, : found.length])
    # Worked out by hand: the second row is continued whole; all but the last token of the first; 77 of it.
    assert lengths == {"continued": 100, "the same": 99, "a branch": 77, "too little": 0, "unknown": 0}
    assert cache.find("q", one) is None


def test_a_row_that_another_continues_needs_no_room_of_its_own() -> None:
    cache = PrefixCache(10**6)
    cache.keep("p", _ids(64), _prefix(64))
    cache.keep("p", (*_ids(64), *_ids(32, seed=1)), _prefix(96))
    cache.keep("p", _ids(64), _prefix(64))
    assert (len(cache), cache.num_bytes) == (1, 96 * 40)


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    cache = PrefixCache(3 * 64 * 40)
    rows = [_ids(64, seed) for seed in range(4)]
    for row in rows[:3]:
        cache.keep("p", row, _prefix(64))
    cache.find("p", (*rows[0], 1))
    cache.keep("p", rows[3], _prefix(64))
    assert [cache.find("p", (*row, 1)) is not None for row in rows] == [True, False, True, True]
    assert cache.num_bytes == cache.max_bytes
    cache.keep("p", _ids(200, seed=9), _prefix(200))
    assert cache.find("p", (*_ids(200, seed=9), 1)) is None and len(cache) == 3
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0) and cache.find("p", (*rows[0], 1)) is None


# -- in the decoding loop -------------------------------------------------------------------------


def _talk(backbone: Backbone, cache: PrefixCache | None, turns: int = 3) -> tuple[list[Sampled], int]:
    """Five conversations of three turns each, two of them from one prompt, and a branch of the first."""
    how = SamplingParams(max_tokens=5)
    prompts = [_ids(33), _ids(33), _ids(20, seed=1), _ids(34, seed=2), _ids(40, seed=3)]
    drawing = Drawing(ModuleSpeaker(backbone), backbone.device, frozenset({9}), memory=cache)
    said: list[Sampled] = []
    for turn in range(turns):
        jobs = [Job(p, how, 10 * turn + n, policy="p", is_kept=True) for n, p in enumerate(prompts)]
        numbers, done = drawing.add(jobs), {}
        while not drawing.is_idle:
            done.update(drawing.advance())
        said += [done[number] for number in numbers]
        prompts = [(*p, *done[n].ids, 5, 6 + turn) for p, n in zip(prompts, numbers, strict=True)]
        prompts[-1] = (*prompts[0][:-3], 30, 31)
    return said, drawing.num_cached


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_replies_are_the_same_with_and_without_what_is_at_hand(backbone: Make, family: str) -> None:
    model = backbone(family)
    plain, none = _talk(model, None)
    ample = PrefixCache(10**9)
    cached, tokens = _talk(model, ample)
    assert [r.ids for r in cached] == [r.ids for r in plain]
    assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in zip(cached, plain, strict=True))
    assert none == 0 and tokens > 250
    tight, fewer = _talk(model, PrefixCache(ample.num_bytes // 3))
    assert [r.ids for r in tight] == [r.ids for r in plain] and fewer < tokens


# -- never stale ----------------------------------------------------------------------------------


def _group(plan: Plan, folder: Path) -> tuple[ModelGroup, Worker]:
    group = ModelGroup(plan.models[0], plan, folder)
    [actor] = group.learners
    assert isinstance(actor, LocalActor)
    return group, actor.instance


def _conversing(plan: Plan) -> Plan:
    """One role that holds a conversation, so that its rows are kept."""
    role = RoleIR("asker", None, conversation="role")
    return replace(plan, workflows={"flow": Graph("flow", roles=(role,))})


def _ask(group: ModelGroup, policy: str, tag: str, parents: Sequence[Reply] = ()) -> list[Reply]:
    how = SamplingParams(temperature=0.8, max_tokens=5)
    text = "what is the colour of sky grass sea say: answer one two three red green blue " * 2
    asked = [(Message("user", f"{text} {word}"),) for word in ("red", "green", "blue")]
    if parents:
        asked = [
            (*a, Message("assistant", p.text, p.turn_id), Message("user", "say red"))
            for a, p in zip(asked, parents, strict=True)
        ]
    ids = [p.turn_id for p in parents] or [None] * 3
    return group.generate(
        [
            Request(f"{tag}{n}", policy, a, how, n, i, role="asker")
            for n, (a, i) in enumerate(zip(asked, ids, strict=True))
        ]
    )


MOVES = ["supervise", "update", "load", "receive", "warm start", "step"]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("train", ["full", "lora"])
def test_nothing_is_taken_from_before_the_weights_moved(
    group_plan: Callable[..., Plan], tmp_path: Path, train: str, move: str
) -> None:
    if move == "warm start" and train == "full":
        move = "supervise"
    plan = _conversing(group_plan(train))
    group, worker = _group(plan, tmp_path / "a")
    policy = plan.models[0].policies[0].name
    try:
        first = _ask(group, policy, "a")
        before = group.num_cached
        _ask(group, policy, "b", first)
        assert group.num_cached > before  # it is at hand as long as nothing moves
        _move(group, worker, policy, move, first, tmp_path)
        before = group.num_cached
        found = _ask(group, policy, "c", first)
        assert group.num_cached == before
        worker.engine._prefixes = None
        assert [r.text for r in _ask(group, policy, "d", first)] == [r.text for r in found]
    finally:
        group.close()


def _move(
    group: ModelGroup, worker: Worker, policy: str, move: str, said: Sequence[Reply], folder: Path
) -> None:
    turns = [reply.turn_id for reply in said]
    optimizer = Optimizer(lr=5e-2)
    match move:
        case "supervise":
            group.supervise(policy, turns, optimizer, 0, 1)
        case "warm start":
            group.supervise("m", turns, optimizer, 0, 1)
        case "update":
            rows = [TrainRow(turn, policy, 1.0, 0.2, 0, 0.8) for turn in turns]
            group.update(policy, rows, LossSpec(), 0, 1)
        case "load":
            group.save(folder / "saved")
            group.load(folder / "saved")
        case "receive":
            worker.receive(worker.payload(policy, whole=True))
        case "step":
            rows = {reply.turn_id: worker.experience.get(reply.turn_id) for reply in said}
            group.clear_rows()
            worker.experience.add(row for row in rows.values() if row is not None)


def test_adapters_share_no_keys_and_values(group_plan: Callable[..., Plan], tmp_path: Path) -> None:
    plan = _conversing(group_plan("lora", ("asker", "judge")))
    group, worker = _group(plan, tmp_path)
    try:
        with torch.no_grad():
            for name, weight in worker.policies.learners["m/judge"].parameters.items():
                weight.copy_(torch.sin(torch.arange(weight.numel()).view_as(weight) + len(name)) * 0.3)
        worker.engine.moved()
        first = _ask(group, "m/asker", "a")
        before = group.num_cached
        found = _ask(group, "m/judge", "b", first)
        assert group.num_cached == before
        worker.engine._prefixes = None
        assert [r.text for r in _ask(group, "m/judge", "c", first)] == [r.text for r in found]
        assert [r.text for r in _ask(group, "m/asker", "d", first)] != [r.text for r in found]
    finally:
        group.close()
