"""Which groups `top_k` selects: numbers worked out by hand, and what chance alone does to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from masflow.rl.batch import Batch, TrainRow
from masflow.rl.groups import Entrant, Group
from masflow.rl.selection import benefit, choose, selected, summary
from masflow.trace import Step, Turn


def estimate(values: Any, corrected: bool = True) -> float:
    """`benefit` of an array of actions by continuations."""
    found = benefit(list(values.mean(1)), [tuple(each) for each in values], corrected)
    assert found is not None
    return found


def test_benefit_is_the_variance_of_means_less_what_chance_adds():
    # Means 1, 3, 2: variance 1. Within (ddof 1): (0, 2) 2, (2, 4) 2, (2, 2) 0; mean 4/3, over M = 2: 2/3.
    values = [(0.0, 2.0), (2.0, 4.0), (2.0, 2.0)]
    assert benefit([1, 3, 2], values) == pytest.approx(1 / 3)
    assert benefit([1, 3, 2], values, corrected=False) == pytest.approx(1.0)


def test_an_action_that_lost_continuations_counts_with_those_it_has():
    # (1, 3, 5): s² 4 over 3; (2,): as the other, 4 over 1; the mean of both 8/3. Means 3, 2: variance 1/2.
    assert benefit([3, 2], [(1.0, 3.0, 5.0), (2.0,)]) == pytest.approx(0.5 - 8 / 3)


@pytest.mark.parametrize("values", [[(1.0, 2.0)], [(1.0,), (2.0,)], []])
def test_nothing_to_compare_or_to_correct_by_is_no_benefit(values: list[tuple[float, ...]]):
    assert benefit([sum(v) / len(v) for v in values], values) is None


@pytest.mark.parametrize(("actions", "continuations"), [(5, 2), (4, 3), (8, 2)])
def test_where_all_actions_are_equal_it_averages_zero(actions: int, continuations: int):
    rng = np.random.default_rng(actions * 10 + continuations)
    drawn = rng.normal(2.0, 3.0, (4000, actions, continuations))
    found = [estimate(values) for values in drawn]
    plain = [estimate(values, corrected=False) for values in drawn]
    assert abs(np.mean(found)) <= 4 * np.std(found) / 4000**0.5
    assert np.mean(plain) == pytest.approx(9.0 / continuations, rel=0.05)  # σ²/M of nothing but luck
    assert 0.4 < np.mean(np.array(found) > 0) < 0.6


def test_it_estimates_the_variance_of_what_actions_are_worth():
    worth, rng = np.array([0.0, 1.0, 2.0, 3.0]), np.random.default_rng(3)
    drawn = worth[None, :, None] + rng.normal(0, 2.0, (4000, 4, 2))
    found = [estimate(values) for values in drawn]
    assert abs(np.mean(found) - worth.var(ddof=1)) <= 4 * np.std(found) / 4000**0.5


def group(name: str, rewards: tuple[float, ...], slot: int = 0, superstep: int = 1, role: str = "a") -> Any:
    """A group of one context with the entrants that form it, each with a value a reward."""
    path = (Step("", name, 1),)
    entrants = []
    for i, reward in enumerate(rewards):
        turn = Turn(
            id=f"{slot}{name}{i}", path=path, node=name, role=role, member=role, policy=role,
            superstep=superstep, messages=(), text="", value=None, ok=True, outcome="ok", reply_tokens=1,
        )  # fmt: skip
        entrants.append(Entrant(turn, f"{slot}/{i}", slot, f"t{slot}", reward, values=(reward,)))
    turns = tuple(e.turn.id for e in entrants)
    return Group((slot, f"t{slot}", role, path), turns, rewards, (0.0,) * len(rewards), True), entrants


def picked(groups: list[Any], k: Any, **options: Any) -> list[str]:
    entrants = [e for _, each in groups for e in each]
    found = choose([g for g, _ in groups], entrants, k, **{"corrected": False, **options})
    return [one.node for one in found if one.selected]


ONE = [
    group("flat", (1.0, 1.0)),
    group("little", (0.0, 1.0), superstep=2),
    group("much", (0.0, 3.0), superstep=3),
    group("some", (0.0, 2.0), superstep=4),
]


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, ["much"]),
        (2, ["much", "some"]),
        (9, ["little", "much", "some"]),  # never one without a benefit
        ("all", ["little", "much", "some"]),
        (0.25, ["much"]),
        (0.3, ["much", "some"]),  # 1.2 groups, rounded up
    ],
)
def test_the_k_largest_above_zero_are_selected(k: Any, expected: list[str]):
    assert picked(ONE, k) == expected


def test_a_tie_goes_to_the_earlier_turn():
    later, earlier = group("later", (0.0, 1.0), superstep=5), group("earlier", (0.0, 1.0), superstep=2)
    assert picked([later, earlier], 1) == ["earlier"]


def test_k_is_of_each_task_or_of_the_step():
    two = [group("p", (0.0, 1.0)), group("q", (0.0, 3.0)), group("r", (0.0, 2.0), slot=1)]
    assert picked(two, 1) == ["q", "r"]
    assert picked(two, 1, scope="batch") == ["q"]
    assert picked(two, 2, scope="batch") == ["q", "r"]


def test_roles_on_another_scale_are_compared_by_their_range():
    big = group("big", (0.0, 10.0, 5.0), role="b")  # variance 25, range 10: .25
    small = group("small", (0.0, 1.0, 1.0))  # variance 1/3, range 1: .33
    assert picked([big, small], 1) == ["big"]
    assert picked([big, small], 1, normalize="role_range") == ["small"]


def test_rows_of_other_groups_are_left_out_and_all_counts_stay():
    groups = [group("much", (0.0, 3.0)), group("little", (0.0, 1.0), role="b")]
    rows = {
        e.turn.policy: [TrainRow(x.turn.id, x.turn.policy, 1.0, 0.125, 0, 1.0) for x in each]
        for _, each in groups
        for e in each
    }
    batch = Batch(rows, [g for g, _ in groups], {"rows": 4.0}, {"a": 2, "b": 2})
    chosen = choose(batch.groups, [e for _, each in groups for e in each], 1, corrected=False)
    left = selected(batch, chosen, 7)
    assert left.rows == {"a": rows["a"]} and left.trainable_members == {"a": 2, "b": 2}
    assert summary(chosen) == {
        "groups": 2,
        "selected": 1,
        "roles": {
            "a": {"groups": 1, "selected": 1, "benefit": 4.5},
            "b": {"groups": 1, "selected": 0, "benefit": 0.5},
        },
        "nodes": {
            "little": {"groups": 1, "selected": 0, "benefit": 0.5},
            "much": {"groups": 1, "selected": 1, "benefit": 4.5},
        },
    }
    none = selected(batch, choose(batch.groups, [e for _, each in groups for e in each], 1), 7)
    assert not none.rows and "step 7: top_k selected none of 2 groups" in none.warnings[0]
