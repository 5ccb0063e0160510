"""Which turns are compared with which: groups by (task, role, path), and the advantages within them.

Turns that don't train (masked, dropped, unscored) enter no baseline either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from masflow.algorithms import filled
from masflow.compiler.plan import Plan
from masflow.rl.advantages import ADVANTAGES, against_role, batch_norm, is_flat
from masflow.rl.shaping import budgets, overlong
from masflow.trace import Path, Scored, Trajectory, Turn

__all__ = [
    "Entrant",
    "Group",
    "advantage_name",
    "entrants_of",
    "learnable_slots",
    "make_groups",
    "shaped",
    "training_policy",
]

Key = tuple[int, str, str, Path]


@dataclass(frozen=True)
class Entrant:
    """One turn that may train, with what it is compared by."""

    turn: Turn
    episode: str
    slot: int
    task_id: str
    total: float
    weight: float = 1.0
    """Factor of its loss, beside the algorithm's weighting."""

    @property
    def key(self) -> Key:
        """(slot, task, member, path): copies differ in the path's item, members of a family by name."""
        return self.slot, self.task_id, self.turn.member, self.turn.path


@dataclass(frozen=True)
class Group:
    """One baseline and who was compared by it."""

    key: Key
    turns: tuple[str, ...]
    rewards: tuple[float, ...]
    advantages: tuple[float | None, ...]
    """None where a turn doesn't train: it stands alone and is skipped."""
    learnable: bool
    """Some advantage isn't 0."""

    @property
    def singleton(self) -> bool:
        return len(self.turns) == 1


def advantage_name(plan: Plan) -> str:
    """The advantage of the algorithm: its own word, else its preset's."""
    return str(filled(plan.algorithm).advantage)


def training_policy(outcomes: dict[str, str], trajectory: Trajectory) -> dict[str, str]:
    """Turn id → `train`, `mask` or `drop_episode`, from the turn's outcome and the episode's."""
    episode = outcomes[trajectory.outcome]
    each = {t.id: outcomes[t.outcome] for t in trajectory.turns}
    if "drop_episode" in (episode, *each.values()):
        return dict.fromkeys(each, "drop_episode")
    return dict.fromkeys(each, "mask") if episode == "mask" else each


def entrants_of(plan: Plan, scored: Iterable[Scored]) -> list[Entrant]:
    """Turns that train: of a trained policy, with a total, by their outcomes' policy, with a reply."""
    trained = {p.name for p in plan.policies if p.train}
    found = []
    for one in scored:
        policy = training_policy(plan.graph.outcomes, one.trajectory)
        key = one.trajectory.key
        for turn in one.trajectory.turns:
            total = one.totals.get(turn.id)
            if (
                total is None
                or policy[turn.id] != "train"
                or turn.policy not in trained
                or not turn.reply_tokens
            ):
                continue
            found.append(Entrant(turn, one.trajectory.id, key.slot, key.task_id, total))
    return found


def shaped(plan: Plan, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
    """The entrants, those whose replies near their budget with what that costs (`algorithm.overlong`)."""
    spec = filled(plan.algorithm).overlong
    if spec is None or not spec.penalty:
        return entrants
    found = budgets(plan)
    return [
        replace(e, total=e.total - overlong(spec, e.turn, found[e.turn.role])) if e.turn.role in found else e
        for e in entrants
    ]


def make_groups(plan: Plan, entrants: Sequence[Entrant]) -> list[Group]:
    """Groups in order of first appearance, with their advantages; rewards are shaped first (`overlong`)."""
    entrants = shaped(plan, entrants)
    if advantage_name(plan) == "batch_norm":
        return list(_whole_roles(entrants))
    members: dict[Key, list[Entrant]] = {}
    for entrant in entrants:
        members.setdefault(entrant.key, []).append(entrant)
    roles = _role_means(entrants)
    return [_group(plan, key, group, roles) for key, group in members.items()]


def learnable_slots(plan: Plan, scored: Sequence[Scored]) -> list[int]:
    """Slots of the tasks from which some role can learn: a turn of theirs has an advantage that isn't 0."""
    entrants = entrants_of(plan, scored)
    slot_of = {e.turn.id: e.slot for e in entrants}
    learning = (
        t for g in make_groups(plan, entrants) for t, a in zip(g.turns, g.advantages, strict=True) if a
    )
    return sorted({slot_of[turn] for turn in learning})


def _whole_roles(entrants: Sequence[Entrant]) -> Iterator[Group]:
    """One group a role: all of its turns of the step, whatever the task; slot -1 stands for that."""
    roles: dict[str, list[Entrant]] = {}
    for entrant in entrants:
        roles.setdefault(entrant.turn.role, []).append(entrant)
    for role, group in roles.items():
        rewards_G = np.array([p.total for p in group], dtype=np.float64)
        tokens_G = np.array([p.turn.reply_tokens for p in group], dtype=np.float64)
        advantages = tuple(map(float, batch_norm(rewards_G, tokens_G)))
        turns = tuple(p.turn.id for p in group)
        yield Group((-1, "", role, ()), turns, tuple(map(float, rewards_G)), advantages, any(advantages))


def _group(
    plan: Plan, key: Key, group: list[Entrant], roles: dict[tuple[int | None, str], dict[str, float]]
) -> Group:
    rewards_G = np.array([p.total for p in group], dtype=np.float64)
    name, turns = advantage_name(plan), tuple(p.turn.id for p in group)
    advantages: tuple[float | None, ...] = (None,)
    if len(group) > 1:
        flat = is_flat(rewards_G)
        advantages = tuple(0.0 if flat else float(a) for a in ADVANTAGES[name](rewards_G))
    elif plan.algorithm.singleton == "role_baseline":
        (only,) = group
        for slot in (only.slot, None):
            episodes = roles[slot, only.turn.role]
            others = np.array([mean for episode, mean in episodes.items() if episode != only.episode])
            if len(others):
                advantages = (against_role(only.total, others, name),)
                break
    return Group(key, turns, tuple(map(float, rewards_G)), advantages, any(advantages))


def _role_means(entrants: Sequence[Entrant]) -> dict[tuple[int | None, str], dict[str, float]]:
    """(slot, role) → episode → mean total of that role's turns: an episode counts once.

    Slot None holds the episodes of all tasks: where one sample is drawn a task, there are no others.
    """
    totals: dict[tuple[int | None, str], dict[str, list[float]]] = {}
    for p in entrants:
        for slot in (p.slot, None):
            totals.setdefault((slot, p.turn.role), {}).setdefault(p.episode, []).append(p.total)
    return {
        key: {episode: float(np.mean(found)) for episode, found in episodes.items()}
        for key, episodes in totals.items()
    }
