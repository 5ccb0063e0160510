"""Explaining a plan: what machines rely on, the picture, and sizes against counts made by hand."""

import json
import struct
from typing import Literal

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.plan import STAGES, ModelIR, PolicyIR
from masflow.compiler.sizes import estimate
from masflow.spec.mapping import ConfigBase, Lora, Optimizer


@pytest.fixture
def plan(project, tiny):
    return compile_experiment(project(tiny))


def test_the_json_has_the_keys_that_machines_rely_on(plan):
    found = json.loads(explain(plan, "json"))
    assert {"digest", "graph", "models", "sampler", "groups", "rewards", "stages"} <= set(found)
    assert {"name", "base", "roles", "adapters", "train"} <= set(found["models"][0])
    assert found["digest"] == plan.digest
    assert [n["name"] for n in found["graph"]["nodes"]] == ["plan", "howl", "read"]
    assert {"from": "read", "to": "plan", "when": "visits.plan < 2"} in found["graph"]["edges"]
    assert found["groups"][0] == {"key": ["task", "planner", "plan[visit]"], "expected_size": 8}
    assert [s["name"] for s in found["stages"]] == list(STAGES)


def test_the_text_says_who_plays_what_and_how_large_each_group_is(plan):
    """Row of FIELD_PROBLEMS, Grouping: wrong ids make every group of size 1; sizes are told beforehand."""
    text = explain(plan)
    assert "policy (learns, lr 1e-05): planner, wolf_0, wolf_1, wolf_2, reader" in text
    assert "(task, wolf, howl[visit,copy]): 8 turns at most" in text
    assert "read -> plan when visits.plan < 2" in text
    assert plan.digest in text
    assert "form = well_formed (weight 1): each turn of every role" in text
    assert "pipeline sync: one process plays, then trains; staleness 0" in text
    assert "local: everything in this process; threads 1; a run repeats bit for bit" in text


def test_the_text_of_a_plan_on_ray_says_what_each_model_gets(project, tiny):
    runtime = """runtime:
  backend: ray
  defaults: {placement: separate, rollout: {workers: 2, gpus: 1, engine: {max_batch_tokens: 64}}}
"""
    text = explain(compile_experiment(project({**tiny, "tiny.yaml": tiny["tiny.yaml"] + runtime})))
    assert "ray: a star of processes, with a Ray of its own on this machine; threads as many as" in text
    assert "policy: placement separate, rollout workers 2 (each 1 GPUs) with transformers, trainer" in text
    own = "engine of policy transformers: at most 64 tokens decoded together, 268MB of what rows leave kept"
    assert own in text
    assert "pipeline sync: all play, then all train; staleness 0" in text


def test_the_text_says_what_the_engine_is_told(project, tiny):
    runtime = "runtime: {engine: {prefix_cache_bytes: 0, decoder: modules}}\n"
    text = explain(compile_experiment(project({**tiny, "tiny.yaml": tiny["tiny.yaml"] + runtime})))
    assert "decoded together, nothing of what rows leave kept for prompts that go on from them" in text
    assert "decoder modules" in text


def test_the_picture_has_every_node_and_arrow_and_escapes_conditions(project, tiny):
    workflow = tiny["workflow.yaml"].replace(
        "visits.plan < 2", "plan.plan == 'a \\\"b\\\"' or visits.plan < 2"
    )
    picture = explain(compile_experiment(project({**tiny, "workflow.yaml": workflow})), "mermaid")
    rows = picture.splitlines()
    assert rows[0] == "flowchart TD"
    assert sum("-->" in row for row in rows) == 5
    assert "visits.plan &lt; 2" in picture
    assert all(row.count('"') % 2 == 0 for row in rows)


def model(base, train: Literal["full", "lora", "frozen"] = "full", lora=None, adapters=1):
    names = [f"r{i}" for i in range(adapters)]
    policies = tuple(PolicyIR(f"m/{n}", "m", n, (n,), True, Optimizer()) for n in names)
    return ModelIR("m", base, "", train, policies, lora or Lora(), dtype="float32")


CONFIG = {
    "model_type": "qwen3", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_parameters_of_a_small_decoder_agree_with_a_count_by_hand():
    """Embedding 50·8; a layer: q 8·8, k and v 8·4 each, o 8·8, feed-forward 3·8·12; norms 8·(2·2 + 1)."""
    base = ConfigBase(config=CONFIG, tokenizer="some/tokenizer")
    layers = 2 * (64 + 32 + 32 + 64 + 288)
    size = estimate(model(base))
    assert size is not None and size.num_parameters == 400 + layers + 40 == size.num_trained
    assert size.memory_bytes == 16 * size.num_trained
    frozen = estimate(model(ConfigBase(config=CONFIG, tokenizer="t", freeze=("embeddings",))))
    assert frozen is not None and frozen.num_trained == layers + 40
    assert frozen.memory_bytes == 16 * (layers + 40) + 4 * 400


def test_two_adapters_of_rank_two_train_their_two_factors_each():
    """Rank · (in + out) of seven linear layers: 2·(16 + 12 + 12 + 16 + 20 + 20 + 20) a layer and adapter."""
    size = estimate(model(ConfigBase(config=CONFIG, tokenizer="t"), "lora", Lora(rank=2), adapters=2))
    assert size is not None and size.num_trained == 2 * 2 * 2 * 116


def test_a_folder_is_counted_by_the_header_of_its_weights(tmp_path):
    header = json.dumps(
        {"__metadata__": {}, "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
         "b": {"dtype": "F32", "shape": [7], "data_offsets": [60, 88]}}
    ).encode()  # fmt: skip
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(88))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    size = estimate(model(str(tmp_path), "frozen"))
    assert size is not None and (size.num_parameters, size.num_trained) == (22, 0)


def test_a_hub_ids_size_is_not_guessed():
    assert estimate(model("Some/Model-7B")) is None
