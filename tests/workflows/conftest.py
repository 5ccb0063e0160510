"""Shipped workflows under a shipped mapping, played on the scripted engine and scored."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import check, compile_experiment
from masflow.compiler.plan import Plan
from masflow.models.scripted import ScriptedEngine
from masflow.rl.score import score
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey, Scored, Turn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def team(tmp_path: Path) -> Callable[..., Plan]:
    """`team(name, mapping, **params)`: the shipped workflow, compiled; nothing in it is wrong or doubtful."""

    def compile_(name: str, mapping: str = "shared", **params: Any) -> Plan:
        workflow = ROOT / "workflows" / f"{name}.yaml"
        assert check(workflow) == []
        path = tmp_path / "experiment.yaml"
        document = {
            "workflow": {"use": str(workflow), "params": params},
            "mapping": str(ROOT / "mappings" / f"{mapping}.yaml"),
            "base": "some/model",
        }
        path.write_text(json.dumps(document), encoding="utf-8")
        return compile_experiment(path)

    return compile_


class Played:
    """One scored episode, easy to ask."""

    def __init__(self, scored: Scored, engine: ScriptedEngine):
        self.scored, self.engine = scored, engine
        self.trajectory, self.metrics = scored.trajectory, scored.metrics
        self.turns: tuple[Turn, ...] = scored.trajectory.turns
        self.output, self.outcome = scored.trajectory.output, scored.trajectory.outcome

    @property
    def spoken(self) -> list[str]:
        """`node@superstep` of every turn; concurrent turns share a superstep."""
        return [f"{t.node}@{t.superstep}" for t in self.turns]

    @property
    def totals(self) -> list[float | None]:
        return [self.scored.totals[t.id] for t in self.turns]

    def prompts(self, node: str) -> list[str]:
        return [r.messages[-1].content for r in self.engine.requests if r.node == node]


@pytest.fixture
def episode() -> Callable[..., Played]:
    """`episode(plan, task, script, sample=0)`: play one and score it."""

    def play_(plan: Plan, task: dict[str, Any], script: dict[str, Any], sample: int = 0) -> Played:
        engine, player = ScriptedEngine(script), Player(plan)
        state = player.start(task, EpisodeKey(0, "train", 1, 0, "task", sample))
        (trajectory,) = play(player, [state], engine.generate)
        return Played(score(plan, [trajectory])[0], engine)

    return play_
