"""What is played behind an action is an episode like any other: played from its beginning with the same
replies, it has the same turns, tools, states and rewards, whatever stands in the workflow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from masflow.compiler.plan import Plan
from masflow.models.engine import Request
from masflow.models.scripted import ScriptedEngine
from masflow.rl.score import score
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey, Trajectory
from tests.runtime.test_nodes import (
    COUNT,
    INNER,
    PROGRAM,
    REWARD,
    SHAPES,
    coin,
    drawn,
    learnt,
    sampling,
    speaks,
)

Compile = Callable[..., Plan]
REPLAYED = """
def Count(state):
    state["number"] = state.get("number", 0) + 1
    return state["number"]
"""
TASK = {"words": ["x", "y"]}


def said_again(plan: Plan, one: Trajectory) -> Trajectory:
    """An episode from its beginning in which everybody says what they said in this one."""
    key = EpisodeKey(9, "train", 1, 0, "again", 0)  # other chance
    lines, player = {key.turn_id(turn.path): turn.text for turn in one.turns}, Player(plan)
    engine = ScriptedEngine({"*": lambda request: lines[request.turn_id]})
    [again] = play(player, [player.start(one.task, key)], engine.generate)
    return again


def facts(one: Trajectory) -> list[Any]:
    """What happened where, however it came to it."""
    turns = sorted((t.path, t.text, t.ok, t.value, t.superstep) for t in one.turns)
    return [turns, sorted((e.path, e.kind, e.value) for e in one.effects), one.outcome, one.output]


def check(plan: Plan, number: int, say: Callable[[Request], str] = speaks, **settings: Any) -> int:
    """Draw, and play each way again; returns how many ways there were."""
    whole = sampling(plan, samples=3, **settings)
    found = drawn(whole, ScriptedEngine({"*": say}).generate, number, TASK)
    credited, _ = learnt(whole, found, number)
    totals: dict[str, list[float]] = {}
    for way in found.continuations:
        again = said_again(plan, way.trajectory)
        assert facts(again) == facts(way.trajectory)
        [action] = [t for t in way.trajectory.turns if t.id == way.action]
        [scored] = score(plan, [again])
        [same] = [t for t in again.turns if t.path == action.path]
        total = scored.totals[same.id]
        assert total is not None
        totals.setdefault(way.action, []).append(total)
    for entrant in credited.entrants:
        worth = totals[entrant.turn.id]
        assert entrant.total == pytest.approx(sum(worth) / len(worth))
    return len(found.continuations)


@pytest.mark.parametrize(
    "settings", [{}, {"continuations": 2}, {"credit": "splice"}, {"credit": "fixed_suffix"}]
)
@pytest.mark.parametrize("tool", [COUNT, REPLAYED], ids=["forked", "rebuilt"])
def test_loops_items_copies_tools_conversations_and_teams(
    compiled: Compile, tool: str, settings: dict[str, Any]
):
    plan = compiled(SHAPES, {"table.py": REWARD + tool, "inner.yaml": INNER})
    assert check(plan, 2, **settings) > 60


MEASURED = """
    name: measured
    task: {words: [str]}
    roles:
      a: {prompt: "speak {{ visit }}"}
      b: {prompt: "after {{ one.text }}", reply: {choice: ["0", "1"], on_malformed: {retry: 1}}}
    nodes: {one: {role: a}, two: {role: b}}
    edges: [start -> one -> two, two -> one when two.choice == '1' and visits.two < 4, two -> end]
    limits: {turns: 5}
    rewards:
      - name: gained
        use: "table.py:own"
        otherwise: 0
        measure: {after: [one], args: {said: "{{ result.text }}"}}
        pay: {a: value, b: gain}
      - name: fair
        use: "table.py:own"
        level: role
        roles: [b]
        otherwise: 0
        args: {said: "{{ one.text }}"}
      - {name: form, use: well_formed, level: turn}
"""


def stumbles(request: Request) -> str:
    """A coin, or, of the second role, now and then a word that isn't allowed."""
    slips = request.role == "b" and random.Random(request.seed + 1).random() < 0.3
    return "word" if slips else coin(request)


@pytest.mark.parametrize("settings", [{}, {"continuations": 2}, {"credit": "splice"}])
def test_gains_role_rewards_retries_malformed_replies_and_limits(compiled: Compile, settings: dict[str, Any]):
    plan = compiled(MEASURED, {"table.py": REWARD})
    assert check(plan, 12, stumbles, **settings) > 100


@pytest.mark.parametrize("tool", [COUNT, REPLAYED], ids=["forked", "rebuilt"])
def test_a_function_that_is_a_workflow(planned: Callable[..., Plan], tool: str):
    program = PROGRAM.replace("ctx.rng.random() < 0.5", 'found[0].text == "1"')  # what is said decides alone
    plan = planned("main.py:main", {"table.py": REWARD + tool, "main.py": program})
    assert check(plan, 3, continuations=2) > 30
