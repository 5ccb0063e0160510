"""Credit of actions that were drawn from one context: the mean over what followed each of them.

Knows how rewards are added up (`score`), not how episodes are forked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from masflow.compiler.plan import Plan
from masflow.rl.functions import Judge
from masflow.rl.groups import Entrant, training_policy
from masflow.rl.score import Focus, score
from masflow.trace import Effect, Scored, Trajectory, path_json

__all__ = ["Continuation", "Credited", "credit_actions", "value_actions"]


@dataclass(frozen=True)
class Continuation:
    """An action and one way in which its episode went on. Made by the sampler; eaten here."""

    action: str
    """Its turn id."""
    sibling: int
    """Among the actions of its context; 0 is the base episode's own."""
    weight: float
    """Of its context: N / `max_nodes` where only some are branched at, else 1."""
    trajectory: Trajectory
    scored: Scored | None = None
    """Its rewards, where the sampler had to know them already."""


@dataclass(frozen=True)
class Credited:
    """What actions are worth. Made here; eaten by `build_batch` and the trace."""

    entrants: list[Entrant]
    """Actions that train, with the mean over their continuations as total."""
    forks: list[Scored]
    """Of each forked episode the part that is its own, with its rewards."""
    num_lost: int
    """Continuations that count for nothing: unscored, masked, or dropped by their outcome."""


def credit_actions(
    plan: Plan,
    bases: Sequence[Scored],
    continuations: Sequence[Continuation],
    is_local: bool,
    judge: Judge | None = None,
) -> Credited:
    """Credit of every action under the workflow's own rule (`own`, `return_to_go`), averaged over its ways.

    An action whose every continuation is lost leaves its baseline, as a turn does that doesn't train.

    Args:
        bases: base episodes, scored already.
        is_local: only the turn's own rewards.
    """
    known = {} if is_local else {one.trajectory.id: one for one in bases}
    there = [c.scored or known.get(c.trajectory.id) for c in continuations]
    fresh = [c for c, one in zip(continuations, there, strict=True) if one is None]
    focus = [Focus(c.action, is_local) for c in fresh]
    found = iter(score(plan, [c.trajectory for c in fresh], judge, focus))
    scored = [one or next(found) for one in there]
    entrants, num_lost = _entrants(plan, continuations, scored)
    return Credited(entrants, _own_parts(bases, continuations, scored), num_lost)


def value_actions(plan: Plan, ways: Sequence[Continuation], judge: Judge | None = None) -> list[Scored]:
    """What each action earns by itself, where an episode waits to go on with the best."""
    return score(plan, [way.trajectory for way in ways], judge, [Focus(way.action, True) for way in ways])


def _entrants(
    plan: Plan, continuations: Sequence[Continuation], scored: Sequence[Scored]
) -> tuple[list[Entrant], int]:
    trained = {policy.name for policy in plan.policies if policy.train}
    ways: dict[str, list[tuple[Continuation, float]]] = {}
    lost = 0
    for way, one in zip(continuations, scored, strict=True):
        turn = next((t for t in way.trajectory.turns if t.id == way.action), None)
        total = one.totals.get(way.action)
        counts = turn is not None and turn.policy in trained and turn.reply_tokens > 0
        if (
            not counts
            or total is None
            or training_policy(plan.graph.outcomes, way.trajectory)[way.action] != "train"
        ):
            lost += 1
            continue
        ways.setdefault(way.action, []).append((way, total))
    found = []
    for action, each in ways.items():
        first = each[0][0]
        key = first.trajectory.key
        turn = next(t for t in first.trajectory.turns if t.id == action)
        values = tuple(total for _, total in each)
        # The siblings of one number stand for one episode, so that E is tasks x siblings.
        episode, mean = f"{key.slot}/{first.sibling}", float(np.mean(values))
        found.append(Entrant(turn, episode, key.slot, key.task_id, mean, first.weight, values=values))
    return found, lost


def _own_parts(
    bases: Sequence[Scored], continuations: Sequence[Continuation], scored: Sequence[Scored]
) -> list[Scored]:
    """Of each fork the turns and effects that no earlier one has; those before are its base episode's."""
    seen = {turn.id for one in bases for turn in one.trajectory.turns}
    effects = {one.trajectory.key.slot: set(map(_effect_key, one.trajectory.effects)) for one in bases}
    found = []
    for way, one in zip(continuations, scored, strict=True):
        played = way.trajectory
        if not played.key.fork:
            continue
        own = tuple(turn for turn in played.turns if turn.id not in seen)
        ids = {turn.id for turn in own}
        seen |= ids
        part = replace(
            played,
            turns=own,
            effects=tuple(e for e in played.effects if _effect_key(e) not in effects[played.key.slot]),
            predecessors={id_: before for id_, before in played.predecessors.items() if id_ in ids},
        )
        credited = ids | {way.action}
        found.append(
            replace(
                one,
                trajectory=part,
                components={id_: c for id_, c in one.components.items() if id_ in ids},
                totals={id_: total for id_, total in one.totals.items() if id_ in credited},
            )
        )
    return found


def _effect_key(effect: Effect) -> tuple[str, str, str]:
    return effect.kind, path_json(effect.path), repr((effect.value, effect.error))
