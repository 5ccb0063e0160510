"""Held-out numbers: bootstrap, means that leave the unscored out, each role's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.evaluate import evaluate, headline, interval, mean

Toy = Callable[..., Path]


def test_the_interval_holds_the_mean_and_narrows_with_more_tasks():
    few = interval({i: [float(i % 2)] for i in range(10)}, 1, seed=0)
    many = interval({i: [float(i % 2)] for i in range(1000)}, 1, seed=0)
    assert few["mean"] == many["mean"] == 0.5
    assert few["low"] < 0.5 < few["high"]
    # The standard error of a mean of 1,000 coin tosses is 0.5 / sqrt(1000) = 0.0158; twice 1.96 of it: 0.062.
    assert many["high"] - many["low"] == pytest.approx(0.062, abs=0.01)
    assert interval({}, 2, seed=0)["mean"] is None


def test_unknown_values_leave_a_mean_and_are_no_zeros():
    assert mean([1.0, None, 0.5]) == 0.75
    assert mean([None]) is None


def score(experiment: Path, caller: str, echoer: str, **options: Any) -> dict[str, Any]:
    plan = compile_experiment(experiment)
    return evaluate(plan, ScriptedEngine({"caller": [caller], "echoer": [echoer]}), **options)


def test_each_roles_own_correctness_stands_apart_from_the_teams(toy: Toy):
    found = score(toy(), "grey", "pink")
    # Held out are pink, grey and brown; a right word is worth 1, and neither has an odd number of letters.
    assert found["metrics"] == {"echoed": pytest.approx(1 / 3), "called": pytest.approx(1 / 3)}
    assert found["roles"]["caller"]["called"] == pytest.approx(1 / 3)
    assert "called" not in found["roles"]["echoer"]
    assert "echoed" not in found["roles"]["caller"]
    assert found["roles"]["echoer"]["reward"] == pytest.approx(1 / 3)
    assert found["outcomes"] == {"ok": 3}
    assert found["headline"] == headline(compile_experiment(toy())) == "echoed"


def test_tokens__tool_call_parse_errors_scroll_by__they_are_a_rate_a_role(tmp_path: Path):
    """Row of FIELD_PROBLEMS, Tokens: tool-call parse errors scroll by."""
    (tmp_path / "fns.py").write_text("def double(n: int) -> int:\n    return 2 * n\n")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "w.yaml").write_text(
        """
name: twice
task: {n: int}
tools: {double: {use: "fns.py:double"}}
roles:
  solver: {prompt: "Double {{ n }}", tools: [double], max_calls: 3,
    reply: {tag: answer, on_malformed: {retry: 1}}}
  reader: {prompt: "Read {{ solve.answer }}"}
nodes: {solve: {role: solver}, read: {role: reader}}
edges: [start -> solve -> read -> end]
rewards: [{name: form, use: well_formed, level: turn}]
"""
    )
    (tmp_path / "e.yaml").write_text(
        "workflow: w.yaml\nmapping: {models: {m: {roles: rest}}}\nbase: a/b\ndata: {eval: rows.jsonl}\n"
        "train: {steps: 0}\n"
    )
    good = '<tool_call>{"name": "double", "arguments": {"n": 1}}</tool_call>'
    said = iter([good, "<tool_call>{n: 1}</tool_call>", good, "<answer>2</answer>", "<answer>4</answer>"])
    engine = ScriptedEngine({"solver": lambda _: next(said), "reader": ["a <tool_call> is only a word here"]})
    found = evaluate(compile_experiment(tmp_path / "e.yaml"), engine)
    assert found["outcomes"] == {"ok": 2}
    # Three calls, one of which doesn't parse; the reader has no tools, so that nothing it says is a call.
    assert found["roles"]["solver"]["tool_call_error_frac"] == pytest.approx(1 / 3)
    assert found["roles"]["solver"]["turns"] == 5
    assert "tool_call_error_frac" not in found["roles"]["reader"]


def test_the_limit_and_an_empty_split(toy: Toy):
    experiment = toy()
    assert score(experiment, "grey", "pink", limit=1)["episodes"] == 1
    with pytest.raises(RunError, match="has no rows"):
        score(experiment, "grey", "pink", limit=0)
