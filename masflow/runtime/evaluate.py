"""Held-out scores: greedy, and the mean over samples with a bootstrap interval; what each role does right.

Plays and scores; never trains.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from masflow.compiler.plan import Plan
from masflow.compiler.rows import Task, load_tasks
from masflow.compiler.team import graphs_below
from masflow.errors import RunError
from masflow.memory.recall import Snapshot
from masflow.models.engine import RolloutEngine
from masflow.rl.score import Scoring
from masflow.runtime.episodes import answers_of, play
from masflow.runtime.judge import judge_of
from masflow.runtime.player import Player
from masflow.runtime.react import has_call
from masflow.runtime.schedule import stable_seed
from masflow.tools import ToolBox
from masflow.trace import EpisodeKey, Scored

CHUNK = 512
"""Tasks that are played together at most."""

OnChunk = Callable[[int, int], None]
"""(episodes done, episodes in all)."""


def headline(plan: Plan) -> str:
    """The reward whose mean is the score of a run."""
    rewards = plan.graph.rewards
    named = plan.eval.metric
    if named is not None:
        return named
    team = next((r.name for r in rewards if r.level == "trajectory" and r.weight), None)
    return team or (rewards[0].name if rewards else "ok")


def evaluate(
    plan: Plan,
    engine: RolloutEngine,
    toolbox: ToolBox | None = None,
    *,
    split: str = "eval",
    limit: int | None = None,
    samples: int = 0,
    step: int = 0,
    on_chunk: OnChunk | None = None,
    on_greedy: Callable[[list[Scored]], None] | None = None,
    memory: Snapshot | None = None,
) -> dict[str, Any]:
    """Play a split greedily (each role's `sampling.eval`), and `samples` times as in training.

    Args:
        limit: the first rows only; of several sources as many of each as there are.
        step: of the run; goes into the seeds of sampled turns.
        on_greedy: is handed the greedy episodes, for the trace.
        memory: what roles are reminded of; evaluation changes nothing in it.
    Returns:
        `episodes, split, headline, metrics, outcomes, roles`; with samples `sampled` (mean, low, high of the
        headline: 95 % bootstrap over tasks); of several sources `sources`. Means leave unscored episodes out.
    Raises:
        RunError: the split has no rows.
    """
    tasks = in_turn(load_tasks(plan, split))[:limit]
    if not tasks:
        raise RunError(f"the split '{split}' has no rows", "name a split with data, or add rows to its file")
    total = len(tasks) * (1 + samples)
    done = 0
    greedy: list[Scored] = []
    drawn: list[Scored] = []
    for sample in range(samples + 1):
        player = Player(plan, toolbox, mode="train" if sample else "eval", memory=memory)
        for first in range(0, len(tasks), CHUNK):
            scored = _played(
                plan, player, engine, tasks, range(first, min(first + CHUNK, len(tasks))), split, step, sample
            )
            (drawn if sample else greedy).extend(scored)
            done += len(scored)
            if on_chunk is not None:
                on_chunk(done, total)
    if on_greedy is not None:
        on_greedy(greedy)
    name = headline(plan)
    result = {"episodes": len(tasks), "split": split, "headline": name, **summarise(plan, greedy)}
    result |= by_source(plan, split, [task.source for task in tasks], greedy)
    if samples:
        result["sampled"] = interval(_headline_values(drawn, name), samples, plan.train.seed)
        result["sampled"]["roles"] = summarise(plan, drawn)["roles"]
    return result


def _played(
    plan: Plan,
    player: Player,
    engine: RolloutEngine,
    tasks: Sequence[Task],
    slots: range,
    split: str,
    step: int,
    sample: int,
) -> list[Scored]:
    states = [
        player.start(tasks[i].row, EpisodeKey(plan.train.seed, split, step, i, tasks[i].id, sample))
        for i in slots
    ]
    with Scoring(plan) as scoring:
        played = play(player, states, answers_of(engine), scoring.begin)
        return scoring.finish(played, judge_of(plan, engine.generate))


def _headline_values(scored: Sequence[Scored], name: str) -> dict[int, list[float]]:
    values: dict[int, list[float]] = defaultdict(list)
    for one in scored:
        value = one.metrics.get(name)
        if value is not None:
            values[one.trajectory.key.slot].append(value)
    return values


def interval(
    values: dict[int, list[float]], samples: int, seed: int, resamples: int = 1000
) -> dict[str, Any]:
    """Mean over tasks of their mean, with the 2.5 and 97.5 percentiles of a bootstrap over tasks."""
    means = [fmean(v) for v in values.values()]
    if not means:
        return {"samples": samples, "mean": None, "low": None, "high": None}
    rng = random.Random(stable_seed("bootstrap", seed))
    drawn = sorted(fmean(rng.choices(means, k=len(means))) for _ in range(resamples))
    low, high = drawn[int(0.025 * resamples)], drawn[int(0.975 * resamples) - 1]
    return {"samples": samples, "mean": fmean(means), "low": low, "high": high}


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def summarise(plan: Plan, scored: Sequence[Scored]) -> dict[str, Any]:
    """`metrics` by reward, `outcomes` counted, each role's own numbers in `roles`, and `unscored` if any."""
    names = [reward.name for reward in plan.graph.rewards]
    metrics = {name: mean(one.metrics.get(name) for one in scored) for name in names}
    unscored = sum(bool(one.failures) for one in scored)
    result: dict[str, Any] = {
        "metrics": metrics,
        "outcomes": dict(sorted(Counter(one.trajectory.outcome for one in scored).items())),
        "roles": roles(plan, scored),
    }
    return {**result, "unscored": unscored} if unscored else result


def in_turn(tasks: list[Task]) -> list[Task]:
    """The first row of each source, the second of each, …"""
    place: Counter[int] = Counter()
    order = []
    for number, task in enumerate(tasks):
        order.append((place[task.source], task.source, number))
        place[task.source] += 1
    return [tasks[number] for _, _, number in sorted(order)]


def by_source(
    plan: Plan, split: str, source_of: Sequence[int], scored: Sequence[Scored]
) -> dict[str, dict[str, dict[str, Any]]]:
    """`sources`: of each the tasks and the means of the rewards; nothing where a split has one source.

    Args:
        source_of: of each slot.
    """
    sources = plan.data.get(split, ())
    if len(sources) < 2:
        return {}
    names = [reward.name for reward in plan.graph.rewards]
    found = {}
    for number, source in enumerate(sources):
        mine = [one for one in scored if source_of[one.trajectory.key.slot] == number]
        means = {name: mean(one.metrics.get(name) for one in mine) for name in names}
        found[source.name] = {"tasks": source_of.count(number), "rewards": means}
    return {"sources": found}


def roles(plan: Plan, scored: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """Per role: turns, mean total, malformed and truncated rate, tokens, the mean of each reward of its own;
    of roles with tools the share of tool calls that don't parse, too.

    The team's rewards (level trajectory) are left out: they say nothing about one role.
    """
    shared = {reward.name for reward in plan.graph.rewards if reward.level == "trajectory" and not reward.pay}
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    callers = {
        place.prefix + role.name
        for place in graphs_below(plan.root, plan.workflows)
        for role in place.graph.roles
        if role.tools or role.handoff
    }
    for one in scored:
        for turn in one.trajectory.turns:
            mine = found[turn.role]
            mine["reward"].append(one.totals.get(turn.id))
            mine["malformed_frac"].append(float(not turn.ok and turn.outcome != "cancelled"))
            mine["truncated_frac"].append(float(turn.outcome == "truncated"))
            mine["reply_tokens"].append(float(turn.reply_tokens))
            if turn.role in callers and has_call(turn.text, plan.dialect_of(turn.policy)):
                mine["tool_call_error_frac"].append(float(not turn.ok))
            for name, value in one.components.get(turn.id, {}).items():
                if name not in shared:
                    mine[name].append(value)
    return {
        role: {"turns": len(columns["reward"]), **{name: mean(values) for name, values in columns.items()}}
        for role, columns in sorted(found.items())
    }
