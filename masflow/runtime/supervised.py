"""Supervised training on demonstrations: the warm start of `masflow train`, and all of `masflow sft`.

The player replays each demonstration and renders its prompts: demonstrations and episodes share one path.
Knows no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from masflow.compiler.demonstrations import demonstration_problems
from masflow.compiler.plan import ModelIR, Plan
from masflow.compiler.rows import read_rows, task_of
from masflow.errors import EpisodeError, Problem, RunError, SpecError
from masflow.memory.recall import Snapshot
from masflow.runtime.player import Player
from masflow.runtime.schedule import Mixture, stable_seed
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
    """(member, turn ids in order of their sources)."""
    mixtures: tuple[Mixture, ...]
    """How each member's turns are drawn."""


def demonstrations(
    plan: Plan, toolbox: ToolBox | None = None, memory: Snapshot | None = None
) -> list[Trajectory]:
    """Replay every demonstration of the warm start, each once, in order of their sources.

    Args:
        memory: what all of them are reminded of.
    Raises:
        SpecError: all lines that don't fit the workflow, with their files and lines.
        RunError: there are none.
    """
    return [one for _, one in _demonstrated(plan, toolbox, memory, lambda _: True)]


def is_reminded(seed: int, number: int) -> bool:
    """Whether a demonstration is taught with memory in its prompts: every second one, whichever the seed
    draws."""
    return stable_seed("reminded", seed, number) % 2 == 0


def _demonstrated(
    plan: Plan, toolbox: ToolBox | None, memory: Snapshot | None, reminded: Callable[[int], bool]
) -> list[tuple[int, Trajectory]]:
    """As `demonstrations`, each with the number of its source; `memory` for those that are `reminded`."""
    plain = Player(plan, toolbox)
    mindful = plain if memory is None else Player(plan, plain.toolbox, memory=memory)
    found: list[tuple[int, Trajectory]] = []
    problems: list[Problem] = []
    for number, source in enumerate(plan.data.get("warm_start", ())):
        rows = read_rows(source)
        unfit = [] if source.is_file else demonstration_problems(source, plan.graph, rows)
        problems += unfit
        for line, row in enumerate([] if unfit else rows, start=1):
            place = len(found) + len(problems)
            key = EpisodeKey(plan.train.seed, "warm_start", 0, place, str(line), 0)
            player = mindful if reminded(place) else plain
            try:
                task = task_of(row["task"], plan.graph.task)
                found.append((number, player.demonstrate({**row, "task": task}, key)))
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


def lessons(plan: Plan, turns: Sequence[tuple[int, Turn]]) -> list[Lesson]:
    """Who learns from which turns; every model that trains and whose roles are demonstrated.

    Args:
        turns: each with the number of its source, in order of the sources.
    """
    weights = [source.weight for source in plan.data.get("warm_start", ())]
    by_member: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for number, turn in turns:
        if turn.demonstrated:
            by_member[turn.member].append((number, turn.id))

    def lesson(model: str, policy: str, members: Sequence[str]) -> Lesson:
        known = [m for m in members if by_member.get(m)]
        return Lesson(
            model,
            policy,
            tuple((m, tuple(turn for _, turn in by_member[m])) for m in known),
            tuple(Mixture.of(weights, [number for number, _ in by_member[m]]) for m in known),
        )

    found: list[Lesson] = []
    for model in plan.models:
        if model.train == "frozen":
            continue
        if trains_backbone(model):
            found.append(lesson(model.name, model.name, model.roles))
        else:
            found.extend(lesson(model.name, p.name, p.roles) for p in model.policies if p.train)
    return [one for one in found if one.turns]


def batch_of(lesson: Lesson, step: int, size: int, seed: int) -> list[str]:
    """Turn ids of one update: `size` turns of each member, by its shuffles and the shares of the sources."""
    picked: list[str] = []
    for (member, ids), mixture in zip(lesson.turns, lesson.mixtures, strict=True):
        rows = mixture.draw(step * size, size, stable_seed("warm_start", seed, member))
        picked.extend(ids[row] for row in rows)
    return picked


def warm_start(
    plan: Plan,
    team: Team,
    first: int,
    on_step: Callable[[int, dict[str, Any]], None],
    toolbox: ToolBox | None = None,
    memory: Snapshot | None = None,
) -> None:
    """Train from step `first` to the warm start's end; every trainable unit takes one update a step.

    Args:
        memory: what every second demonstration is taught with in its prompts.
        on_step: called with (steps done, metrics) after each; may raise Interrupted.
    """
    spec = plan.warm_start
    assert spec is not None
    found = _demonstrated(plan, toolbox, memory, partial(is_reminded, plan.train.seed))
    sourced = [(number, turn) for number, one in found for turn in one.turns]
    turns = [turn for _, turn in sourced]
    plans = lessons(plan, sourced)
    if not plans:
        raise RunError(
            "no demonstrated turn belongs to a role that trains",
            "demonstrate such a role, or leave the warm start out",
        )
    _add_rows(plan, team, turns)
    for step in range(first, spec.steps):
        begun: list[tuple[str, Any, Any]] = []
        for lesson in plans:  # different models learn at once
            ids = batch_of(lesson, step, spec.batch, plan.train.seed)
            group = team.groups[lesson.model]
            call = group.begin_supervise(lesson.policy, ids, spec.optimizer, step, spec.steps)
            begun.append((lesson.policy, group, call))
        metrics: dict[str, Any] = {policy: group.finish_supervise(call) for policy, group, call in begun}
        on_step(step + 1, metrics)


def _add_rows(plan: Plan, team: Team, turns: Sequence[Turn]) -> None:
    members = {member: model.name for model in plan.models for member in model.roles}
    by_model: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_model[members[turn.member]].append(turn)
    for name, mine in by_model.items():
        team.groups[name].add_rows(mine)
