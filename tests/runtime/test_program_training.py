"""A workflow that is a function trains, repeats, resumes bit for bit, and is refused once it has changed."""

from __future__ import annotations

import json
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
    with pytest.raises(RunError, match="the code of the workflow 'echo_team'"):
        train(compile_experiment(path), tmp_path / "run", resume=True)


def test_what_breaks_in_episodes_is_told_with_its_line_while_the_run_goes_on(program, tmp_path):
    path = program(("warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n", ""))
    source = path.parent / "echo_team.py"
    text = source.read_text()
    broken = "said = await agents.call()\n    if task.word == 'red':\n        raise ValueError('no red')"
    source.write_text(text.replace("said = await agents.call()", broken))
    line = next(i for i, row in enumerate(source.read_text().splitlines(), 1) if "raise" in row)
    warnings = []

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        if kind == "warning":
            warnings.append(str(facts))

    train(compile_experiment(path), tmp_path / "run", on_event=on_event)
    found = [w for w in warnings if "of 12 episodes ended with tool_error and train nothing" in w]
    assert found and f"echo_team.py:{line}: ValueError: no red" in found[0] and "4 of 12" in found[0]


RESEARCH = '''
from masflow import gather, workflow


@workflow(
    task={"word": str},
    roles={"digger": {"prompt": "hear {{ word }}", "reply": {"max_tokens": 2}}},
    output={"found": "{{ result }}"},
)
async def dig(task, agents, ctx):
    """Digs once, and again after an odd find."""
    first = await agents.digger()
    return first.text if len(first.text) % 2 else (await agents.digger(prompt="say {{ word }}")).text


@workflow(
    task={"word": str, "answer": {"type": str, "hidden": True}},
    roles={"lead": {"prompt": "say {{ word }}",
                    "reply": {"max_tokens": 3, "on_malformed": "continue", "default": {"text": ""}}},
           "last": {"prompt": "hear {{ found | join(' ') }}", "reply": {"max_tokens": 3}}},
    workflows={"dig": dig},
    rewards=[{"name": "echoed", "use": "echo.py:echoed", "otherwise": 0,
              "args": {"said": "{{ output.said }}", "answer": "{{ answer }}"}}],
    output={"said": "{{ result }}"},
)
async def research(task, agents, ctx):
    """As many diggers as the lead says words."""
    words = (await agents.lead()).text.split()
    found = await gather(*[ctx.run(dig, word=word, key=i) for i, word in enumerate(words)])
    return (await agents.last(found=[f.found for f in found if f is not None])).text
'''
MODELS = "mapping: {models: {main: {roles: [lead, last]}, sub: {roles: [dig/digger]}}}"


@pytest.fixture
def research(toy: Toy) -> Path:
    path = toy(
        ("workflow: echo_workflow.yaml", "workflow: research.py"),
        ("mapping: {models: {policy: {roles: rest}}}", MODELS),
        ("warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n", ""),
    )
    (path.parent / "research.py").write_text(RESEARCH)
    text = path.read_text().replace("workflow: research.py", "workflow: research.py:research")
    path.write_text(text)
    return path


def test_a_varying_number_of_inner_episodes_trains_both_policies_and_resumes_bit_for_bit(research, tmp_path):
    plan = compile_experiment(research)
    assert plan.policy_of == {"lead": "main", "last": "main", "dig/digger": "sub"}
    train(plan, tmp_path / "whole")
    steps = [r for r in told(tmp_path / "whole") if r["kind"] == "train"]
    turns = [r["batch"]["dig/digger/turns"] / r["episodes"] for r in steps]
    assert len(set(turns)) > 1, "the number of diggers doesn't vary"
    assert all(set(r["policies"]) == {"main", "sub"} for r in steps[:1])
    stop = StopFlag()

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 2)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "parts", on_event=on_event, stop=stop)
    train(plan, tmp_path / "parts", resume=True)
    assert told(tmp_path / "parts") == told(tmp_path / "whole")


def test_every_command_takes_a_function(program, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from masflow.cli import app

    path = program()
    monkeypatch.chdir(path.parent)
    say = CliRunner().invoke

    def ok(*words: str) -> str:
        done = say(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert "no problem" in ok("check", "toy.yaml", "echo_team.py")
    assert "played by toy/echo_team.py:echo_team" in ok("explain", "toy.yaml")
    ok("train", "toy.yaml", "--out", str(tmp_path / "run"), "--json", "--set", "train.steps=2")
    ok("sft", "toy.yaml", "--out", str(tmp_path / "sft"), "--json")
    source = path.parent / "echo_team.py"
    source.write_text("print('at import')\n" + source.read_text())
    done = say(
        app, ["train", "toy.yaml", "--out", str(tmp_path / "said"), "--json", "--set", "train.steps=1"]
    )
    assert json.loads(done.stdout)["steps"] == 1 and "at import" in done.stderr
    source.write_text(source.read_text().removeprefix("print('at import')\n"))
    assert '"echoed"' in ok("eval", "toy.yaml", "--checkpoint", str(tmp_path / "run"), "--json")
    text = ok(
        "run", "toy.yaml", "--checkpoint", str(tmp_path / "run"), "--task", '{"word": "red", "answer": "red"}'
    )
    drawn = ok("run", "toy.yaml", "--checkpoint", str(tmp_path / "run"), "--graph")
    assert drawn.startswith("flowchart TD") and drawn.count('(["') == 2
    assert "── call" in text and "── echo" in text and "output: " in text
