"""Groups, weights and rows of a step, worked out by hand; some are named after what users ran into."""

import itertools
import math
from dataclasses import replace

import pytest

from masflow.rl.batch import build_batch
from masflow.rl.score import score
from masflow.spec.experiment import Algorithm, Kl
from masflow.trace import Step

MEAN = Algorithm(advantage="group_mean")


def batch_of(plan, episodes, num_episodes=None, step=1):
    return build_batch(plan, score(plan, episodes), num_episodes or len(episodes), step)


def team(plan, reward, **more):
    """Every turn of an episode is paid the `pay` of its story."""
    return plan(reward("team", "number", args={"x": "{{ pay }}"}), **{"algorithm": MEAN, **more})


def episodes_of(story, *pays, slot=0, turns=("planner", "answerer"), tokens=10):
    found = []
    for sample, pay in enumerate(pays):
        episode = story(slot=slot, sample=sample, names={"pay": pay})
        for role in turns:
            episode.say(role, "x", tokens=tokens)
        found.append(episode.end())
    return found


def by_turn(batch):
    return {row.turn_id: row for rows in batch.rows.values() for row in rows}


def push(batch, turns):
    """Σ token_weight · tokens · advantage: how far the update pushes these turns' replies."""
    rows = by_turn(batch)
    return sum(rows[t.id].token_weight * t.reply_tokens * rows[t.id].advantage for t in turns if t.id in rows)


def test_groups_are_task_role_and_path(plan, reward, story):
    episodes = [*episodes_of(story, 1, 0), *episodes_of(story, 0, 0, slot=1)]
    batch = batch_of(team(plan, reward), episodes)
    keys = [(g.key[0], g.key[2], len(g.turns), g.learnable) for g in batch.groups]
    assert keys == [
        (0, "planner", 2, True),
        (0, "answerer", 2, True),
        (1, "planner", 2, False),
        (1, "answerer", 2, False),
    ]
    assert batch.stats["learnable_group_frac"] == 0.5
    assert batch.stats["flat_groups"] == 2
    assert [row.advantage for row in batch.rows["policy"]] == [0.5, 0.5, -0.5, -0.5]


def test_copies_are_compared_item_by_item_and_family_members_by_name(plan, reward, story):
    episodes = []
    for sample, pay in enumerate((1, 0)):
        episode = story(sample=sample, names={"pay": pay})
        for item in (0, 1):
            episode.say("answerer", "x", item=item, visit=1, member=f"answerer_{item}", at_once=item == 1)
        episode.say("critic", "x", member=("ann", "bob")[sample])
        episodes.append(episode.end())
    batch = batch_of(team(plan, reward), episodes)
    assert [(g.key[2], len(g.turns)) for g in batch.groups] == [
        ("answerer_0", 2),
        ("answerer_1", 2),
        ("ann", 1),
        ("bob", 1),
    ]


def test_weights_are_one_over_episodes_and_tokens_of_the_turn(plan, reward, story):
    episodes = episodes_of(story, 1, 0, tokens=4)
    assert {r.token_weight for r in by_turn(batch_of(team(plan, reward), episodes)).values()} == {1 / (2 * 4)}


def test_turn_loss_sum_divides_by_a_constant_length(plan, reward, story):
    episodes = episodes_of(story, 1, 0, tokens=4)
    budget = team(plan, reward, algorithm=Algorithm(advantage="group_mean", turn_loss="sum"))
    assert {r.token_weight for r in by_turn(batch_of(budget, episodes)).values()} == {1 / (2 * 256)}
    constant = team(plan, reward, algorithm=Algorithm(advantage="group_mean", turn_loss="sum", sum_length=50))
    assert {r.token_weight for r in by_turn(batch_of(constant, episodes)).values()} == {1 / (2 * 50)}


def test_token_mean_counts_the_tokens_of_the_policys_mini_batch(plan, reward, story):
    made = team(
        plan, reward, algorithm=Algorithm(advantage="group_mean", weight="token_mean", updates_per_step=2)
    )
    episodes = [*episodes_of(story, 1, 0, tokens=4), *episodes_of(story, 1, 0, slot=1, tokens=6)]
    rows = batch_of(made, episodes).rows["policy"]
    assert [(r.minibatch, r.token_weight) for r in rows] == [(0, 1 / 16)] * 4 + [(1, 1 / 24)] * 4


def test_episode_mean_divides_by_the_episodes_own_tokens(plan, reward, story):
    made = team(plan, reward, algorithm=Algorithm(advantage="group_mean", weight="episode_mean"))
    short, long = story(names={"pay": 1}), story(sample=1, names={"pay": 0})
    short.say("planner", tokens=5)
    for _ in range(3):
        long.say("planner", tokens=10)
    batch = batch_of(made, [short.end(), long.end()])
    assert by_turn(batch)[short.turns[0].id].token_weight == 1 / (5 * 2)
    assert by_turn(batch)[long.turns[0].id].token_weight == 1 / (30 * 2)


def test_mini_batches_split_by_task_and_count_scheduled_episodes(plan, reward, story):
    made = team(plan, reward, algorithm=Algorithm(advantage="group_mean", updates_per_step=2))
    episodes = [e for slot in range(3) for e in episodes_of(story, 1, 0, slot=slot)]
    rows = batch_of(made, episodes).rows["policy"]
    # tasks 0 and 1 are the first mini-batch (4 of 6 episodes), task 2 the second (2 of 6)
    assert sorted((r.minibatch, r.token_weight) for r in rows) == [(0, 1 / 40)] * 8 + [(1, 1 / 20)] * 4


def test_negative_weight_scales_negative_advantages_and_zero_leaves_them_out(plan, reward, story):
    half = team(plan, reward, algorithm=Algorithm(advantage="group_mean", negative_weight=0.5))
    assert [r.advantage for r in batch_of(half, episodes_of(story, 1, 0)).rows["policy"]] == [
        0.5,
        0.5,
        -0.25,
        -0.25,
    ]
    none = team(plan, reward, algorithm=Algorithm(advantage="group_mean", negative_weight=0))
    assert [r.advantage for r in batch_of(none, episodes_of(story, 1, 0)).rows["policy"]] == [0.5, 0.5]


def test_rows_without_advantage_stay_only_where_kl_or_entropy_acts_on_them(plan, reward, story):
    flat = episodes_of(story, 1, 1)
    assert batch_of(team(plan, reward), flat).rows == {}
    kl = team(plan, reward, algorithm=Algorithm(advantage="group_mean", kl=Kl(weight=0.1)))
    assert [r.advantage for r in batch_of(kl, flat).rows["policy"]] == [0, 0, 0, 0]


def test_frozen_policies_have_no_rows_and_no_groups(plan, reward, story):
    made = team(plan, reward, policies={"policy": ("planner",), "frozen": ("answerer",)})
    episodes = []
    for sample, pay in enumerate((1, 0)):
        episode = story(sample=sample, names={"pay": pay})
        episode.say("planner")
        episode.say("answerer", policy="frozen")
        episodes.append(episode.end())
    batch = batch_of(made, episodes)
    assert (list(batch.rows), {g.key[2] for g in batch.groups}) == (["policy"], {"planner"})


def test_equal_input_gives_equal_batches(plan, reward, story):
    made = team(plan, reward, algorithm=Algorithm(updates_per_step=3))
    episodes = [e for slot in range(4) for e in episodes_of(story, 1, 0, 0.5, slot=slot)]
    assert batch_of(made, episodes) == batch_of(made, episodes)


# What users of such systems run into: grouping and credit


def test_grouping__longer_rollouts_count_twice__a_turn_weighs_the_same_whatever_its_episodes_length(
    plan, reward, story
):
    short = episodes_of(story, 1, turns=("planner",))[0]
    long = story(sample=1, names={"pay": 0})
    for _ in range(9):
        long.say("planner")
    batch = batch_of(team(plan, reward), [short, long.end()])
    first = [g for g in batch.groups if g.key[3][-1].visit == 1]
    assert [g.turns for g in first] == [(short.turns[0].id, long.turns[0].id)]
    rows = by_turn(batch)
    assert rows[short.turns[0].id].token_weight == rows[long.turns[0].id].token_weight
    assert all(g.singleton for g in batch.groups if g.key[3][-1].visit > 1)


def a_or_b(story):
    """A pays 0 in 2 turns or 1 in 10 (0.5 on average), B always 0.4 in 2: A is better."""
    found = {}
    for sample, (name, pay, turns) in enumerate(
        [("A0", 0.0, 2), ("A1", 1.0, 10), ("B", 0.4, 2), ("B'", 0.4, 2)]
    ):
        episode = story(sample=sample, names={"pay": pay})
        episode.say("planner", name)
        for _ in range(turns - 1):
            episode.say("answerer")
        found[name] = episode.end()
    return found


@pytest.mark.parametrize(
    ("weight", "push_a", "push_b"), [("episode", 0.025, -0.025), ("episode_mean", -0.0425, -0.0125)]
)
def test_grouping__weights_by_the_number_of_turns_have_the_wrong_sign(
    plan, reward, story, weight, push_a, push_b
):
    # mean 0.45: advantages -0.45, 0.55, -0.05, -0.05 on the first turn, E = 4.
    # episode: A (-0.45 + 0.55) / 4, B -0.1 / 4.
    # 1/N: A (-0.45 / 2 + 0.55 / 10) / 4, B (-0.1 / 2) / 4, so that the better A falls further.
    found = a_or_b(story)
    batch = batch_of(
        team(plan, reward, algorithm=Algorithm(advantage="group_mean", weight=weight)), list(found.values())
    )
    first = {name: episode.turns[0] for name, episode in found.items()}
    assert push(batch, [first["A0"], first["A1"]]) == pytest.approx(push_a)
    assert push(batch, [first["B"], first["B'"]]) == pytest.approx(push_b)


def test_grouping__wrong_ids_make_every_group_of_size_1__they_are_skipped_counted_and_warned_of(
    plan, reward, story
):
    episodes = [e for slot, pay in enumerate((1, 0, 1)) for e in episodes_of(story, pay, slot=slot)]
    batch = batch_of(team(plan, reward), episodes, step=7)
    assert batch.rows == {}
    assert (batch.stats["singletons"], batch.stats["groups"], batch.stats["learnable_group_frac"]) == (
        6,
        6,
        0,
    )
    assert "step 7: 3 of 3 groups of 'planner' hold one turn and train nothing" in batch.warnings[1]


def test_a_singleton_may_be_compared_with_its_role_in_other_episodes_only(plan, reward, story):
    algorithm = Algorithm(advantage="group_mean", singleton="role_baseline")
    long, short = story(names={"pay": 1}), story(sample=1, names={"pay": 0})
    for _ in range(3):
        long.say("planner")
    short.say("planner")
    batch = batch_of(team(plan, reward, algorithm=algorithm), [long.end(), short.end()])
    # visit 1: 0.5 and -0.5; visits 2 and 3 stand alone: 1 minus the mean 0 of the other episode
    assert [r.advantage for r in batch.rows["policy"]] == [0.5, 1, 1, -0.5]
    alone = batch_of(team(plan, reward, algorithm=algorithm), [long.end()])
    assert alone.rows == {}


def test_with_one_sample_a_task_the_role_baseline_is_the_other_tasks_of_the_step(plan, reward, story):
    algorithm = Algorithm(advantage="group_mean", samples=1, singleton="role_baseline")
    episodes = []
    for slot, pay in enumerate((1, 0, 0.5)):
        episode = story(slot=slot, names={"pay": pay})
        episode.say("planner")
        episodes.append(episode.end())
    batch = batch_of(team(plan, reward, algorithm=algorithm), episodes)
    # 1 - (0 + 0.5)/2, 0 - (1 + 0.5)/2, 0.5 - (1 + 0)/2 = 0, which trains nothing
    assert [r.advantage for r in batch.rows["policy"]] == [0.75, -0.75]


def test_grouping__each_turn_index_normalised_is_biased_by_length__visit_matched_leave_one_out_is_not(
    plan, reward, story
):
    # Visit 1: go on with chance p, else stop and get 0.3. Visit 2: right with chance q and get 1, else 0.
    # All outcomes of 3 episodes are enumerated. Each visit-2 turn that has company must be pushed, on
    # average, by the true gradient of the logit, q(1-q)·1; having company has chance 1-(1-p)². Turns
    # without company are skipped.
    p, q, made = 0.6, 0.3, team(plan, reward, algorithm=Algorithm(use="rloo"))
    total = 0.0
    for kinds in itertools.product(("stop", "right", "wrong"), repeat=3):
        chance = math.prod({"stop": 1 - p, "right": p * q, "wrong": p * (1 - q)}[k] for k in kinds)
        episodes = []
        for sample, kind in enumerate(kinds):
            episode = story(sample=sample, names={"pay": {"stop": 0.3, "right": 1.0, "wrong": 0.0}[kind]})
            episode.say("planner", kind)
            if kind != "stop":
                episode.say("planner", kind)
            episodes.append(episode.end())
        batch = batch_of(made, episodes)
        for episode, kind in zip(episodes, kinds, strict=True):
            if kind != "stop":
                total += chance * ((kind == "right") - q) * push(batch, [episode.turns[1]])
    assert total == pytest.approx(p * (1 - (1 - p) ** 2) * q * (1 - q))


def test_grouping__k_turns_cost_k_optimizer_steps__the_number_of_mini_batches_is_the_algorithms(
    plan, reward, story
):
    for turns in (1, 10):
        made = team(plan, reward, algorithm=Algorithm(advantage="group_mean", updates_per_step=2))
        episodes = [
            e for slot in range(4) for e in episodes_of(story, 1, 0, slot=slot, turns=("planner",) * turns)
        ]
        assert {r.minibatch for r in batch_of(made, episodes).rows["policy"]} == {0, 1}


def test_grouping__variable_rows_an_episode__every_trainable_turn_is_there_exactly_once(plan, reward, story):
    made = team(plan, reward, algorithm=Algorithm(advantage="group_mean", updates_per_step=3))
    episodes = []
    for slot, turns in enumerate((1, 5, 2, 7)):
        episodes += episodes_of(story, 1, 0, 0.3, slot=slot, turns=("planner",) * turns)
    batch = batch_of(made, episodes)
    ids = [row.turn_id for row in batch.rows["policy"]]
    assert sorted(ids) == sorted(t.id for e in episodes for t in e.turns)
    assert batch.stats["rows"] == len(ids) == 3 * (1 + 5 + 2 + 7)


def test_grouping__roles_of_different_reward_scale__a_shared_model_keeps_a_baseline_a_role(
    plan, reward, story
):
    rewards = [
        reward(r, "number", level="role", roles=(r,), args={"x": f"{{{{ {r}_pay }}}}"})
        for r in ("planner", "answerer")
    ]
    episodes = []
    for sample in (0, 1):
        episode = story(sample=sample, names={"planner_pay": sample, "answerer_pay": 100 + 10 * sample})
        episode.say("planner")
        episode.say("answerer")
        episodes.append(episode.end())
    batch = batch_of(plan(*rewards, algorithm=MEAN), episodes)
    assert [r.advantage for r in batch.rows["policy"]] == [-0.5, -5, 0.5, 5]


# What users of such systems run into: silent failures


@pytest.mark.parametrize("outcome", ["tool_error", "timeout", "engine_error", "paused"])
def test_silent__partial_episodes_are_trained_after_an_agent_failed__they_leave_baselines_and_E_stays(
    plan, reward, story, outcome
):
    episodes = episodes_of(story, 1, 0, turns=("planner",))
    broken = story(sample=2, names={"pay": 100})
    broken.say("planner")
    batch = batch_of(team(plan, reward), [*episodes, broken.end(outcome)])
    assert [r.advantage for r in batch.rows["policy"]] == [0.5, -0.5]
    assert {r.token_weight for r in batch.rows["policy"]} == {1 / (10 * 3)}
    assert batch.stats["dropped_episodes"] == 1


def test_a_workflow_may_change_what_an_outcome_means_for_training(plan, reward, story):
    episodes = episodes_of(story, 1, 0, turns=("planner",))
    cut = story(sample=2, names={"pay": 0.2})
    cut.say("planner", outcome="truncated")
    cut.say("planner")
    kept = batch_of(team(plan, reward), [*episodes, cut.end()])
    assert len(kept.groups[0].turns) == 3
    masked = batch_of(team(plan, reward, outcomes={"truncated": "mask"}), [*episodes, cut.end()])
    assert len(masked.groups[0].turns) == 2
    assert masked.stats["masked_turns"] == 1
    dropped = batch_of(team(plan, reward, outcomes={"truncated": "drop_episode"}), [*episodes, cut.end()])
    assert dropped.stats["trainable_turns"] == 2


def test_cancelled_turns_are_masked(plan, reward, story):
    episodes = episodes_of(story, 1, 0)
    late = story(sample=2, names={"pay": 0})
    late.say("planner", outcome="cancelled")
    late.say("answerer")
    batch = batch_of(team(plan, reward), [*episodes, late.end()])
    assert [(g.key[2], len(g.turns)) for g in batch.groups] == [("planner", 2), ("answerer", 3)]


def test_silent__default_reward_0__an_unscored_turn_enters_no_baseline(plan, reward, story):
    episodes = episodes_of(story, 1, 0, "?", turns=("planner",))
    batch = batch_of(team(plan, reward), episodes)
    assert [r.advantage for r in batch.rows["policy"]] == [0.5, -0.5]
    assert batch.stats["unscored_turns"] == 1
    assert batch.stats["planner/reward"] == 0.5


def test_silent__my_loss_is_0__the_learnable_fraction_says_so(plan, reward, story):
    batch = batch_of(team(plan, reward), episodes_of(story, 1, 1))
    assert (batch.stats["learnable_group_frac"], batch.stats["flat_groups"], batch.stats["rows"]) == (0, 2, 0)


def test_silent__a_trainable_agent_yields_no_samples__it_is_missing_among_the_trainable_members(
    plan, reward, story
):
    made = plan(reward("r", "number", args={"x": "{{ pay }}"}, to=("planner",)), algorithm=MEAN)
    batch = batch_of(made, episodes_of(story, 1, 0))
    assert batch.trainable_members == {"planner": 2}
    assert (batch.stats["answerer/turns"], batch.stats["answerer/trainable_turns"]) == (2, 0)


def test_rates_are_told_a_role(plan, reward, story):
    episode = story(names={"pay": 1})
    episode.say("planner", ok=False)
    episode.say("planner", outcome="truncated")
    episode.say("planner")
    episode.say("answerer")
    stats = batch_of(team(plan, reward), [episode.end()]).stats
    assert stats["planner/malformed_frac"] == pytest.approx(1 / 3)
    assert stats["planner/truncated_frac"] == pytest.approx(1 / 3)
    assert (stats["answerer/malformed_frac"], stats["answerer/reward"]) == (0, 1)


def test_a_turn_without_reply_tokens_has_nothing_to_train(plan, reward, story):
    assert batch_of(team(plan, reward), episodes_of(story, 1, 0, tokens=0)).rows == {}


def test_an_empty_step_gives_an_empty_batch(plan, reward):
    batch = batch_of(team(plan, reward), [], num_episodes=4)
    assert (batch.rows, batch.groups, batch.stats["learnable_group_frac"]) == ({}, [], 0)


def test_two_tasks_with_one_id_do_not_mix(plan, reward, story):
    path = (Step("", "planner", 1),)
    episodes = [e for slot in (0, 1) for e in episodes_of(story, 1, 0, slot=slot, turns=("planner",))]
    same = [replace(e, key=replace(e.key, task_id="t")) for e in episodes]
    assert [(len(g.turns), g.key[3]) for g in batch_of(team(plan, reward), same).groups] == [
        (2, path),
        (2, path),
    ]
