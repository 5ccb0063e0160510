"""A script that writes its team in Python trains the same plan as the YAML documents do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from masflow.compiler import compile_experiment
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

Toy = Callable[..., Path]
SCRIPT = """
from pathlib import Path
import json, sys

from echo import echoed
from masflow.compiler import compile_experiment
from masflow.dsl import Workflow, experiment, field, mapping
from masflow.runtime.controller import train

team = Workflow("echo", task={"word": str, "answer": field(str, hidden=True)})
caller = team.role("caller", prompt="say {{ word }}",
                   reply={"max_tokens": 3, "on_malformed": "continue", "default": {"text": "red"}})
echoer = team.role("echoer", prompt="hear {{ call.text }}", reply={"max_tokens": 3})
call, echo = team.node("call", role=caller), team.node("echo", role=echoer)
team.start >> call >> echo >> team.end
team.output(said="{{ echo.text }}")
team.reward("echoed", echoed, otherwise=0, args={"said": "{{ echo.text }}", "answer": "{{ answer }}"})
team.reward("called", echoed, level="role", roles=[caller], weight=0, otherwise=0,
            args={"said": "{{ call.text }}", "answer": "{{ answer }}"})

plan = compile_experiment(experiment(
    team,
    mapping({"policy": {"roles": "rest"}}),
    base={
        "config": {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                   "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                   "max_position_embeddings": 64, "tie_word_embeddings": True},
        "tokenizer": {"wordpiece": {"files": ["words.jsonl"], "whole_words": True}},
    },
    data={"train": "tasks.jsonl", "eval": "held_out.jsonl"},
    warm_start={"data": "demos.jsonl", "steps": 4, "batch": 4, "optimizer": {"lr": 5.0e-3}},
    algorithm={"use": "grpo", "samples": 4, "updates_per_step": 2},
    train={"steps": 4, "tasks_per_step": 3, "seed": 0, "save_every": 1, "keep": 8,
           "optimizer": {"lr": 1.0e-2}},
    eval={"samples": 1},
))
train(plan, Path(sys.argv[1]))
print(json.dumps({"digest": plan.digest}))
"""


def steps(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(out / "metrics.jsonl")]


def test_a_script_trains_the_plan_of_its_yaml(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy())
    script = tmp_path / "toy" / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "python")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"digest": plan.digest}
    train(plan, tmp_path / "yaml")
    assert steps(tmp_path / "python") == steps(tmp_path / "yaml")
