"""Which turns are compared with which: groups by (task, role, path), or wider ones, and the advantages
within them.

Turns that don't train (masked, dropped, unscored) enter no baseline either.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
    undiscounted: float | None = None
    """Its return without discounts, where that is another than `total`."""
    values: tuple[float, ...] = ()
    """Of an action that was continued several times: what each continuation gave; `total` is their mean."""

    @property
    def call(self) -> Path:
        """The call of a sub-workflow that it was spoken in; empty outside of any."""
        return self.turn.path[:-1]

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
    size: int | None = None
    """How many were compared, where several turns count as one; default: the turns."""
    compared: tuple[float, ...] = ()
    """What was compared, where several turns count as one; default: `rewards`."""

    @property
    def singleton(self) -> bool:
        return (len(self.turns) if self.size is None else self.size) == 1


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
            whole = one.undiscounted.get(turn.id)
            found.append(Entrant(turn, one.trajectory.id, key.slot, key.task_id, total, 1.0, whole))
    return found


def shaped(plan: Plan, entrants: Sequence[Entrant]) -> Sequence[Entrant]:
    """The entrants, those whose replies near their budget with what that costs (`algorithm.overlong`)."""
    spec = filled(plan.algorithm).overlong
    if spec is None or not spec.penalty:
        return entrants
    found = budgets(plan)
    return [
        _less(e, overlong(spec, e.turn, found[e.turn.role])) if e.turn.role in found else e for e in entrants
    ]


def _less(entrant: Entrant, costs: float) -> Entrant:
    whole = entrant.undiscounted
    return replace(
        entrant, total=entrant.total - costs, undiscounted=None if whole is None else whole - costs
    )


def make_groups(plan: Plan, entrants: Sequence[Entrant]) -> list[Group]:
    """Groups in order of first appearance, with their advantages; rewards are shaped first (`overlong`)."""
    entrants = shaped(plan, entrants)
    if advantage_name(plan) == "batch_norm":
        return list(_whole_roles(entrants))
    kind = str(filled(plan.algorithm).group)
    if kind == "state":
        return list(_by_state(plan, entrants))
    if kind in POOLS:
        return list(_pooled(plan, entrants, POOLS[kind]))
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


Pool = Callable[[Entrant], tuple[Key, Hashable]]
POOLS: Mapping[str, Pool] = {
    "task_role": lambda e: ((e.slot, e.task_id, e.turn.member, ()), e.turn.id),
    "task_call": lambda e: ((e.slot, e.task_id, e.turn.member, ()), (e.episode, e.call)),
    "task": lambda e: ((e.slot, e.task_id, "", ()), e.episode),
}
"""Kind of group → (its key, which of those compared in it a turn belongs to)."""


def _pooled(plan: Plan, entrants: Sequence[Entrant], pool: Pool) -> Iterator[Group]:
    """Groups of what may be several turns each, which count once, with their mean, and share an advantage.

    `task_role` is Dr. MAS's (arXiv 2602.08847): each turn by itself, so that an episode counts as often as
    the role spoke in it. `task_call` is M-GRPO's (arXiv 2511.13288): a main agent's episode, a sub-agent's
    call. `task` is MATPO's (arXiv 2510.04678): an episode.
    """
    pools: dict[Key, dict[Hashable, list[Entrant]]] = {}
    for entrant in entrants:
        key, unit = pool(entrant)
        pools.setdefault(key, {}).setdefault(unit, []).append(entrant)
    for key, units in pools.items():
        values = [float(np.mean([e.total for e in unit])) for unit in units.values()]
        found = _compared(plan, values)
        rows = [(e, a) for unit, a in zip(units.values(), found, strict=True) for e in unit]
        yield replace(_shared(key, rows, len(units)), compared=tuple(values))


def _by_state(plan: Plan, entrants: Sequence[Entrant]) -> Iterator[Group]:
    """GiGPO (arXiv 2505.10978, eq. 8): A = A_E + w A_S, w the algorithm's `step_weight`.

    A_E (eq. 3) compares a role's episodes of one task, each by its undiscounted return from the role's first
    turn. A_S (eq. 7) compares the returns (eq. 5) of its turns in these episodes that were asked the same,
    whenever that was (eq. 6); it is 0 for a turn whose prompt nobody else had.
    """
    weight = plan.algorithm.step_weight
    roles: dict[Key, list[Entrant]] = {}
    for entrant in entrants:
        roles.setdefault((entrant.slot, entrant.task_id, entrant.turn.member, ()), []).append(entrant)
    for key, group in roles.items():
        first: dict[str, Entrant] = {}
        states: dict[Hashable, list[Entrant]] = {}
        for e in sorted(group, key=lambda e: e.turn.superstep):
            first.setdefault(e.episode, e)
            states.setdefault(_state(e.turn), []).append(e)
        returns = [e.total if e.undiscounted is None else e.undiscounted for e in first.values()]
        macro = dict(zip(first, _compared(plan, returns), strict=True))
        micro = {
            e.turn.id: a
            for same in states.values()
            for e, a in zip(same, _compared(plan, [e.total for e in same]), strict=True)
        }
        rows = [(e, _sum(macro[e.episode], micro[e.turn.id], weight)) for e in group]
        yield _shared(key, rows, len(first))


def _sum(macro: float | None, micro: float | None, weight: float) -> float | None:
    """None where neither the episode nor the turn has anything to be compared with."""
    return None if macro is None and micro is None else (macro or 0.0) + weight * (micro or 0.0)


def _state(turn: Turn) -> Hashable:
    """What a role is asked at a node: its system prompt, and what it is told last. With a conversation the
    messages between are left out, for they never come again."""
    system = tuple(m.content for m in turn.messages if m.role == "system")
    return turn.node, system, turn.messages[-1].content if turn.messages else ""


def _compared(plan: Plan, values: Sequence[float]) -> Sequence[float | None]:
    """Advantages within one group; None for one that is alone."""
    if len(values) < 2:
        return [None] * len(values)
    rewards_G = np.array(values, dtype=np.float64)
    flat = is_flat(rewards_G)
    return [0.0 if flat else float(a) for a in ADVANTAGES[advantage_name(plan)](rewards_G)]


def _shared(key: Key, rows: Sequence[tuple[Entrant, float | None]], size: int) -> Group:
    turns, rewards = tuple(e.turn.id for e, _ in rows), tuple(e.total for e, _ in rows)
    advantages = tuple(a for _, a in rows)
    return Group(key, turns, rewards, advantages, any(advantages), size)


def _group(
    plan: Plan, key: Key, group: list[Entrant], roles: dict[tuple[int | None, str], dict[str, float]]
) -> Group:
    rewards = tuple(float(p.total) for p in group)
    advantages = tuple(_compared(plan, rewards))
    if len(group) == 1 and plan.algorithm.singleton == "role_baseline":
        (only,) = group
        for slot in (only.slot, None):
            episodes = roles[slot, only.turn.role]
            others = np.array([mean for episode, mean in episodes.items() if episode != only.episode])
            if len(others):
                advantages = (against_role(only.total, others, advantage_name(plan)),)
                break
    return Group(key, tuple(p.turn.id for p in group), rewards, advantages, any(advantages))


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
