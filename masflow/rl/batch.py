"""From scored episodes to weighted rows for every policy, and what to report about them.

The loss of a policy's mini-batch is Σ_rows Σ_tokens token_weight · token_loss(advantage); everything about
weighting is in `token_weight`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from masflow.algorithms import filled
from masflow.compiler.plan import Plan
from masflow.rl.groups import Entrant, Group, entrants_of, make_groups, training_policy
from masflow.rl.shaping import budgets
from masflow.trace import Path, Scored, Turn

__all__ = ["Batch", "TrainRow", "build_batch", "minibatches"]


@dataclass(frozen=True)
class TrainRow:
    """One turn to train on. Made here, eaten by its policy's model group."""

    turn_id: str
    policy: str
    advantage: float
    token_weight: float
    """Factor of every reply token's loss."""
    minibatch: int
    """From 0; mini-batches are taken in this order, one optimizer step each."""
    temperature: float
    role: str = ""
    reward: float = 0.0
    """Its credit, shaped, before any baseline."""


@dataclass(frozen=True)
class Batch:
    """What a training step learns from."""

    rows: dict[str, list[TrainRow]]
    """By policy, in order of mini-batch, then episode, then turn; policies without rows are left out."""
    groups: list[Group]
    stats: dict[str, float]
    trainable_members: dict[str, int] = field(default_factory=dict)
    """Member → its trainable turns, counted before selection; members without any are left out."""
    warnings: tuple[str, ...] = ()


def build_batch(
    plan: Plan,
    scored: Sequence[Scored],
    num_episodes: int,
    step: int,
    entrants: Sequence[Entrant] | None = None,
    groups: list[Group] | None = None,
) -> Batch:
    """Group, subtract baselines, weigh.

    L = (1/E) Σ_episodes Σ_turns (turn loss), E = `num_episodes`, whatever was dropped, and whatever the
    length of an episode. `weight: token_mean` (DAPO, arXiv 2503.14476, eq. 8) divides by the mini-batch's
    tokens instead, `episode_mean` by each episode's own, `call_mean` (M-GRPO, arXiv 2511.13288) by those of
    each call times the role's calls; all three depend on lengths and are biased.

    Args:
        num_episodes: episodes scheduled for the step.
        step: of the run; only named in warnings.
        entrants: turns that may train, where the sampler draws them (node sampling); default: those of the
            episodes.
        groups: with advantages that are known already (a critic's); default: `make_groups`.
    Returns:
        Rows with an advantage of 0 are left out unless KL or entropy acts on them too. `stats` has
        `learnable_group_frac, groups, singletons, flat_groups, trainable_turns, rows, masked_turns,
        unscored_turns, dropped_episodes`, and for each role `ROLE/turns, ROLE/trainable_turns, ROLE/reward,
        ROLE/malformed_frac, ROLE/truncated_frac`.
    """
    if entrants is None:
        entrants = entrants_of(plan, scored)
    groups = make_groups(plan, entrants) if groups is None else groups
    advantages = {t: a for g in groups for t, a in zip(g.turns, g.advantages, strict=True) if a is not None}
    rewards = {t: r for g in groups for t, r in zip(g.turns, g.rewards, strict=True)}
    minibatch_of, scale = minibatches(plan, scored)
    weigh = _Weights(plan, entrants, minibatch_of, num_episodes, scale)
    acts_on_all = bool(plan.algorithm.kl.weight or plan.algorithm.entropy)
    rows: dict[str, list[TrainRow]] = defaultdict(list)
    for entrant in entrants:
        turn, advantage = entrant.turn, advantages.get(entrant.turn.id)
        if advantage is None:
            continue
        if advantage < 0:
            advantage *= plan.algorithm.negative_weight
        if not (advantage or acts_on_all):
            continue
        row = TrainRow(
            turn.id,
            turn.policy,
            advantage,
            weigh(entrant) * entrant.weight,
            minibatch_of[entrant.slot],
            turn.temperature,
            turn.role,
            rewards[turn.id],
        )
        rows[turn.policy].append(row)
    ordered = {policy: sorted(found, key=lambda r: r.minibatch) for policy, found in sorted(rows.items())}
    stats = _stats(plan, scored, entrants, groups)
    stats["rows"] = float(sum(map(len, ordered.values())))
    members = Counter(e.turn.member for e in entrants)
    return Batch(ordered, groups, stats, dict(members), _warnings(groups, step))


def minibatches(plan: Plan, scored: Sequence[Scored]) -> tuple[dict[int, int], dict[int, float]]:
    """(slot → mini-batch, mini-batch → its share of the tasks): all episodes of a task stay together."""
    slots = sorted({one.trajectory.key.slot for one in scored})
    number = min(filled(plan.algorithm).updates_per_step or 1, len(slots))
    minibatch_of = {slot: rank * number // len(slots) for rank, slot in enumerate(slots)}
    sizes = Counter(minibatch_of.values())
    return minibatch_of, {m: size / len(slots) for m, size in sizes.items()}


class _Weights:
    """`token_weight` of a turn: by the algorithm's `weight`, times `turn_loss`."""

    def __init__(
        self,
        plan: Plan,
        entrants: Sequence[Entrant],
        minibatch_of: dict[int, int],
        num_episodes: int,
        share: dict[int, float],
    ):
        self.algorithm = filled(plan.algorithm)
        self.minibatch_of = minibatch_of
        self.episodes = {m: num_episodes * part for m, part in share.items()}
        self.lengths = budgets(plan)
        self.of_batch: dict[tuple[str, int], float] = defaultdict(float)
        self.of_episode: dict[tuple[str, str], float] = defaultdict(float)
        self.of_call: dict[tuple[str, str], dict[Path, float]] = defaultdict(lambda: defaultdict(float))
        for e in entrants:  # one that stands for several counts for as many
            self.of_batch[e.turn.policy, minibatch_of[e.slot]] += e.turn.reply_tokens * e.weight
            self.of_episode[e.turn.policy, e.episode] += e.turn.reply_tokens * e.weight
            self.of_call[e.turn.member, e.episode][e.call] += e.turn.reply_tokens * e.weight

    def __call__(self, entrant: Entrant) -> float:
        turn, minibatch = entrant.turn, self.minibatch_of[entrant.slot]
        if self.algorithm.weight == "token_mean":
            return 1 / self.of_batch[turn.policy, minibatch]
        episodes = self.episodes[minibatch]
        if self.algorithm.weight == "episode_mean":
            return 1 / (self.of_episode[turn.policy, entrant.episode] * episodes)
        if self.algorithm.weight == "call_mean":
            calls = self.of_call[turn.member, entrant.episode]
            return 1 / (calls[entrant.call] * len(calls) * episodes)
        return 1 / (self._length(turn) * episodes)

    def _length(self, turn: Turn) -> int:
        if self.algorithm.turn_loss == "mean":
            return turn.reply_tokens
        return self.algorithm.sum_length or self.lengths.get(turn.role) or turn.reply_tokens


def _stats(
    plan: Plan, scored: Sequence[Scored], entrants: Sequence[Entrant], groups: Sequence[Group]
) -> dict[str, float]:
    policies = [training_policy(plan.graph.outcomes, one.trajectory) for one in scored]
    learnable = sum(g.learnable for g in groups)
    singletons = sum(g.singleton for g in groups)
    stats = {
        "learnable_group_frac": learnable / len(groups) if groups else 0.0,
        "groups": len(groups),
        "singletons": singletons,
        "flat_groups": sum(not g.singleton and not g.learnable for g in groups),
        "trainable_turns": len(entrants),
        "masked_turns": sum(list(p.values()).count("mask") for p in policies),
        "unscored_turns": sum(total is None for one in scored for total in one.totals.values()),
        "dropped_episodes": sum(
            "drop_episode" in (plan.graph.outcomes[one.trajectory.outcome], *policy.values())
            for one, policy in zip(scored, policies, strict=True)
        ),
    }
    trainable = Counter(e.turn.role for e in entrants)
    spoken: dict[str, list[Turn]] = defaultdict(list)
    totals: dict[str, list[float]] = defaultdict(list)
    for one in scored:
        for turn in one.trajectory.turns:
            spoken[turn.role].append(turn)
            total = one.totals.get(turn.id)
            if total is not None:
                totals[turn.role].append(total)
    for role, turns in sorted(spoken.items()):
        stats[f"{role}/turns"] = len(turns)
        stats[f"{role}/trainable_turns"] = trainable[role]
        stats[f"{role}/malformed_frac"] = sum(not t.ok for t in turns) / len(turns)
        stats[f"{role}/truncated_frac"] = sum(t.outcome == "truncated" for t in turns) / len(turns)
        if totals[role]:
            stats[f"{role}/reward"] = sum(totals[role]) / len(totals[role])
    return {name: float(number) for name, number in stats.items()}


def _warnings(groups: Sequence[Group], step: int) -> tuple[str, ...]:
    alone = Counter(g.key[2] for g in groups if g.singleton and g.advantages == (None,))
    sizes = Counter(g.key[2] for g in groups)
    return tuple(
        f"step {step}: {n} of {sizes[member]} groups of '{member}' hold one turn and train nothing;"
        " draw more samples, or set algorithm.singleton: role_baseline"
        for member, n in sorted(alone.items())
    )
