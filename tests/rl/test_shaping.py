"""What long replies pay, by hand; baselines over a role's whole batch."""

import numpy as np
import pytest

from masflow.rl.advantages import batch_norm
from masflow.rl.groups import entrants_of, learnable_slots, make_groups
from masflow.rl.shaping import overlong
from masflow.spec.experiment import Algorithm, Dynamic, Overlong
from masflow.trace import Scored


@pytest.mark.parametrize(
    ("tokens", "cost"),
    [(1, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (99, 0.95), (100, 1.0)],
)
def test_the_last_fifth_of_the_budget_costs_linearly_more(story, tokens, cost):
    """Eq. 13 with L_max = 100 and L_cache = 20: (|y| - 80) / 20."""
    turn = story().say("planner", tokens=tokens)
    assert overlong(Overlong(), turn, 100) == pytest.approx(cost)
    assert overlong(Overlong(penalty=0.5), turn, 100) == pytest.approx(cost / 2)


def test_the_cache_may_be_given_and_is_at_most_the_budget(story):
    turn = story().say("planner", tokens=60)
    assert overlong(Overlong(cache=50), turn, 100) == pytest.approx(0.2)
    assert overlong(Overlong(cache=900), turn, 100) == pytest.approx(0.6)
    assert overlong(Overlong(), story().say("planner", tokens=1), 1) == 1.0


def test_a_reply_that_was_cut_costs_all_of_it(story):
    assert overlong(Overlong(), story().say("planner", tokens=3, outcome="truncated"), 100) == 1.0


def scored(story, *episodes):
    """`episodes`: (slot, sample, {role: (reward, tokens)})."""
    found = []
    for slot, sample, turns in episodes:
        one, totals = story(slot, sample), {}
        for role, (reward, tokens) in turns.items():
            totals[one.say(role, tokens=tokens).id] = reward
        found.append(Scored(one.end(), {}, totals, {}))
    return found


def test_rewards_are_shaped_before_they_are_compared(plan, story):
    """The roles' budget is 256 and the cache 51: 256 tokens cost 1. Rewards 1 and 1 become 1 and 0, whose
    mean is 1/2."""
    found = scored(story, (0, 0, {"planner": (1.0, 10)}), (0, 1, {"planner": (1.0, 256)}))
    long = plan(algorithm=Algorithm(advantage="group_mean", overlong=Overlong()))
    [group] = make_groups(long, entrants_of(long, found))
    assert group.rewards == (1.0, 0.0) and group.advantages == (0.5, -0.5)
    off = plan(algorithm=Algorithm(use="dapo", overlong=Overlong(penalty=0.0)))
    [group] = make_groups(off, entrants_of(off, found))
    assert group.rewards == (1.0, 1.0) and not group.learnable


def test_batch_norm_weighs_turns_by_their_tokens():
    """Tokens 1, 1, 2 with 0, 1, 1: mean 3/4, variance 3/16."""
    found = batch_norm(np.array([0.0, 1.0, 1.0]), np.array([1.0, 1.0, 2.0]))
    std = np.sqrt(3 / 16)
    np.testing.assert_allclose(found, [-0.75 / std, 0.25 / std, 0.25 / std], rtol=1e-6)
    assert not batch_norm(np.full(3, 0.1 + 0.2), np.ones(3)).any()


def test_a_role_is_compared_with_itself_in_all_tasks_and_with_no_other_role(plan, story):
    """The planner: 0 and 1 at equal lengths, ±1; the answerer's scale of 100 changes nothing."""
    found = scored(
        story,
        (0, 0, {"planner": (0.0, 5), "answerer": (100.0, 5)}),
        (1, 0, {"planner": (1.0, 5), "answerer": (300.0, 5)}),
    )
    whole = plan(algorithm=Algorithm(use="reinforce_pp"))
    groups = make_groups(whole, entrants_of(whole, found))
    assert [(g.key[2], g.rewards) for g in groups] == [("planner", (0.0, 1.0)), ("answerer", (100.0, 300.0))]
    for group in groups:
        assert group.advantages == pytest.approx((-1.0, 1.0))


def test_a_task_is_learnable_when_one_role_of_it_is(plan, story):
    found = scored(
        story,
        (0, 0, {"planner": (1.0, 5), "answerer": (1.0, 5)}),
        (0, 1, {"planner": (1.0, 5), "answerer": (1.0, 5)}),
        (3, 0, {"planner": (1.0, 5), "answerer": (1.0, 5)}),
        (3, 1, {"planner": (1.0, 5), "answerer": (0.0, 5)}),
        (7, 0, {"planner": (1.0, 5)}),
    )
    assert learnable_slots(plan(algorithm=Algorithm(dynamic=Dynamic())), found) == [3]
