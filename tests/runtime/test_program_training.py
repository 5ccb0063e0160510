"""A workflow that is a function trains, repeats, resumes bit for bit, and is refused once it has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics

Toy = Callable[..., Path]
PROGRAM = '''
from masflow import workflow


@workflow(
    task={"word": str, "answer": {"type": str, "hidden": True}},
    roles={
        "call": {"prompt": "say {{ word }}",
                 "reply": {"max_tokens": 3, "on_malformed": "continue", "default": {"text": "red"}}},
        "echo": {"prompt": "hear {{ heard }}", "reply": {"max_tokens": 3}},
    },
    rewards=[
        {"name": "echoed", "use": "echo.py:echoed", "otherwise": 0,
         "args": {"said": "{{ output.said }}", "answer": "{{ answer }}"}},
        {"name": "called", "use": "echo.py:echoed", "level": "role", "roles": ["call"], "weight": 0,
         "otherwise": 0, "args": {"said": "{{ call.text }}", "answer": "{{ answer }}"}},
    ],
    output={"said": "{{ result }}"},
)
async def echo_team(task, agents, ctx):
    """One calls, one echoes."""
    said = await agents.call()
    return (await agents.echo(heard=said.text)).text
'''


@pytest.fixture
def program(toy: Toy) -> Callable[..., Path]:
    def write(*changes: tuple[str, str]) -> Path:
        path = toy(("workflow: echo_workflow.yaml", "workflow: echo_team.py:echo_team"), *changes)
        (path.parent / "echo_team.py").write_text(PROGRAM)
        return path

    return write


TWIN = (
    ("  caller:", "  call:"),
    ("  echoer:", "  echo:"),
    ("role: caller", "role: call"),
    ("role: echoer", "role: echo"),
    ("roles: [caller]", "roles: [call]"),
)
"""The YAML team of the toy, its roles named as its nodes."""


def told(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(out / "metrics.jsonl")]


def test_it_trains_as_its_yaml_twin_does_from_the_same_demonstrations(program, toy_at, tmp_path):
    train(compile_experiment(program()), tmp_path / "function")
    twin = toy_at(tmp_path / "twin", workflow=TWIN)
    train(compile_experiment(twin), tmp_path / "yaml")
    assert told(tmp_path / "function") == told(tmp_path / "yaml")
    assert any(
        r["kind"] == "train" and r["batch"]["learnable_group_frac"] for r in told(tmp_path / "function")
    )


def test_a_run_that_was_stopped_goes_on_bit_for_bit(program, tmp_path):
    plan = compile_experiment(program())
    train(plan, tmp_path / "whole")
    stop = StopFlag()

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 2)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "parts", on_event=on_event, stop=stop)
    train(plan, tmp_path / "parts", resume=True)
    assert told(tmp_path / "parts") == told(tmp_path / "whole")


def test_a_function_that_has_changed_isnt_resumed(program, tmp_path):
    path = program()
    train(compile_experiment(path), tmp_path / "run")
    source = path.parent / "echo_team.py"
    source.write_text(source.read_text().replace("heard=said.text", "heard=said.text.upper()"))
    with pytest.raises(RunError, match="plan"):
        train(compile_experiment(path), tmp_path / "run", resume=True)
