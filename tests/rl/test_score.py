"""Rewards of trajectories written down by hand; every number was worked out on paper, beside the case."""

import pytest

from masflow.errors import RunError
from masflow.rl.functions import Verdict
from masflow.rl.score import Focus, score


def scored(plan, trajectory, **more):
    return score(plan, [trajectory], **more)[0]


def totals(plan, trajectory):
    found = scored(plan, trajectory)
    return [found.totals[t.id] for t in trajectory.turns]


ANSWER = {"prediction": "{{ answerer }}", "gold": "{{ gold }}"}


def qa(story, answer, gold="b", **names):
    episode = story(names={"gold": gold, **names})
    episode.say("planner", "a")
    episode.say("answerer", answer)
    return episode


def test_a_trajectory_reward_goes_to_every_turn(plan, reward, story):
    exact = reward("exact", "same", args=ANSWER)
    assert totals(plan(exact), qa(story, "b").end()) == [1, 1]
    assert scored(plan(exact), qa(story, "x").end()).metrics == {"exact": 0}


def test_to_pays_only_the_named_roles_and_the_others_have_no_total(plan, reward, story):
    assert totals(plan(reward("exact", "same", args=ANSWER, to=("answerer",))), qa(story, "b").end()) == [
        None,
        1,
    ]


def test_a_role_reward_goes_to_the_roles_turns(plan, reward, story):
    episode = qa(story, "b")
    episode.say("planner", "again")
    rewards = reward("plan", "same", level="role", roles=("planner",), args=ANSWER)
    assert totals(plan(rewards), episode.end()) == [1, None, 1]


def test_a_turn_reward_sees_its_own_result_and_the_names_at_that_turn(plan, reward, story):
    episode = story()
    for n in (3, 5):
        episode.names["counter"] = n
        episode.say("planner", n)
    own = reward("own", "number", level="turn", args={"x": "{{ result * 10 + counter }}"})
    assert totals(plan(own), episode.end()) == [33, 55]
    assert scored(plan(own), episode.end()).metrics == {"own": 44}


def test_nodes_and_when_select_turns(plan, reward, story):
    episode = story()
    episode.say("planner", 1)
    episode.say("planner", 2, node="replan")
    episode.say("planner", 3, node="replan")
    at = reward("x", "number", level="turn", nodes=("replan",), when="result > 2", args={"x": "{{ result }}"})
    assert totals(plan(at), episode.end()) == [None, None, 3]


def test_weights_add_up_and_weight_zero_is_only_a_metric(plan, reward, story):
    rewards = (
        reward("exact", "same", args=ANSWER, weight=2.0),
        reward("form", None, level="turn", weight=0.5),
        reward("seen", "same", args={"prediction": "{{ planner }}", "gold": "a"}, weight=0.0),
    )
    episode = qa(story, "b")
    episode.say("planner", None, ok=False)
    found = scored(plan(*rewards), episode.end())
    assert list(found.totals.values()) == [2, 2, 1.5]
    assert found.metrics == {"exact": 1, "form": pytest.approx(-1 / 3), "seen": None}
    assert found.components[episode.turns[2].id] == {"exact": 1, "form": -1, "seen": None}


def test_a_role_with_metrics_only_has_no_total(plan, reward, story):
    assert totals(plan(reward("m", "same", args=ANSWER, weight=0.0)), qa(story, "b").end()) == [None, None]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("breaks", "ValueError: no luck"),
        ("hangs", "OutOfTime: no result within 0.05 s"),
        ("strange", "gave 'good'; a reward is a finite number"),
        ("infinite", "gave inf; a reward is a finite number"),
        ("enormous", "gave 1e+308; a reward is a finite number"),
        ("huge", "gave 10000000000"),
        ("several", "gave several; a reward"),
        ("missing", "has no 'missing'"),
    ],
)
def test_silent_failures__default_reward_0_on_an_exception__is_unscored_with_the_reason(
    plan, reward, story, function, reason
):
    good = reward("good", "same", args=ANSWER)
    bad = reward("bad", function, args={"x": 1}, timeout_s=0.05, otherwise=0.0)
    if function == "missing":
        with pytest.raises(Exception, match="missing"):
            scored(plan(good, bad), qa(story, "b").end())
        return
    found = scored(plan(good, bad), qa(story, "b").end())
    assert set(found.totals.values()) == {None}
    assert all(c == {"good": 1, "bad": None} for c in found.components.values())
    assert len(found.failures) == 1
    assert reason in found.failures[0]
    assert found.failures[0].startswith("reward bad: ")


def test_a_function_that_changes_what_it_is_given_changes_nothing(plan, reward, story):
    meddling = (reward(name, "meddles", args={"words": "{{ words }}"}) for name in ("first", "second"))
    episode = qa(story, "b", words=["one"]).end()
    output = dict(episode.output)
    assert scored(plan(*meddling), episode).metrics == {"first": 2, "second": 2}
    assert episode.output == output


def test_a_failing_template_is_unscored_with_the_reason(plan, reward, story):
    found = scored(plan(reward("r", "number", args={"x": "{{ 1 / (n - n) }}"})), qa(story, "b", n=1).end())
    assert set(found.totals.values()) == {None}
    assert "args: " in found.failures[0]


def test_a_function_may_decline_with_null_and_nothing_is_called_a_failure(plan, reward, story):
    found = scored(plan(reward("r", "null", args={"x": 1})), qa(story, "b").end())
    assert (set(found.totals.values()), found.failures) == ({None}, ())


def test_otherwise_is_paid_when_an_argument_is_null_because_the_episode_ended_early(plan, reward, story):
    episode = story(names={"gold": "b"})
    episode.say("planner", None, ok=False)
    assert totals(plan(reward("r", "same", args=ANSWER, otherwise=0.0)), episode.end("malformed")) == [0]
    assert totals(plan(reward("r", "same", args=ANSWER)), episode.end("malformed")) == [None]


def test_a_nullable_argument_is_the_functions_own_business_when_nothing_went_wrong(plan, reward, story):
    maybe = reward("r", "maybe", args={"x": "{{ note }}"}, nullable=("x",), otherwise=0.0)
    assert totals(plan(maybe), qa(story, "b", note=None).end()) == [1, 1]
    assert totals(plan(maybe), qa(story, "b", note=None).end("limit")) == [0, 0]
    strict = reward("r", "maybe", args={"x": "{{ note }}"}, otherwise=0.0)
    assert totals(plan(strict), qa(story, "b", note=None).end()) == [0, 0]


def test_functions_may_be_async_and_may_ask_for_turn_and_trajectory(plan, reward, story):
    episode = qa(story, "bbb").end()
    assert totals(plan(reward("r", "later", args={"x": 3})), episode) == [1.5, 1.5]
    assert totals(plan(reward("r", "length", level="turn")), episode) == [1, 3]
    assert totals(plan(reward("r", "count")), episode) == [2, 2]


def test_an_allocator_says_itself_who_gets_what(plan, reward, story):
    episode = qa(story, "b")
    episode.say("planner", None, ok=False)
    found = scored(plan(reward("r", "shares", level="turn", allocator=True)), episode.end())
    assert list(found.totals.values()) == [pytest.approx(1 / 3), pytest.approx(1 / 3), None]
    wrong = scored(plan(reward("r", "wrong_ids", level="turn", allocator=True)), episode.end())
    assert set(wrong.totals.values()) == {None}
    assert "pays '0', which is no turn's id" in wrong.failures[0]


def test_an_attempt_that_was_asked_again_gets_its_form_and_nothing_else(plan, reward, story):
    episode = story(names={"gold": "b"})
    episode.say("planner", None, ok=False, visit=1, last=False)
    episode.say("planner", "a", visit=1, attempt=1)
    episode.say("answerer", "b")
    rewards = (reward("exact", "same", args=ANSWER), reward("form", None, level="turn"))
    assert totals(plan(*rewards), episode.end()) == [-1, 1, 1]
    assert totals(plan(rewards[0]), episode.end()) == [None, 1, 1]


def test_every_model_call_of_a_react_visit_is_paid_what_the_visit_earned(plan, reward, story):
    episode = story()
    episode.say("searcher", {"call": 1}, visit=1, last=False)
    episode.say("searcher", "b", visit=1, model_call=1)
    r = reward("r", "same", level="turn", args={"prediction": "{{ result }}", "gold": "b"})
    found = scored(plan(r), episode.end())
    assert (list(found.totals.values()), found.metrics) == ([1, 1], {"r": 1})


def test_well_formed_at_the_other_levels_is_minus_one_when_any_turn_is_malformed(plan, reward, story):
    episode = qa(story, "b")
    episode.say("planner", None, ok=False)
    assert totals(plan(reward("f", None, level="role")), episode.end()) == [-1, 0, -1]
    assert totals(plan(reward("f", None, level="trajectory")), episode.end()) == [-1, -1, -1]


def test_a_judge_is_asked_with_the_rendered_args_and_missing_it_is_an_error(plan, reward, story):
    judged = reward("j", None, judge="critic", args={"text": "{{ answerer }}"})
    asked = []

    def judge(questions):
        asked.extend((q.role.name, q.args) for q in questions)
        return [Verdict(0.25)] * len(questions)

    found = scored(plan(judged), qa(story, "b").end(), judge=judge)
    assert list(found.totals.values()) == [0.25, 0.25]
    assert asked == [("critic", {"text": "b"})]
    silent = scored(
        plan(judged), qa(story, "b").end(), judge=lambda qs: [Verdict(None, "said nothing")] * len(qs)
    )
    assert (set(silent.totals.values()), silent.failures) == ({None}, ("reward j: said nothing",))
    with pytest.raises(RunError, match="judged by role 'critic', and no model can be asked here"):
        scored(plan(judged), qa(story, "b").end())


# measure and pay: an M-ASK episode. Quality after plan 0.2, after round 1's answer 0.5, after round 2's 0.4.


def f1(reward, **fields):
    return reward(
        "f1",
        "number",
        measure_after=("planner", "answerer"),
        measure_args={"x": "{{ result }}"},
        pay=(("planner", "value"), ("answerer", "value"), ("searcher", "gain"), ("critic", "gain")),
        **fields,
    )


def rounds(story, *qualities, last=None):
    episode = story()
    episode.say("planner", qualities[0])
    for quality in qualities[1:]:
        episode.say("searcher", "query")
        episode.do("retrieve", ["passage"])
        episode.say("critic", "note")
        episode.say("answerer", quality)
    if last:
        episode.say(last, "stop")
    return episode


def test_value_is_the_measurement_and_gain_the_step_that_follows(plan, reward, story):
    episode = rounds(story, 0.2, 0.5, 0.4, last="searcher").end()
    found = scored(plan(f1(reward)), episode)
    assert list(found.totals.values()) == pytest.approx([0.2, 0.3, 0.3, 0.5, -0.1, -0.1, 0.4, 0])
    assert found.metrics["f1"] == 0.4  # the last measurement


def test_before_the_first_measurement_stands_start(plan, reward, story):
    episode = story()
    episode.say("searcher", "q")
    episode.say("answerer", 0.5)
    assert totals(plan(f1(reward, start=0.1)), episode.end()) == pytest.approx([0.4, 0.5])


def test_a_malformed_measured_turn_measures_otherwise(plan, reward, story):
    episode = rounds(story, 0.2)
    episode.say("searcher", "q")
    episode.say("answerer", None, ok=False)
    assert totals(plan(f1(reward, otherwise=0.0)), episode.end("malformed")) == pytest.approx([0.2, -0.2, 0])
    assert totals(plan(f1(reward)), episode.end("malformed")) == [0.2, None, None]


def test_a_retried_measured_turn_is_measured_once_at_its_last_attempt(plan, reward, story):
    episode = rounds(story, 0.2)
    episode.say("searcher", "q")
    episode.say("answerer", None, ok=False, visit=1, last=False)
    episode.say("answerer", 0.6, visit=1, attempt=1)
    got = totals(plan(f1(reward, otherwise=0.0)), episode.end())
    assert got[:2] + got[3:] == pytest.approx([0.2, 0.4, 0.6])
    assert got[2] is None


def test_a_tool_may_be_measured_and_the_turn_before_it_gains(plan, reward, story):
    episode = story()
    episode.say("planner", "p")
    for rate in (0.25, 1.0):
        episode.say("searcher", "code")
        episode.do("verify", rate)
    gains = reward(
        "rate",
        "number",
        measure_after=("verify",),
        measure_args={"x": "{{ result }}"},
        pay=(("planner", "gain"), ("searcher", "gain")),
    )
    assert totals(plan(gains), episode.end()) == pytest.approx([0.25, 0.25, 0.75])


def test_a_failed_measurement_leaves_only_those_that_hang_on_it_unscored(plan, reward, story):
    episode = rounds(story, 0.2, "?", 0.4).end()
    assert totals(plan(f1(reward)), episode) == [0.2, None, None, None, None, None, 0.4]


# return to go, on paper: supersteps 1, 2, 3; turn rewards 1, 2, 4; trajectory reward 8; discount 1/2


def test_return_to_go_adds_later_supersteps_and_the_trajectory_discounted(plan, reward, story):
    episode = story()
    for role, value in (("planner", 1), ("searcher", 2), ("answerer", 4)):
        episode.say(role, value)
    rewards = (
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        reward("team", "number", args={"x": 8}),
    )
    made = plan(*rewards, credit="return_to_go", discount=0.5)
    # planner 1 + 2/2 + 4/4 + 8/4 = 5; searcher 2 + 4/2 + 8/2 = 8; answerer 4 + 8 = 12
    assert totals(made, episode.end()) == [5, 8, 12]
    # own credit: 1 + 8, 2 + 8, 4 + 8
    assert totals(plan(*rewards), episode.end()) == [9, 10, 12]


def test_concurrent_turns_are_not_later_than_each_other(plan, reward, story):
    episode = story()
    episode.say("planner", 1)
    episode.say("searcher", 2)
    episode.say("critic", 4, at_once=True)
    own = reward("own", "number", level="turn", args={"x": "{{ result }}"})
    assert totals(plan(own, credit="return_to_go"), episode.end()) == [7, 2, 4]


def test_a_null_later_on_makes_the_returns_before_it_null(plan, reward, story):
    episode = story()
    for value in (1, "?", 4):
        episode.say("planner", value)
    own = reward("own", "number", level="turn", args={"x": "{{ result }}"})
    assert totals(plan(own, credit="return_to_go"), episode.end()) == [None, None, 4]


# a visit of several model calls under return to go: its reward is one reward, due when the visit ends


def test_the_reward_of_a_visit_of_several_calls_flows_back_once(plan, reward, story):
    episode = story()
    episode.say("searcher", {"call": 1}, visit=1, last=False)
    episode.say("searcher", {"call": 2}, visit=1, model_call=1, last=False)
    episode.say("searcher", 4, visit=1, model_call=2)
    episode.say("answerer", 8)
    rewards = (
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        reward("form", None, level="turn", weight=0.5),
    )
    # calls of one visit: 4/4 + 8/8 = 2, 4/2 + 8/4 = 4, 4 + 8/2 = 8; whoever calls more often earns no more
    found = scored(plan(*rewards, credit="return_to_go", discount=0.5), episode.end())
    assert list(found.totals.values()) == [2, 4, 8, 8]
    assert [c["own"] for c in found.components.values()] == [4, 4, 4, 8]
    assert totals(plan(*rewards, credit="return_to_go"), episode.end()) == [12, 12, 12, 8]
    assert totals(plan(*rewards), episode.end()) == [4, 4, 4, 8]
    focus = [Focus(episode.turns[0].id, is_local=True)]  # left after the visit: what it pays by itself
    local = scored(plan(*rewards, credit="return_to_go"), episode.end(), focus=focus)
    assert local.totals[episode.turns[0].id] == 4


def test_under_return_to_go_the_form_of_every_call_counts_for_itself(plan, reward, story):
    episode = story()
    episode.say("searcher", None, ok=False, visit=1, last=False)
    episode.say("searcher", 4, visit=1, model_call=1)
    form = reward("form", None, level="turn")
    assert totals(plan(form, credit="return_to_go"), episode.end()) == [-1, 0]


def test_measurements_at_once_come_in_the_order_of_their_items_not_of_their_digits(plan, reward, story):
    episode = story()
    for item in range(12):  # the last of them is item 11, and not item 9
        episode.say("planner", float(item), item=item, visit=1, at_once=item > 0)
    episode.say("searcher", "q")
    episode.say("answerer", 20.0)
    gain = reward(
        "g", "number", measure_after=("planner", "answerer"), measure_args={"x": "{{ result }}"},
        pay=(("searcher", "gain"),),
    )  # fmt: skip
    assert totals(plan(gain), episode.end())[12] == 9  # 20 - 11
