"""Functions that are called one after another run on one thread, under the same limits as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from masflow.compiler.plan import Plan
from masflow.models.scripted import ScriptedEngine
from masflow.runtime import effects
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey, Trajectory

Compile = Callable[..., Plan]

ROW = """
    name: row
    state: {count: {type: int, default: 0}}
    nodes:
      a: {call: "fns.py:one", write: {count: "{{ result }}"}}
      b: {call: "fns.py:two", args: {count: "{{ state.count }}"}, write: {count: "{{ result }}"}}
      c: {set: {count: "{{ state.count * 2 }}"}}
    edges: [start -> a -> b -> c -> end]
    output: {count: "{{ state.count }}"}
"""
ONE = "calls = []\n\n\ndef one() -> int:\n    calls.append(1)\n    return 20\n\n\n"
BESIDE = """
    name: beside
    roles: {speaker: {prompt: "Say a word."}}
    nodes:
      talk: {role: speaker}
      a: {call: "fns.py:one"}
      b: {call: "fns.py:two", args: {count: "{{ a }}"}}
      both: {set: {}, join: any}
    edges:
      - start -> talk & a
      - a -> b
      - talk & b -> both
      - both -> end
    output: {said: "{{ talk and talk.text }}"}
"""


def key() -> EpisodeKey:
    return EpisodeKey(7, "train", 3, 0, "t", 0)


def played(plan: Plan) -> Trajectory:
    player = Player(plan)
    state = player.start({}, key())
    assert player.advance(state) == []
    return player.trajectory(state)


def handed_over(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Trajectory:
    """The same, every call on its own."""
    player = Player(plan)
    monkeypatch.setattr(player, "_beside", False)
    state = player.start({}, key())
    player.advance(state)
    return player.trajectory(state)


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("return count + 1", "ok"),
        ("raise ValueError('odd')", "tool_error"),
        ("import sys; sys.exit(3)", "tool_error"),
        ("return object()", "tool_error"),
        ("return {'text': 'no number'}", "tool_error"),
        ("import time; time.sleep(30)", "timeout"),
        ("while True: pass", "timeout"),
    ],
)
def test_a_row_of_calls_ends_as_if_each_were_handed_over(
    body: str, outcome: str, compiled: Compile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(effects, "CALL_TIMEOUT_S", 0.2)
    plan = compiled(ROW, {"fns.py": f"{ONE}def two(count: int):\n    {body}\n"})
    together = played(plan)
    assert together.outcome == outcome
    assert together == handed_over(plan, monkeypatch)


def test_an_async_function_in_a_row_is_awaited(compiled: Compile):
    two = "import asyncio\n\n\nasync def two(count: int):\n    await asyncio.sleep(0)\n    return count + 1\n"
    assert played(compiled(ROW, {"fns.py": ONE + two})).output == {"count": 42}


def test_calls_before_the_one_that_runs_out_of_time_are_not_made_again(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(effects, "CALL_TIMEOUT_S", 0.2)
    plan = compiled(ROW, {"fns.py": ONE + "def two(count: int):\n    while True: pass\n"})
    player = Player(plan)
    state = player.start({}, key())
    player.advance(state)
    calls: Any = player._load(str(plan.graph.node("a").call)).__globals__["calls"]
    assert calls == [1]


def test_requests_made_beside_a_call_that_runs_out_of_time_are_handed_out_once(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(effects, "CALL_TIMEOUT_S", 0.2)
    plan = compiled(BESIDE, {"fns.py": ONE + "def two(count: int):\n    import time; time.sleep(30)\n"})
    player, engine = Player(plan), ScriptedEngine({"speaker": ["hello"]})
    state = player.start({}, key())
    [request] = player.advance(state)
    assert player.advance(state) == []
    player.deliver(state, engine.generate([request])[0])
    assert player.advance(state) == []
    one = player.trajectory(state)
    assert (one.outcome, one.output) == ("ok", {"said": "hello"})
    assert [effect.error for effect in one.effects if effect.path[-1].node == "b"] == [
        f"timeout: {plan.graph.node('b').call}: no result within 0.2 s"
    ]
