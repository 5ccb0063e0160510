"""The shipped deep research, trained: four policies of a made model, inner episodes, bit for bit again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

ROOT = Path(__file__).parents[2]
EXPERIMENT = f"""
workflow: {ROOT}/workflows/deep_research.py
mapping: {ROOT}/mappings/separate.yaml
base:
  config: {{model_type: qwen3, hidden_size: 48, intermediate_size: 96, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 2, head_dim: 24, max_position_embeddings: 2048,
    tie_word_embeddings: true}}
  tokenizer: {{wordpiece: {{files: [words.jsonl], whole_words: true}}}}
data: {{train: tasks.jsonl, eval: tasks.jsonl}}
warm_start: {{data: demos.jsonl, steps: 120, batch: 4, optimizer: {{lr: 5.0e-3}}}}
algorithm: {{use: grpo, samples: 4, temperature: 0.7}}
train: {{steps: 2, tasks_per_step: 2, seed: 0, save_every: 1, keep: 4, optimizer: {{lr: 3.0e-4}}}}
eval: {{samples: 0}}
"""


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def demonstration(who: str, city: str, river: str) -> dict[str, Any]:
    """A lead that plans one topic, sends one browser more, and answers."""
    question = f"Which river flows through the birthplace of {who}?"
    turns = [
        ("planner", json.dumps({"topics": [city]})),
        ("browse/reader", call("wiki", query=city)),
        ("browse/reader", f"<report>{city} lies on the {river}</report>"),
        ("lead", call("browse", topic=river)),
        ("browse/reader", call("wiki", query=river)),
        ("browse/reader", f"<report>{river} is a river</report>"),
        ("lead", f"<answer>{river}</answer>"),
    ]
    return {
        "task": {"question": question, "answers": [river]},
        "turns": [{"node": node, "reply": reply} for node, reply in turns],
    }


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    demos = [
        demonstration("Marie Curie", "Warsaw", "Vistula"),
        demonstration("Mozart", "Salzburg", "Salzach"),
    ]
    texts = [path.read_text() for path in sorted((ROOT / "workflows" / "deep_research").glob("*.md"))]
    texts += [
        json.loads(line)["text"] for line in (ROOT / "workflows" / "passages.jsonl").read_text().splitlines()
    ]
    texts += [demo["task"]["question"] for demo in demos]
    texts += [turn["reply"] for demo in demos for turn in demo["turns"]]
    files = {
        "tasks": [demo["task"] for demo in demos],
        "demos": demos,
        "words": [{"text": text} for text in texts],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "research.yaml").write_text(EXPERIMENT)
    return tmp_path / "research.yaml"


def told(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(out / "metrics.jsonl")]


def weights(folder: Path) -> dict[str, Any]:
    return {
        f"{file.relative_to(folder)}:{key}": tensor.tolist()
        for file in sorted(folder.rglob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


def test_deep_research_trains_and_a_run_that_is_resumed_is_the_same_bit_for_bit(experiment, tmp_path):
    plan = compile_experiment(experiment)
    result = train(plan, tmp_path / "whole")
    assert (
        result["eval_before"]["metrics"]["f1"] == 1.0
    )  # it learned its demonstrations: inner episodes are played
    steps = [record for record in told(tmp_path / "whole") if record["kind"] == "train"]
    for record in steps:
        assert record["roles"]["browse/reader"]["turns"] > record["roles"]["planner"]["turns"] == 8
        assert record["batch"]["learnable_group_frac"] > 0
    moved = set().union(*(record["policies"] for record in steps))
    assert {"own.lead", "own.browse.reader"} <= moved and "own.compute.clerk" not in moved
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_000002")
    train(plan, tmp_path / "again", resume=True)
    assert told(tmp_path / "again") == told(tmp_path / "whole")
    last = Path("checkpoints", "step_000002")
    assert weights(tmp_path / "again" / last) == weights(tmp_path / "whole" / last)
