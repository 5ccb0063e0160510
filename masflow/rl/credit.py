"""From components to one total a turn: the turn's own rewards, or its discounted return.

Knows no functions and no groups; rewards arrive as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from masflow.trace import Turn

__all__ = ["own", "return_to_go"]

Value = float | None


def own(components: Mapping[str, Value], weights: Mapping[str, float]) -> Value:
    """Weighted sum of a turn's components.

    A weight of 0 is a metric and doesn't count. A null component makes the sum null; so does having none.
    """
    return _sum(
        weights[name] * v if v is not None else None for name, v in components.items() if weights[name]
    )


def return_to_go(
    turns: Sequence[Turn],
    at_turn: Mapping[str, Mapping[str, Value]],
    at_end: Mapping[str, Mapping[str, Value]],
    weights: Mapping[str, float],
    discount: float,
    alone: Iterable[str] = (),
) -> dict[str, Value]:
    """G_t = r_t + Σ_{u: s_u > s_t} g^(s_u - s_t) r_u + g^(S - s_t) r_end, s the superstep, S the last one.

    Args:
        turns: one trajectory's.
        at_turn: turn id → rewards of that turn; these flow back to every turn in an earlier superstep.
        at_end: turn id → rewards of the role and the trajectory, due when the episode ends.
        weights: reward name → weight; 0 doesn't count.
        discount: g, a superstep.
        alone: ids of turns that get their own rewards only (attempts that were asked again).
    Returns:
        Turn id → return; None when any part is null, or when there is none.
    """
    last = max((t.superstep for t in turns), default=0)
    mine = {t.id: own(at_turn.get(t.id, {}), weights) for t in turns}
    paid = {t.id for t in turns if any(weights[n] for n in at_turn.get(t.id, {}))}
    alone = set(alone)
    totals: dict[str, Value] = {}
    for turn in turns:
        parts: list[Value] = [mine[turn.id]] if turn.id in paid else []
        if turn.id not in alone:
            later = [u for u in turns if u.superstep > turn.superstep and u.id in paid]
            parts += [_times(discount ** (u.superstep - turn.superstep), mine[u.id]) for u in later]
            end = at_end.get(turn.id, {})
            if any(weights[n] for n in end):
                parts.append(_times(discount ** (last - turn.superstep), own(end, weights)))
        totals[turn.id] = _sum(parts)
    return totals


def _times(factor: float, value: Value) -> Value:
    return None if value is None else factor * value


def _sum(parts: Iterable[Value]) -> Value:
    total, empty = 0.0, True
    for part in parts:
        if part is None:
            return None
        total, empty = total + part, False
    return None if empty else total
