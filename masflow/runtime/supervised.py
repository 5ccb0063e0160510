"""Supervised training on demonstrations: the warm start of `masflow train`, and all of `masflow sft`.

The player replays each demonstration and renders its prompts: demonstrations and episodes share one path.
Knows no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from masflow.compiler.demonstrations import demonstration_problems
from masflow.compiler.plan import ModelIR, Plan
from masflow.compiler.rows import read_rows, task_of, weighted
from masflow.errors import EpisodeError, Problem, RunError, SpecError
from masflow.runtime.player import Player
from masflow.runtime.schedule import draw, stable_seed
from masflow.runtime.team import Team
from masflow.tools import ToolBox
from masflow.trace import EpisodeKey, Trajectory, Turn


@dataclass(frozen=True)
class Lesson:
    """What one trainable unit learns from: its members' demonstrated turns, by member in a fixed order."""

    model: str
    policy: str
    """A policy's name, or the model's own when its whole backbone is trained for adapters to start from."""
    turns: tuple[tuple[str, tuple[str, ...]], ...]
    """(member, turn ids)."""


def demonstrations(plan: Plan, toolbox: ToolBox | None = None) -> list[Trajectory]:
    """Replay every demonstration of the warm start.

    Raises:
        SpecError: all lines that don't fit the workflow, with their files and lines.
        RunError: there are none.
    """
    player = Player(plan, toolbox)
    found: list[Trajectory] = []
    problems: list[Problem] = []
    for source in plan.data.get("warm_start", ()):
        rows = read_rows(source)
        unfit = [] if source.is_file else demonstration_problems(source, plan.graph, rows)
        problems += unfit
        numbered = list(enumerate([] if unfit else rows, start=1))
        for line, row in weighted(numbered, source.weight):
            key = EpisodeKey(plan.train.seed, "warm_start", 0, len(found) + len(problems), str(line), 0)
            try:
                task = task_of(row["task"], plan.graph.task)
                found.append(player.demonstrate({**row, "task": task}, key))
            except EpisodeError as error:
                message = f"the demonstration doesn't fit the workflow: {error.message}"
                fix = "write its turns in the order in which the workflow asks for them"
                problems.append(Problem(source.path, line, "turns", "bad-demonstration", message, fix))
    if problems:
        raise SpecError(problems[:50])
    if not found:
        raise RunError(
            "the warm start has no demonstrations",
            "add lines to warm_start.data, or leave the warm start out",
        )
    return found


def trains_backbone(model: ModelIR) -> bool:
    """True where adapters sit on a base made from a config: nobody has trained it, so the warm start does."""
    return model.train == "lora" and model.base is not None and not isinstance(model.base, str)


def lessons(plan: Plan, turns: Sequence[Turn]) -> list[Lesson]:
    """Who learns from which turns; every model that trains and whose roles are demonstrated."""
    by_member: dict[str, list[str]] = defaultdict(list)
    for turn in turns:
        if turn.demonstrated:
            by_member[turn.member].append(turn.id)

    def of(members: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((m, tuple(by_member[m])) for m in members if by_member.get(m))

    found: list[Lesson] = []
    for model in plan.models:
        if model.train == "frozen":
            continue
        if trains_backbone(model):
            found.append(Lesson(model.name, model.name, of(model.roles)))
        else:
            found.extend(Lesson(model.name, p.name, of(p.roles)) for p in model.policies if p.train)
    return [lesson for lesson in found if lesson.turns]


def batch_of(lesson: Lesson, step: int, size: int, seed: int) -> list[str]:
    """Turn ids of one update: `size` turns of each member, in the order of a seeded shuffle an epoch."""
    picked: list[str] = []
    for member, ids in lesson.turns:
        rows = draw(len(ids), step * size, size, stable_seed("warm_start", seed, member))
        picked.extend(ids[row] for row in rows)
    return picked


def warm_start(
    plan: Plan,
    team: Team,
    first: int,
    on_step: Callable[[int, dict[str, Any]], None],
    toolbox: ToolBox | None = None,
) -> None:
    """Train from step `first` to the warm start's end; every trainable unit takes one update a step.

    Args:
        on_step: called with (steps done, metrics) after each; may raise Interrupted.
    """
    spec = plan.warm_start
    assert spec is not None
    turns = [turn for one in demonstrations(plan, toolbox) for turn in one.turns]
    plans = lessons(plan, turns)
    if not plans:
        raise RunError(
            "no demonstrated turn belongs to a role that trains",
            "demonstrate such a role, or leave the warm start out",
        )
    _add_rows(plan, team, turns)
    for step in range(first, spec.steps):
        metrics: dict[str, Any] = {}
        for lesson in plans:
            ids = batch_of(lesson, step, spec.batch, plan.train.seed)
            group = team.groups[lesson.model]
            metrics[lesson.policy] = group.supervise(lesson.policy, ids, spec.optimizer, step, spec.steps)
        on_step(step + 1, metrics)


def _add_rows(plan: Plan, team: Team, turns: Sequence[Turn]) -> None:
    members = {member: model.name for model in plan.models for member in model.roles}
    by_model: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_model[members[turn.member]].append(turn)
    for name, mine in by_model.items():
        team.groups[name].add_rows(mine)
