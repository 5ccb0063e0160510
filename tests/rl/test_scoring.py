"""Where and when rewards are called: apart from the run, many at once, while others play."""

import os
import random
import threading
import time

import pytest

from masflow.compiler.graph import FunctionIR, RewardIR
from masflow.errors import RunError
from masflow.rl.functions import Verdict
from masflow.rl.score import Focus, Scoring, score

FUNCTIONS = '''
import os, random, sys, time

CALLS = []

def told(x, trajectory=None):
    return float(x)

def naps(x):
    time.sleep(x)
    return x

def where(x):
    return float(os.getpid())

def leaves(x):
    if x == 2:
        os._exit(1)
    return x

def draws(x):
    return random.random()

def touches(words, trajectory):
    words.append("more")
    trajectory.output["answer"] = "changed"
    trajectory.names["gold"] = "changed"
    return len(words) + len(trajectory.turns)

def ranks(x):
    """Of all places at once: how many are smaller."""
    return [sum(other < one for other in x) for one in x]

def batch_of(x, trajectory, turn):
    assert len(x) == len(trajectory) == len(turn)
    return [1000 * len(x) + 100 * t.key.sample + len(u.text) for t, u in zip(trajectory, turn)]

def batch_ends(x):
    return [{1: 10.0, 2: None, 3: 30.0}[n] for n in x]

def too_few(x):
    return x[1:]

def breaks(x):
    raise ValueError("no luck")

def totals(trajectory):
    return [{turn.id: float(turn.value) for turn in one.turns} for one in trajectory]
'''


@pytest.fixture
def calls(tmp_path):
    """`calls(name, function, **fields)`: a reward of one of FUNCTIONS."""
    (tmp_path / "apart.py").write_text(FUNCTIONS)

    def make(name, function, **fields):
        return RewardIR(name, FunctionIR(f"{tmp_path}/apart.py:{function}"), **fields)

    return make


def episodes(story, *values, outcome="ok", **names):
    """One episode of one planner's turn a value, which its names say too."""
    found = []
    for sample, value in enumerate(values):
        one = story(sample=sample, names={"value": value, **names})
        one.say("planner", value)
        found.append(one.end(outcome))
    return found


def rewards(plan, played, **more):
    return [next(iter(one.totals.values())) for one in score(plan, played, **more)]


VALUE = {"x": "{{ value }}"}


def test_functions_run_in_a_process_of_their_own_unless_told_not_to(plan, calls, story):
    (apart,) = rewards(plan(calls("r", "where", args=VALUE)), episodes(story, 1))
    (here,) = rewards(plan(calls("r", "where", args=VALUE, isolate=False)), episodes(story, 1))
    assert here == os.getpid() != apart


@pytest.mark.parametrize("isolate", [True, False])
def test_arguments_and_trajectory_are_copies(plan, calls, story, isolate):
    each = [calls(n, "touches", args={"words": "{{ words }}"}, isolate=isolate) for n in ("a", "b")]
    (played,) = episodes(story, 1, words=["one"], gold="g")
    (found,) = score(plan(*each), [played])
    assert found.metrics == {"a": 3, "b": 3}
    assert (played.output, played.names["gold"], played.names["words"]) == ({}, "g", ["one"])


def test_the_runs_random_state_is_not_touched_and_draws_repeat(plan, calls, story):
    drawn = plan(calls("r", "draws", args=VALUE))
    state = random.getstate()
    first = rewards(drawn, episodes(story, 1, 2, 3))
    assert random.getstate() == state
    assert len(set(first)) == 3
    assert rewards(drawn, episodes(story, 1, 2, 3)[::-1]) == first[::-1]


def test_an_episode_whose_reward_ends_its_process_is_unscored_and_the_others_are_not(plan, calls, story):
    found = score(plan(calls("r", "leaves", args=VALUE)), episodes(story, 1, 2, 3))
    assert [one.metrics["r"] for one in found] == [1, None, 3]
    assert [list(one.totals.values()) for one in found] == [[1], [None], [3]]
    assert found[1].failures[0].endswith("apart.py:leaves: ended its process with exit code 1")
    assert found[0].failures == found[2].failures == ()


def test_an_argument_that_cannot_travel_is_unscored_and_says_so(plan, calls, story):
    (found,) = score(
        plan(calls("r", "told", args={"x": "{{ lock }}"})), episodes(story, 1, lock=threading.Lock())
    )
    assert found.metrics == {"r": None}
    assert "an argument can't be sent to the function's process" in found.failures[0]


def test_a_file_that_is_not_there_any_more_stops_the_run(plan, calls, story, tmp_path):
    gone = RewardIR("r", FunctionIR(f"{tmp_path}/gone.py:f"), args=VALUE)
    with pytest.raises(RunError, match=r"can't load .*gone\.py"):
        score(plan(gone), episodes(story, 1))


# batch: true. Values 5, 1, 3: two are smaller than 5, none than 1, one than 3.


@pytest.mark.parametrize("isolate", [True, False])
def test_a_batch_reward_is_one_call_for_all_trajectories(plan, calls, story, isolate):
    ranks = plan(calls("r", "ranks", args=VALUE, batch=True, isolate=isolate))
    assert rewards(ranks, episodes(story, 5, 1, 3)) == [2, 0, 1]
    assert rewards(ranks, episodes(story, 5)) == [0]
    assert score(ranks, []) == []


@pytest.mark.parametrize("isolate", [True, False])
def test_a_batch_reward_of_turns_sees_all_turns_of_all_trajectories(plan, calls, story, isolate):
    one, two = story(sample=0), story(sample=1)
    for value in (5, 11):
        one.say("planner", value)
    two.say("planner", 333)
    each = calls("r", "batch_of", level="turn", args={"x": "{{ result }}"}, batch=True, isolate=isolate)
    found = score(plan(each), [one.end(), two.end()])
    # 3 places; sample 0 or 1; "5", "11", "333"
    assert [list(s.totals.values()) for s in found] == [[3001, 3002], [3103]]
    assert [s.metrics["r"] for s in found] == [3001.5, 3103]


def test_places_where_it_does_not_apply_or_that_get_otherwise_are_not_in_the_lists(plan, calls, story):
    ranks = calls("r", "ranks", args=VALUE, batch=True, otherwise=-1.0, when="value != 3")
    assert rewards(plan(ranks), episodes(story, 5, None, 3, 4)) == [1, -1, None, 0]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    ("function", "values", "reason"),
    [
        ("too_few", [None] * 3, "gave 2 values for 3; with 'batch: true' it gives one each, in order"),
        ("told", [None] * 3, "TypeError"),
        ("breaks", [None] * 3, "ValueError: no luck"),
        ("batch_ends", [10, None, 30], None),
    ],
)
def test_a_batch_that_fails_is_unscored_for_all_and_null_for_one_is_no_failure(
    plan, calls, story, function, values, reason, isolate
):
    wrong = calls("r", function, args=VALUE, batch=True, isolate=isolate)
    good = calls("good", "told", args=VALUE)
    found = score(plan(wrong, good), episodes(story, 1, 2, 3))
    assert [one.metrics["r"] for one in found] == values
    assert [one.metrics["good"] for one in found] == [1, 2, 3]
    for one in found:
        assert bool(one.failures) == bool(reason)
        assert (reason or "") in "".join(one.failures)


def test_an_allocator_may_be_a_batch_too(plan, calls, story):
    each = plan(calls("r", "totals", level="turn", allocator=True, batch=True))
    assert rewards(each, episodes(story, 5, 1)) == [5, 1]


def test_a_batch_reward_may_be_measured(plan, calls, story):
    episode = story(names={})
    for value in (5, 1, 3):
        episode.say("planner", value)
    gains = calls(
        "r", "ranks", batch=True, measure_after=("planner",), measure_args={"x": "{{ result }}"},
        pay=(("planner", "gain"),), level="turn",
    )  # fmt: skip
    (found,) = score(plan(gains), [episode.end()])
    assert list(found.totals.values()) == [2, -2, 1]  # ranks 2, 0, 1


# while others play


def test_rewards_that_begin_early_in_any_order_give_the_same(plan, calls, story):
    each = plan(
        calls("own", "told", level="turn", args={"x": "{{ result }}"}),
        calls("drawn", "draws", args=VALUE),
        calls("rank", "ranks", args=VALUE, batch=True),
        calls("here", "told", args=VALUE, isolate=False),
        calls("bad", "leaves", args=VALUE, weight=0.0),
        credit="return_to_go",
    )
    played = episodes(story, 1, 2, 3, 4)
    after = score(each, played)
    with Scoring(each) as scoring:
        for i in (2, 0, 3):  # the last one hasn't begun when all are asked for
            scoring.begin(played[i])
        assert scoring.finish(played) == after
    assert [one.metrics["bad"] for one in after] == [1, None, 3, 4]


def test_a_slow_reward_is_hidden_behind_the_episodes_that_still_play(plan, calls, story):
    slow = plan(calls("r", "naps", args=VALUE))
    played = episodes(story, 0.3, 0.3, 0.3)
    with Scoring(slow) as scoring:
        for one in played:
            scoring.begin(one)
            time.sleep(0.35)  # the rollout of those that still play
        began = time.perf_counter()
        found = scoring.finish(played)
        waited_s = time.perf_counter() - began
    assert [one.metrics["r"] for one in found] == [0.3] * 3
    assert scoring.seconds["rewards_s"] >= 0.9
    saved_s = scoring.seconds["rewards_s"] - scoring.seconds["rewards_waited_s"]
    assert waited_s < 0.3
    assert saved_s > 0.6


def test_work_that_nobody_waits_for_does_not_begin(plan, calls, story, tmp_path):
    slow = plan(calls("r", "naps", args=VALUE))
    with pytest.raises(KeyboardInterrupt), Scoring(slow) as scoring:
        for one in episodes(story, *[0.2] * 40):
            scoring.begin(one)
        raise KeyboardInterrupt
    began = time.perf_counter()
    assert rewards(plan(calls("r", "told", args=VALUE)), episodes(story, 1)) == [1]
    assert time.perf_counter() - began < 2.0


def test_a_focus_asks_only_for_what_reaches_its_turn(plan, calls, story):
    episode = story(names={})
    turns = [episode.say("planner", value) for value in (5, 1, 3)]
    each = plan(calls("r", "ranks", level="turn", args={"x": "{{ result }}"}, batch=True))
    played = episode.end()
    found = score(each, [played, played], focus=[Focus(turns[0].id), Focus(turns[2].id)])
    # 5 and 3 are asked for: one is smaller than 5, none than 3
    assert [one.totals[turn.id] for one, turn in zip(found, (turns[0], turns[2]), strict=True)] == [1, 0]


# judges


def test_a_judge_that_fails_on_one_question_leaves_that_one_unscored(plan, calls, story):
    judged = plan(
        RewardIR("j", None, judge="critic", args={"text": "{{ value }}"}),
        calls("told", "told", args=VALUE),
    )

    def judge(questions):
        assert [q.args["text"] for q in questions] == [1, 2, 3]  # one batch, in the trajectories' order
        return [Verdict(None, "no answer") if q.args["text"] == 2 else Verdict(0.5) for q in questions]

    played = episodes(story, 1, 2, 3)
    with Scoring(judged) as scoring:
        for one in reversed(played):
            scoring.begin(one)
        found = scoring.finish(played, judge)
    assert [list(one.totals.values()) for one in found] == [[1.5], [None], [3.5]]
    assert [one.failures for one in found] == [(), ("reward j: no answer",), ()]
