"""`measure` and `pay`: a quantity measured after some nodes, paid as its value or its gain.

Before and after follow supersteps: the compiler refuses a measured node that may be concurrent with a paid
turn, so that supersteps decide.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

from masflow.rl.functions import Question, RewardCall
from masflow.rl.scope import Scope
from masflow.trace import Path, Turn

__all__ = ["Measurement", "measurements", "pay"]


@dataclass(frozen=True)
class Measurement:
    """The quantity at one place. `turn` is the measured turn's id, None after a tool, call or set node."""

    superstep: int
    path: Path
    turn: str | None
    value: float | None

    def follows(self, turn: Turn) -> bool:
        """Measured at this turn or later; a tool node right after a turn shares its superstep."""
        if self.turn == turn.id:
            return True
        return self.superstep > turn.superstep or (self.turn is None and self.superstep == turn.superstep)


def measurements(call: RewardCall, scope: Scope) -> Generator[list[Question], list[Any], list[Measurement]]:
    """In happened-before order, concurrent ones as the trajectory has them; a malformed turn measures
    `otherwise`.

    Yields the questions once, and goes on with their answers.
    """
    reward = call.reward
    places: list[tuple[int, Path, str | None]] = []
    asked: list[Question] = []
    spoken = {scope.visit_of(t.path) for t in scope.turns}
    for turn in scope.turns:
        if scope.at_nodes(turn, reward.measure_after) and scope.is_final(turn):
            places.append((turn.superstep, turn.path, turn.id))
            names = scope.names_at(turn)
            asked.append(
                call.ask(reward.measure_args, names, turn) if turn.ok else Question(reward.otherwise)
            )
    for moment in scope.moments:
        if scope.local(moment.node) in reward.measure_after and scope.visit_of(moment.path) not in spoken:
            if scope.is_role_node(scope.local(moment.node)):
                continue  # skipped by its `when`: nothing new to measure
            places.append((moment.superstep, moment.path, None))
            asked.append(call.ask(reward.measure_args, moment.names))
    values = yield asked
    found = [Measurement(*place, call.plain(value)) for place, value in zip(places, values, strict=True)]
    return sorted(found, key=lambda m: (m.superstep, m.turn is None))


def pay(call: RewardCall, scope: Scope, found: list[Measurement]) -> Iterable[tuple[Turn, float | None]]:
    """(turn, reward) of every turn that is paid."""
    paid = dict(call.reward.pay)
    own = {m.turn: m.value for m in found if m.turn is not None}
    for turn in scope.selected(call.reward):
        kind = paid.get(scope.local(turn.role)) or paid.get(scope.local(turn.member))
        if kind == "gain":
            yield turn, _gain(turn, found, call.reward.start)
        elif kind == "value" and turn.id in own:
            yield turn, own[turn.id]


def _gain(turn: Turn, found: list[Measurement], start: float) -> float | None:
    """First measurement after the turn minus the last before it; 0 when none follows."""
    after = next((m for m in found if m.follows(turn)), None)
    if after is None:
        return 0.0
    earlier = [m.value for m in found if not m.follows(turn)]
    before = earlier[-1] if earlier else start
    return None if after.value is None or before is None else after.value - before
