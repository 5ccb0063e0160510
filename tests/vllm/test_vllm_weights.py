"""Published weights speak in vLLM from then on, and a delivery that fails is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from masflow.errors import RunError
from masflow.models.vllm_core import VllmCore
from masflow.spec.mapping import Lora

TOLERANCE = 1e-4
PROVEN = 1e-3
"""Nats that a proof of delivery allows in float32."""


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request, side):
    return side(request.param)


def worst(pair, requests):
    """Largest gap of drawn log-probs to Hugging Face's model as it is now."""
    gaps = [0.0]
    for one in requests:
        row = pair.engine.experience.get(one.turn_id)
        expected = pair.expected(one.policy, row.prompt_ids, row.reply_ids)
        gaps += [abs(a - b) for a, b in zip(row.logprobs, expected, strict=True)]
    return max(gaps)


def test_an_update_changes_logprobs_to_the_new_weights_and_nothing_cached_is_left(pair, ask):
    """The prompt fills several blocks, which the old weights computed."""
    requests = [ask(n, "what is the colour of sky " * 60 + "say") for n in range(3)]
    for step in range(3):
        pair.engine.generate(requests)
        assert worst(pair, requests) < TOLERANCE
        pair.move("m", seed=step)
        assert worst(pair, requests) > 10 * PROVEN, "the move shows"
        pair.publish("m")
        assert pair.gap("m") < PROVEN
        assert pair.engine.versions == {"m": step + 1}
    pair.engine.generate(requests)
    assert {pair.engine.experience.get(r.turn_id).version for r in requests} == {3}
    assert worst(pair, requests) < TOLERANCE


def test_a_delivery_that_was_lost_or_lost_a_part_is_seen_by_its_probe(pair):
    pair.move("m", seed=7)
    assert pair.gap("m") > PROVEN, "nothing arrived"
    payload = pair.policies.payload("m", pair.probe("m"))
    stale = {n: a for n, a in payload.tensors.items() if "layers.1.mlp" in n}
    pair.publish("m")
    assert pair.gap("m") < PROVEN
    pair.move("m", seed=8)
    payload = pair.policies.payload("m", pair.probe("m"))
    pair.engine.core.take_weights({**payload.tensors, **stale}, payload.dtypes)
    assert pair.gap("m") > PROVEN, "one layer stayed behind"
    pair.engine.receive(payload)
    assert pair.gap("m") < PROVEN


def test_a_payload_that_was_changed_on_its_way_is_refused_and_named(pair):
    payload = pair.policies.payload("m", pair.probe("m"))
    name = next(n for n in payload.tensors if "q_proj" in n)
    wrong = payload.tensors[name] + np.float32(1e-3)
    with pytest.raises(RunError, match=name):
        pair.engine.receive(replace(payload, tensors={**payload.tensors, name: wrong}))
    assert pair.gap("m") < PROVEN, "the old weights still speak"


def test_embeddings_that_stay_frozen_are_kept_although_they_are_never_sent(side, ask):
    pair = side("qwen3", freeze=("embeddings",))
    pair.move("m", seed=1)
    payload = pair.policies.payload("m", pair.probe("m"))
    assert "model.embed_tokens.weight" not in payload.tensors
    pair.engine.receive(payload)
    requests = [ask(n) for n in range(4)]
    pair.engine.generate(requests)
    assert worst(pair, requests) < TOLERANCE


def test_two_adapters_speak_each_its_own_in_one_batch(side, ask):
    """Against PEFT's log-probs of each adapter; then one moves alone, and then the backbone under both."""
    pair = side("qwen3", "lora", ("left", "right"))
    requests = [ask(n, policy=f"m/{'left' if n % 2 else 'right'}") for n in range(8)]
    pair.engine.generate(requests)
    assert worst(pair, requests) < TOLERANCE, "fresh adapters speak as the base does"
    for seed, policy in enumerate(("m/left", "m/right")):
        pair.move(policy, seed=seed, by=0.2)
        pair.publish(policy)
    pair.engine.generate(requests)
    assert worst(pair, requests) < TOLERANCE
    prompt, reply = tuple(range(5, 25)), (7, 9)
    left, right = (pair.engine.probe(p, prompt, reply) for p in ("m/left", "m/right"))
    assert max(abs(a - b) for a, b in zip(left, right, strict=True)) > 10 * PROVEN

    pair.move("m/left", seed=5, by=0.2)
    assert pair.gap("m/left") > PROVEN
    pair.publish("m/left")
    assert pair.gap("m/left") < PROVEN
    assert pair.engine.probe("m/right", prompt, reply) == right
    assert pair.engine.versions == {"m/left": 2, "m/right": 1}

    with pair.policies.learning_backbone() as backbone:
        for parameter in backbone.parameters.values():
            parameter.requires_grad_(False).mul_(1.1)
    for policy in ("m/left", "m/right"):
        pair.publish(policy)
    pair.engine.generate(requests)
    assert worst(pair, requests) < TOLERANCE


def test_one_adapter_moves_often_without_filling_up(side, ask):
    pair = side("llama", "lora", ("left", "right"))
    for step in range(8):
        pair.move("m/left", seed=step, by=0.1)
        pair.publish("m/left")
        assert pair.gap("m/left") < PROVEN
    assert pair.engine.versions == {"m/left": 8, "m/right": 0}
    requests = [ask(n, policy=f"m/{'left' if n % 2 else 'right'}") for n in range(4)]
    pair.engine.generate(requests)
    assert worst(pair, requests) < TOLERANCE


def test_an_adapter_too_large_for_vllm_is_refused_by_name():
    with pytest.raises(RunError, match="up to rank 512, not 600"):
        VllmCore("x", context=8, dtype=torch.float32, memory_frac=0.1, loras={"a": Lora(rank=600)})
