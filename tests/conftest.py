"""A team small enough to train in a second: two roles, eight tasks, a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

WORDS = ["red", "green", "blue", "white", "black", "pink", "grey", "brown"]
WORKFLOW = """
name: echo
task: {word: str, answer: {type: str, hidden: true}}
roles:
  caller: {prompt: "say {{ word }}", reply: {max_tokens: 3, on_malformed: continue,
    default: {text: red}}}
  echoer: {prompt: "hear {{ call.text }}", reply: {max_tokens: 3}}
nodes: {call: {role: caller}, echo: {role: echoer}}
edges: [start -> call -> echo -> end]
output: {said: "{{ echo.text }}"}
rewards:
  - {name: echoed, use: "echo.py:echoed", otherwise: 0,
     args: {said: "{{ echo.text }}", answer: "{{ answer }}"}}
  - {name: called, use: "echo.py:echoed", level: role, roles: [caller], weight: 0, otherwise: 0,
     args: {said: "{{ call.text }}", answer: "{{ answer }}"}}
"""
REWARD = '''
def echoed(said: str, answer: str) -> float:
    """1 for the word itself, and a little for an odd number of letters, so that random replies differ."""
    return float(said == answer) + 0.1 * (len(said) % 2)
'''
EXPERIMENT = """
workflow: echo_workflow.yaml
mapping: {models: {policy: {roles: rest}}}
base:
  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64,
    tie_word_embeddings: true}
  tokenizer: {wordpiece: {files: [words.jsonl], whole_words: true}}
data: {train: tasks.jsonl, eval: held_out.jsonl}
warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}
algorithm: {use: grpo, samples: 4, updates_per_step: 2}
train: {steps: 4, tasks_per_step: 3, seed: 0, save_every: 1, keep: 8, optimizer: {lr: 1.0e-2}}
eval: {samples: 1}
"""


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


Changes = tuple[tuple[str, str], ...]


def write_toy(root: Path, *changes: tuple[str, str], workflow: Changes = ()) -> Path:
    """Write the toy project; `changes` replace (old, new) texts of its experiment, whose path it gives."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "workflows").mkdir(exist_ok=True)
    texts = {"echo_workflow.yaml": WORKFLOW, "toy.yaml": EXPERIMENT, "echo.py": REWARD}
    for name, pairs in (("toy.yaml", changes), ("echo_workflow.yaml", workflow)):
        for old, new in pairs:
            assert old in texts[name], old
            texts[name] = texts[name].replace(old, new)
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    tasks: list[dict[str, object]] = [{"word": word, "answer": word} for word in WORDS]
    _lines(root / "tasks.jsonl", tasks[:5])
    _lines(root / "held_out.jsonl", tasks[5:])
    _lines(root / "words.jsonl", [{"text": " ".join(["say", "hear", *WORDS])}])
    turns = [[{"node": "call", "reply": w}, {"node": "echo", "reply": w}] for w in WORDS[:5]]
    _lines(root / "demos.jsonl", [{"task": tasks[i], "turns": turns[i]} for i in range(5)])
    return root / "toy.yaml"


@pytest.fixture(scope="session")
def toy_at() -> Callable[..., Path]:
    """`toy_at(root, *changes, workflow=…)` writes the toy project into a folder."""
    return write_toy


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Path]:
    """`toy(*changes, workflow=…)` writes the toy project into this test's folder and gives its experiment."""
    return partial(write_toy, tmp_path / "toy")
