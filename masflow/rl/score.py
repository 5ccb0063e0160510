"""Score trajectories: run every reward where it applies, and add up what each turn is credited with.

A reward that fails, for whatever reason, is null and never 0: the turn's total is then null too. Functions
are called in processes of their own, and may begin while other episodes are still played; what comes out is
the same, whatever the order.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from masflow.compiler.graph import Graph, RewardIR
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.isolated import Weighed
from masflow.isolation import Call, Pool, pool
from masflow.rl.credit import own, return_to_go
from masflow.rl.functions import Asked, Judge, Played, Question, RewardCall, call_apart, call_here
from masflow.rl.measure import measurements, pay
from masflow.rl.scope import Scope, speaking
from masflow.trace import Path, Scored, Trajectory, Turn

__all__ = ["Focus", "Scoring", "score"]

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
        RunError: a reward needs a judge and there is none; a function can't be loaded.
    """
    with Scoring(plan) as scoring:
        for trajectory, on in zip(trajectories, focus or [None] * len(trajectories), strict=True):
            scoring.begin(trajectory, on)
        return scoring.finish(trajectories, judge)


class Scoring:
    """Rewards of many trajectories: `begin` each as it ends, in any order, then `finish` all.

    As a context: whatever is left of the work is dropped at its end. Calls of one function are asked for
    alone as their episode ends, or all in one with `batch: true`, when every episode has ended.
    """

    def __init__(self, plan: Plan, processes: Pool | None = None) -> None:
        self._plan = plan
        self._pool = processes
        self._begun: dict[int, list[_Episode]] = {}
        """By the trajectory's identity: a trajectory may be scored for several turns."""
        self._calls: list[Call] = []
        self.seconds: dict[str, float] = {}
        """`rewards_s`: sum over all calls in processes of their own; `rewards_waited_s`: of these not hidden
        behind other work."""
        if any(r.function and r.isolate for graph in plan.workflows.values() for r in graph.rewards):
            self._processes().start()

    def __enter__(self) -> Scoring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.drop(self._calls)
        self._begun, self._calls = {}, []

    def begin(self, trajectory: Trajectory, focus: Focus | None = None) -> None:
        """Ask for what can be asked for at once."""
        episode = _Episode(self._plan, trajectory, focus)
        self._begun.setdefault(id(trajectory), []).append(episode)
        calls: list[Call] = []
        for item in episode.items:
            if item.call.reward.isolate and not item.call.reward.batch:
                for i, question in enumerate(item.questions):
                    if question.asked is not None:
                        found = call_apart(item.call.reward, [question.asked], self._plan.root_dir)
                        item.calls[i] = found
                        calls.append(found)
        self._submit(calls)

    def finish(self, trajectories: Sequence[Trajectory], judge: Judge | None = None) -> list[Scored]:
        """In this order; those that haven't begun begin now.

        Raises:
            RunError: a reward needs a judge and there is none; a function can't be loaded.
        """
        for trajectory in trajectories:
            if id(trajectory) not in self._begun:
                self.begin(trajectory)
        episodes = [self._begun[id(trajectory)].pop(0) for trajectory in trajectories]
        items = [item for episode in episodes for item in episode.items]
        batches = list(self._batches(items))
        _judge([item for item in items if item.call.reward.judge], judge)
        for item in items:
            if not item.call.reward.isolate and not item.call.reward.batch:
                for i, question in enumerate(item.questions):
                    if question.asked is not None:
                        found = call_here(item.call.reward, [question.asked], self._plan.root_dir)
                        item.answers[i] = _heard(item.call, question.asked, found)
        began = time.perf_counter()
        if self._calls:
            self._processes().wait(self._calls)
            busy_s = sum(call.seconds for call in self._calls)
            waited_s = time.perf_counter() - began
            for name, spent_s in (("rewards_s", busy_s), ("rewards_waited_s", waited_s)):
                self.seconds[name] = round(self.seconds.get(name, 0.0) + spent_s, 4)
        for batch in batches:
            batch.share()
        for item in items:
            for i, call in item.calls.items():
                assert call.answer is not None
                asked = item.questions[i].asked
                assert asked is not None
                item.answers[i] = _heard(item.call, asked, call.answer)
        self._calls = []
        return [episode.scored() for episode in episodes]

    def _batches(self, items: Sequence[_Item]) -> Iterator[_Batch]:
        """One call of each reward with `batch: true`, begun or, in this process, done."""
        found: dict[tuple[str, str], _Batch] = {}
        for item in items:
            if item.call.reward.batch:
                batch = found.setdefault((item.call.call, item.call.reward.name), _Batch(item.call.reward))
                batch.places += [(item, i) for i, question in enumerate(item.questions) if question.asked]
        for batch in found.values():
            if not batch.places:
                continue
            if batch.reward.isolate:
                batch.apart = call_apart(batch.reward, batch.asked, self._plan.root_dir)
                self._submit([batch.apart])
            else:
                batch.answer = call_here(batch.reward, batch.asked, self._plan.root_dir)
            yield batch

    def _submit(self, calls: Sequence[Call]) -> None:
        self._calls += calls
        if new := [call for call in calls if call.answer is None]:
            self._processes().submit(new)

    def _processes(self) -> Pool:
        if self._pool is None:
            self._pool = pool()
        return self._pool


@dataclass
class _Item:
    """One reward of one scope of one episode, waiting for answers."""

    call: RewardCall
    going: Generator[list[Question], list[Any], None]
    questions: list[Question]
    answers: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)

    def go_on(self) -> None:
        """With all answers; pays."""
        values = [self.answers.get(i, question.value) for i, question in enumerate(self.questions)]
        for _ in self._sent(values):
            raise AssertionError("a reward asks once")

    def _sent(self, values: list[Any]) -> Iterator[None]:
        try:
            self.going.send(values)
        except StopIteration:
            return
        yield


@dataclass
class _Batch:
    """One call for many places."""

    reward: RewardIR
    places: list[tuple[_Item, int]] = field(default_factory=list)
    apart: Call | None = None
    answer: Weighed | None = None

    @property
    def asked(self) -> list[Asked]:
        found = [item.questions[i].asked for item, i in self.places]
        return [asked for asked in found if asked is not None]

    def share(self) -> None:
        """Give every place its value; what was wrong is told to all of them."""
        answer = self.apart.answer if self.apart is not None else self.answer
        assert answer is not None
        for (item, i), asked, value in zip(self.places, self.asked, answer.value, strict=True):
            item.answers[i] = _heard(item.call, asked, Weighed(value, answer.problems))


def _heard(call: RewardCall, asked: Asked, answer: Weighed) -> Any:
    for problem in answer.problems:
        call.fail(problem)
    return answer.value


def _judge(items: Sequence[_Item], judge: Judge | None) -> None:
    """Ask all questions of judges in one batch."""
    places = [(item, i) for item in items for i, question in enumerate(item.questions) if question.judgement]
    if not places:
        return
    first = places[0][0].call.reward
    if judge is None:
        raise RunError(
            f"reward '{first.name}' is judged by role '{first.judge}', and no model can be asked here",
            "score where the models are loaded, or give `score` a judge",
        )
    questions = [question for item, i in places if (question := item.questions[i].judgement)]
    for (item, i), verdict in zip(places, judge(questions), strict=True):
        item.answers[i] = None if verdict.detail else verdict.score
        if verdict.detail:
            item.call.fail(verdict.detail)


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
    again: set[tuple[str, str]] = field(default_factory=set)
    """(turn id, reward name) of what is paid again, with its visit's last call: one reward, not several."""
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


class _Episode:
    """One trajectory, every reward asked; the answers make it a `Scored`."""

    def __init__(self, plan: Plan, trajectory: Trajectory, on: Focus | None):
        self.plan, self.trajectory = plan, trajectory
        self.ledger = ledger = _Ledger(on=on, wanted=_wanted(plan, trajectory, on))
        self.items: list[_Item] = []
        played = Played(trajectory)
        for scope in _scopes(plan, plan.graph, trajectory, ()):
            ledger.alone |= {t.id for t in scope.turns if scope.is_superseded(t)}
            for reward in scope.graph.rewards:
                if on and on.is_local and not _is_own(reward):
                    continue
                call = RewardCall(reward, played, scope.early, scope.graph, scope.call, ledger.failures)
                going = _applied(call, scope, ledger)
                self.items.append(_Item(call, going, next(going)))

    def scored(self) -> Scored:
        for item in self.items:
            item.go_on()
        plan, ledger, turns = self.plan, self.ledger, self.trajectory.turns
        ids = [t.id for t in turns]
        components = {i: {**ledger.at_turn.get(i, {}), **ledger.at_end.get(i, {})} for i in ids}
        undiscounted: dict[str, Value] = {}
        if plan.graph.credit == "return_to_go":
            at_turn = {
                i: {name: value for name, value in paid.items() if (i, name) not in ledger.again}
                for i, paid in ledger.at_turn.items()
            }
            flow = (turns, at_turn, ledger.at_end, ledger.weights)
            totals = return_to_go(*flow, plan.graph.discount, ledger.alone)
            if plan.graph.discount != 1:
                undiscounted = return_to_go(*flow, 1.0, ledger.alone)
        else:
            totals = {i: own(components[i], ledger.weights) for i in ids}
        metrics = {name: mean(v) for name, v in ledger.measured.items()}
        failures = tuple(ledger.failures)
        return Scored(self.trajectory, components, totals, metrics, failures, undiscounted)


def _scopes(plan: Plan, graph: Graph, trajectory: Trajectory, prefix: Path) -> Iterator[Scope]:
    """The graph's own scope, then that of every call whose node keeps its workflow's rewards."""
    yield Scope(graph, trajectory, prefix)
    kept = {n.name: plan.workflows[n.workflow] for n in graph.nodes if n.keep_rewards and n.workflow}
    depth = len(prefix)
    inside = (t.path for t in trajectory.turns if len(t.path) > depth + 1 and t.path[:depth] == prefix)
    for call in dict.fromkeys(path[: depth + 1] for path in inside):
        if call[-1].node in kept:
            yield from _scopes(plan, kept[call[-1].node], trajectory, call)


def _applied(call: RewardCall, scope: Scope, ledger: _Ledger) -> Generator[list[Question], list[Any], None]:
    """Yields what the reward asks, once; with the answers it pays into the ledger."""
    reward, name = call.reward, scope.call + call.reward.name
    if reward.measure_after:
        found = yield from measurements(call, scope)
        payments, metric = list(pay(call, scope, found)), found[-1].value if found else None
    elif reward.function is None and reward.judge is None:
        yield []
        payments, metric = _well_formed(call, scope)
    elif reward.level == "turn" and not reward.allocator:
        payments, metric = yield from _per_turn(call, scope, ledger.wanted)
        if ledger.on is None or not ledger.on.is_local:
            ledger.again |= {(t.id, name) for t, _ in payments if not scope.is_final(t)}
    else:
        payments, metric = yield from _at_the_end(call, scope)
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
Asking = Generator[list[Question], list[Any], Payments]
"""Yields questions once, and goes on with their answers."""


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


def _per_turn(call: RewardCall, scope: Scope, wanted: frozenset[str] | None) -> Asking:
    """Every model call of a visit (or item) is paid what its final turn earns.

    Args:
        wanted: ids of turns whose visits are looked at; None: all.
    """
    turns = scope.selected(call.reward)
    if wanted is not None:
        visits = {speaking(t.path) for t in turns if t.id in wanted}
        turns = [t for t in turns if speaking(t.path) in visits]
    asked: dict[Path, Question] = {}
    for turn in turns:
        names = scope.names_at(turn) if scope.is_final(turn) else {}
        applies = call.applies(names) if names else False
        if applies is not False:
            asked[speaking(turn.path)] = call.ask(call.reward.args, names, turn) if applies else Question()
    values = yield list(asked.values())
    earned = {path: call.plain(value) for path, value in zip(asked, values, strict=True)}
    payments = [(t, earned[speaking(t.path)]) for t in turns if speaking(t.path) in earned]
    return payments, mean(earned.values())


def _at_the_end(call: RewardCall, scope: Scope) -> Asking:
    """One call a trajectory, paid to every turn selected; an allocator says itself to whom."""
    turns, names = scope.selected(call.reward), scope.names_at_end
    applies = call.applies(names)
    if applies is False:
        yield []
        return [], None
    (result,) = yield [call.ask(call.reward.args, names) if applies else Question()]
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
