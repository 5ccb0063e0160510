"""Score trajectories: run every reward where it applies, and add up what each turn is credited with.

A reward that fails, for whatever reason, is null and never 0: the turn's total is then null too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from masflow.compiler.graph import Graph, RewardIR
from masflow.compiler.plan import Plan
from masflow.rl.credit import own, return_to_go
from masflow.rl.functions import Ask, Judge, Judgement, RewardCall, Verdict
from masflow.rl.measure import measurements, pay
from masflow.rl.scope import Scope, speaking
from masflow.trace import Path, Scored, Trajectory, Turn

__all__ = ["Focus", "score"]

Value = float | None


@dataclass(frozen=True)
class Focus:
    """The one turn whose credit is asked for; rewards that can't reach it are left out."""

    turn: str
    """Its id."""
    is_local: bool = False
    """Only what its own workflow pays for this turn by itself: the episode was left when its visit ended."""


def score(
    plan: Plan,
    trajectories: Sequence[Trajectory],
    judge: Judge | None = None,
    focus: Sequence[Focus] | None = None,
) -> list[Scored]:
    """Rewards of every trajectory, in order.

    Args:
        judge: asks the frozen roles of `role:NAME` rewards, all questions in one call.
        focus: of each trajectory; default: all its turns are credited.
    Raises:
        RunError: a reward needs a judge and there is none.
    """
    each = list(zip(trajectories, focus or [None] * len(trajectories), strict=True))
    ask = _asked_before(plan, each, judge) if judge is not None and _is_judged(plan) else None
    return [_score(plan, trajectory, ask, on) for trajectory, on in each]


def _is_judged(plan: Plan) -> bool:
    return any(reward.judge for graph in plan.workflows.values() for reward in graph.rewards)


def _asked_before(plan: Plan, each: Sequence[tuple[Trajectory, Focus | None]], judge: Judge) -> Ask:
    """Collect every question, ask them in one batch, and give the answers back in the same order."""
    questions: list[Judgement] = []

    def collect(question: Judgement) -> Verdict:
        questions.append(question)
        return Verdict(None)

    for trajectory, on in each:
        _score(plan, trajectory, collect, on, only_judged=True)
    answers = iter(zip(questions, judge(questions), strict=True))

    def answer(question: Judgement) -> Verdict:
        asked, verdict = next(answers)
        assert asked == question
        return verdict

    return answer


@dataclass
class _Ledger:
    """What was paid. `at_turn` are turn rewards, `at_end` those of a role or the trajectory."""

    at_turn: dict[str, dict[str, Value]] = field(default_factory=dict)
    at_end: dict[str, dict[str, Value]] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    measured: dict[str, list[Value]] = field(default_factory=dict)
    """Reward name → its value for the trajectory, once a call of its workflow."""
    failures: list[str] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)
    on: Focus | None = None
    wanted: frozenset[str] | None = None
    """Turns whose own rewards are asked for; None: all."""


def _wanted(plan: Plan, trajectory: Trajectory, on: Focus | None) -> frozenset[str] | None:
    """With `return_to_go` what comes later flows back; what comes earlier never does."""
    if on is None:
        return None
    if on.is_local or plan.graph.credit == "own":
        return frozenset({on.turn})
    began = next((t.superstep for t in trajectory.turns if t.id == on.turn), 0)
    return frozenset(t.id for t in trajectory.turns if t.superstep >= began)


def _is_own(reward: RewardIR) -> bool:
    """Whether a reward can be known when the visit that it pays has ended."""
    return bool(reward.measure_after) or (reward.level == "turn" and not reward.allocator)


def _score(
    plan: Plan, trajectory: Trajectory, ask: Ask | None, on: Focus | None, only_judged: bool = False
) -> Scored:
    ledger = _Ledger(on=on, wanted=_wanted(plan, trajectory, on))
    for scope in _scopes(plan, plan.graph, trajectory, ()):
        ledger.alone |= {t.id for t in scope.turns if scope.is_superseded(t)}
        for reward in scope.graph.rewards:
            if (only_judged and reward.judge is None) or (on and on.is_local and not _is_own(reward)):
                continue
            call = RewardCall(
                reward, trajectory, plan.root_dir, scope.early, scope.graph, scope.call, ask, ledger.failures
            )
            _apply(call, scope, ledger)
    ids = [t.id for t in trajectory.turns]
    components = {i: {**ledger.at_turn.get(i, {}), **ledger.at_end.get(i, {})} for i in ids}
    if plan.graph.credit == "return_to_go":
        totals = return_to_go(
            trajectory.turns, ledger.at_turn, ledger.at_end, ledger.weights, plan.graph.discount, ledger.alone
        )
    else:
        totals = {i: own(components[i], ledger.weights) for i in ids}
    return Scored(
        trajectory,
        components,
        totals,
        {name: mean(v) for name, v in ledger.measured.items()},
        tuple(ledger.failures),
    )


def _scopes(plan: Plan, graph: Graph, trajectory: Trajectory, prefix: Path) -> Iterator[Scope]:
    """The graph's own scope, then that of every call whose node keeps its workflow's rewards."""
    yield Scope(graph, trajectory, prefix)
    kept = {n.name: plan.workflows[n.workflow] for n in graph.nodes if n.keep_rewards and n.workflow}
    depth = len(prefix)
    inside = (t.path for t in trajectory.turns if len(t.path) > depth + 1 and t.path[:depth] == prefix)
    for call in dict.fromkeys(path[: depth + 1] for path in inside):
        if call[-1].node in kept:
            yield from _scopes(plan, kept[call[-1].node], trajectory, call)


def _apply(call: RewardCall, scope: Scope, ledger: _Ledger) -> None:
    reward, name = call.reward, scope.call + call.reward.name
    if reward.measure_after:
        found = measurements(call, scope)
        payments, metric = list(pay(call, scope, found)), found[-1].value if found else None
    elif reward.function is None and reward.judge is None:
        payments, metric = _well_formed(call, scope)
    elif reward.level == "turn" and not reward.allocator:
        payments, metric = _per_turn(call, scope, ledger.wanted)
    else:
        payments, metric = _at_the_end(call, scope)
    if ledger.on is not None and ledger.on.is_local:
        payments = list(_local(call, scope, payments, ledger.on.turn))
    at_turn = reward.level == "turn" or reward.allocator or reward.measure_after
    place = ledger.at_turn if at_turn else ledger.at_end
    for turn, paid in payments:
        if scope.of_roles(turn, reward.to):
            place.setdefault(turn.id, {})[name] = paid
    ledger.weights[name] = reward.weight
    ledger.measured.setdefault(name, []).append(metric)


Payments = tuple[list[tuple[Turn, Value]], Value]
"""(turn, reward) of everyone paid, and the reward's value for the whole trajectory."""


def _well_formed(call: RewardCall, scope: Scope) -> Payments:
    """0, or -1 for a malformed turn; every attempt counts. At the other levels -1 when any turn is."""
    reward = call.reward
    turns = [t for t in scope.turns if scope.of_roles(t, reward.roles) and scope.at_nodes(t, reward.nodes)]
    if reward.when:
        turns = [t for t in turns if call.applies(scope.names_at(t))]
    if reward.level == "turn":
        each: list[tuple[Turn, Value]] = [(t, 0.0 if t.ok else -1.0) for t in turns]
        return each, mean(paid for _, paid in each)
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.role if reward.level == "role" else "", []).append(turn)
    worst = {key: -1.0 if any(not t.ok for t in members) else 0.0 for key, members in groups.items()}
    payments: list[tuple[Turn, Value]] = [
        (t, worst[key]) for key, members in groups.items() for t in members if not scope.is_superseded(t)
    ]
    return payments, mean(worst.values())


def _local(
    call: RewardCall, scope: Scope, payments: Iterable[tuple[Turn, Value]], turn_id: str
) -> Iterator[tuple[Turn, Value]]:
    """What one turn earns by itself in this workflow, unless it is paid in one that is called; null where its
    visit never ended. A measured quantity is its own only where it is measured at the turn's node."""
    nodes = {node.name: node for node in scope.graph.nodes}
    for turn, paid in payments:
        node = nodes.get(turn.path[len(scope.prefix)].node)
        called = len(turn.path) > len(scope.prefix) + 1
        elsewhere = called and node is not None and node.keep_rewards
        own = not call.reward.measure_after or scope.at_nodes(turn, call.reward.measure_after)
        if turn.id == turn_id and own and not elsewhere:
            yield turn, paid if called or scope.is_over(turn) else None


def _per_turn(call: RewardCall, scope: Scope, wanted: frozenset[str] | None) -> Payments:
    """Every model call of a visit (or item) is paid what its final turn earns.

    Args:
        wanted: ids of turns whose visits are looked at; None: all.
    """
    turns = scope.selected(call.reward)
    if wanted is not None:
        visits = {speaking(t.path) for t in turns if t.id in wanted}
        turns = [t for t in turns if speaking(t.path) in visits]
    earned: dict[Path, Value] = {}
    for turn in turns:
        names = scope.names_at(turn) if scope.is_final(turn) else {}
        applies = call.applies(names) if names else False
        if applies is not False:
            earned[speaking(turn.path)] = call.at(call.reward.args, names, turn) if applies else None
    payments = [(t, earned[speaking(t.path)]) for t in turns if speaking(t.path) in earned]
    return payments, mean(earned.values())


def _at_the_end(call: RewardCall, scope: Scope) -> Payments:
    """One call a trajectory, paid to every turn selected; an allocator says itself to whom."""
    turns, names = scope.selected(call.reward), scope.names_at_end
    applies = call.applies(names)
    if applies is False:
        return [], None
    result = call.raw(call.reward.args, names) if applies else None
    if not isinstance(result, dict):
        return [(t, result) for t in turns], result
    unknown = set(result) - {t.id for t in scope.turns}
    if unknown:
        call.fail(
            f"pays '{min(map(str, unknown))}', which is no turn's id; use `turn.id` of `trajectory.turns`"
        )
        return [(t, None) for t in turns], None
    return [(t, result[t.id]) for t in turns if t.id in result], mean(result.values())


def mean(values: Iterable[Value]) -> Value:
    """Over those that aren't null; None when nothing is left."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
