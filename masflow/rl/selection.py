"""Which groups are trained on: those whose actions differ most in what they bring (`top_k`).

Section 3.2 of JoyAgents-R1 (arXiv 2506.19846) takes the K nodes of the largest reward variance. With few
continuations that variance is mostly the luck of what came later, which is largest at early nodes; here it is
corrected for it. Choosing by the rewards that form the gradient is biased by design: what is chosen looks
better, and differs more, than it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

import numpy as np

from masflow.rl.advantages import is_flat
from masflow.rl.batch import Batch
from masflow.rl.groups import Entrant, Group

__all__ = ["Chosen", "benefit", "choose", "selected", "summary"]


@dataclass(frozen=True)
class Chosen:
    """A group with its benefit, and whether it is trained on."""

    group: Group
    role: str
    node: str
    benefit: float | None
    """v, scaled where that was asked for; None: nothing to compare, or nothing to correct by."""
    selected: bool


def benefit(
    means: Sequence[float], values: Sequence[Sequence[float]], corrected: bool = True
) -> float | None:
    """Unbiased variance of what actions bring: that of their means (ddof 1), less what chance adds to it.

    v = var_a(mean_a) - mean_a(s_a² / M_a), s_a² the variance (ddof 1) of an action's M_a continuations. With
    M continuations each, that is DESIGN's `variance of means - mean within-action variance / M`. Where all
    actions are equal, v averages 0, and is negative about half of the time.

    Args:
        means: of G actions, what each is credited with.
        values: of each action, what its continuations gave; M_a >= 1. One that has a single one, the others
            being lost, is taken to vary as the others do on average.
        corrected: False leaves the second term out, as where a value isn't the mean of anything.
    Returns:
        v; None for fewer than two actions, or where correcting needs a second continuation and there is none.
    """
    if len(means) < 2:
        return None
    means_G = np.asarray(means, dtype=np.float64)
    between = 0.0 if is_flat(means_G) else float(means_G.var(ddof=1))
    if not corrected:
        return between
    several = [float(np.var(each, ddof=1)) for each in values if len(each) > 1]
    if not several:
        return None
    typical = float(np.mean(several))
    noise = [(float(np.var(each, ddof=1)) if len(each) > 1 else typical) / len(each) for each in values]
    return between - float(np.mean(noise))


def choose(
    groups: Sequence[Group],
    entrants: Iterable[Entrant],
    k: int | float | Literal["all"],
    *,
    scope: Literal["task", "batch"] = "task",
    normalize: Literal["none", "role_range"] = "none",
    corrected: bool = True,
) -> list[Chosen]:
    """The K groups of largest benefit, of those where it is above 0; ties go to the earlier turn.

    Args:
        groups: of one step, with who trains in them.
        entrants: these turns.
        k: how many; below 1 the share of the scope's groups, rounded up; `all`: every one above 0.
        scope: K of each task's groups, or K of all of the step's.
        normalize: `role_range` divides v by the square of the range of that role's values in the step, so
            that roles whose rewards have a larger scale aren't chosen for it.
    Returns:
        One entry a group, in their order.
    """
    by_id = {e.turn.id: e for e in entrants}
    found: list[tuple[Group, Entrant, float | None]] = []
    for group in groups:
        first = min((by_id[t] for t in group.turns), key=lambda e: e.turn.superstep)
        means = group.compared or group.rewards
        values = [by_id[t].values for t in group.turns]
        found.append((group, first, benefit(means, values, corrected)))
    if normalize == "role_range":
        ranges = _ranges(found)
        found = [(g, e, None if v is None else v / ranges[g.key[2]] ** 2) for g, e, v in found]
    scopes: dict[int, list[int]] = defaultdict(list)
    for i, (_, first, _) in enumerate(found):
        scopes[first.slot if scope == "task" else -1].append(i)
    chosen: set[int] = set()
    for members in scopes.values():
        above = [i for i in members if (found[i][2] or 0.0) > 0]
        above.sort(key=lambda i: (-(found[i][2] or 0.0), found[i][1].turn.superstep, i))
        chosen.update(above[: _number(k, len(members))])
    return [Chosen(g, g.key[2], _node(g, e), v, i in chosen) for i, (g, e, v) in enumerate(found)]


def selected(batch: Batch, chosen: Sequence[Chosen], step: int) -> Batch:
    """The batch with the rows of selected groups alone; policies without any are left out of it.

    Args:
        step: of the run; only named in a warning.
    """
    kept = {turn for one in chosen if one.selected for turn in one.group.turns}
    rows = {policy: [row for row in each if row.turn_id in kept] for policy, each in batch.rows.items()}
    warnings = batch.warnings
    if batch.rows and not kept:
        said = f"step {step}: top_k selected none of {len(chosen)} groups, for in none the actions differ by"
        warnings = (*warnings, f"{said} more than luck; draw more samples or continuations")
    return replace(batch, rows={policy: each for policy, each in rows.items() if each}, warnings=warnings)


def summary(chosen: Sequence[Chosen]) -> dict[str, Any]:
    """`groups`, `selected`, and for `roles` and `nodes` by name: `groups`, `selected`, `benefit` (the mean;
    None where no group has one)."""
    roles, nodes = defaultdict(list), defaultdict(list)
    for one in chosen:
        roles[one.role].append(one)
        nodes[one.node].append(one)
    nodes.pop("", None)
    return {
        **_counts(chosen),
        "roles": {name: _counts(each, True) for name, each in sorted(roles.items())},
        "nodes": {name: _counts(each, True) for name, each in sorted(nodes.items())},
    }


def _counts(chosen: Sequence[Chosen], with_benefit: bool = False) -> dict[str, Any]:
    known = [one.benefit for one in chosen if one.benefit is not None]
    found: dict[str, Any] = {"groups": len(chosen), "selected": sum(one.selected for one in chosen)}
    if with_benefit:
        found["benefit"] = float(np.mean(known)) if known else None
    return found


def _number(k: int | float | Literal["all"], num_groups: int) -> int:
    if k == "all":
        return num_groups
    return ceil(round(k * num_groups, 9)) if isinstance(k, float) else k


def _ranges(found: Sequence[tuple[Group, Entrant, float | None]]) -> Mapping[str, float]:
    """Role → largest less smallest of what was compared in the step; 1 where all is equal."""
    values: dict[str, list[float]] = defaultdict(list)
    for group, _, _ in found:
        values[group.key[2]] += group.compared or group.rewards
    return {role: (max(each) - min(each)) or 1.0 for role, each in values.items()}


def _node(group: Group, first: Entrant) -> str:
    """Where it was spoken; empty for a group of several places."""
    return first.turn.node if group.key[3] else ""
