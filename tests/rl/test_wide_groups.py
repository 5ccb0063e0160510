"""Groups that are wider than one place of a task: Dr. MAS, M-GRPO, MATPO, GiGPO and MAGRPO, against
references in float64 that know nothing of masflow."""

import math
from statistics import fmean, stdev

import pytest

from masflow.rl.batch import build_batch
from masflow.rl.score import score
from masflow.spec.experiment import Algorithm, Overlong
from masflow.trace import Message, Step

EPS = 1e-6


def normed(values, value):
    """(x - mean) / (std + 1e-6), ddof 1; 0 where all are equal."""
    return 0.0 if len(set(values)) == 1 else (value - fmean(values)) / (stdev(values) + EPS)


def batch_of(plan, episodes):
    return build_batch(plan, score(plan, episodes), len(episodes), 1)


def advantages_of(batch):
    return {t: a for g in batch.groups for t, a in zip(g.turns, g.advantages, strict=True)}


def asked(text):
    return (Message("system", "you walk"), Message("user", text))


# -- Dr. MAS --------------------------------------------------------------------------------------


def rounds(story, reward_of):
    """Episodes in which the planner speaks 1, 2, … times and the answerer once."""
    found = []
    for sample, pay in enumerate(reward_of):
        episode = story(sample=sample, names={"pay": pay})
        for _ in range(sample + 1):
            episode.say("planner", "x")
        episode.say("answerer", "x")
        found.append(episode.end())
    return found


def test_dr_mas_normalises_each_agents_turns_by_its_own_mean_and_deviation(plan, reward, story):
    paid = (1.0, 0.0, 0.25)
    episodes = rounds(story, paid)
    made = plan(reward("team", "number", args={"x": "{{ pay }}"}), algorithm=Algorithm(use="dr_mas"))
    batch = batch_of(made, episodes)
    every = {"planner": [1.0, 0.0, 0.0, 0.25, 0.25, 0.25], "answerer": list(paid)}
    assert [(g.key[2], g.key[3], len(g.turns)) for g in batch.groups] == [
        ("planner", (), 6),
        ("answerer", (), 3),
    ]
    found = advantages_of(batch)
    for episode, pay in zip(episodes, paid, strict=True):
        for turn in episode.turns:
            assert found[turn.id] == pytest.approx(normed(every[turn.role], pay), abs=1e-12)
    # The planner's mean is 1.75 / 6, the answerer's 1.25 / 3: one reward, two baselines.
    assert found[episodes[0].turns[0].id] == pytest.approx((1 - 1.75 / 6) / (0.36799 + EPS), abs=1e-4)


def test_dr_mas_compares_tasks_apart_and_members_of_a_family_apart(plan, reward, story):
    episodes = []
    for slot in (0, 1):
        for sample, pay in enumerate((slot, slot + 1)):
            episode = story(slot=slot, sample=sample, names={"pay": pay})
            for member in ("ann", "bob"):
                episode.say("critic", "x", member=member)
            episodes.append(episode.end())
    made = plan(reward("team", "number", args={"x": "{{ pay }}"}), algorithm=Algorithm(use="dr_mas"))
    groups = batch_of(made, episodes).groups
    assert [(g.key[0], g.key[2]) for g in groups] == [(0, "ann"), (0, "bob")] * 1 + [(1, "ann"), (1, "bob")]
    assert all(g.advantages == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5) for g in groups)


# -- M-GRPO ---------------------------------------------------------------------------------------


def research(story, sample, score_, calls):
    """A main agent that speaks twice, and sub-agents: of each call, what its turns earn and their tokens."""
    episode = story(sample=sample, names={"team": score_})
    episode.say("planner", score_, tokens=10)
    for number, turns in enumerate(calls, start=1):
        for at, (pay, tokens) in enumerate(turns, start=1):
            path = (Step("", "ask", number), Step("ask", "search", at))
            episode.say("searcher", pay, node="ask/search", path=path, tokens=tokens)
    episode.say("planner", score_, tokens=30)
    return episode.end()


def test_m_grpo_compares_episodes_of_the_main_agent_and_calls_of_sub_agents(plan, reward, story):
    episodes = [
        research(story, 0, 1.0, [[(1.0, 4), (0.0, 6)], [(1.0, 5)]]),
        research(story, 1, 0.0, [[(0.0, 8)]]),
        research(story, 2, 0.0, []),
    ]
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}), algorithm=Algorithm(use="m_grpo")
    )
    batch = batch_of(made, episodes)
    found = advantages_of(batch)
    assert [(g.key[2], g.size, len(g.turns)) for g in batch.groups] == [
        ("planner", 3, 6),
        ("searcher", 3, 4),
    ]
    main, calls = (1.0, 0.0, 0.0), (0.5, 1.0, 0.0)
    for episode, value in zip(episodes, main, strict=True):
        for turn in episode.turns:
            if turn.role == "planner":
                assert found[turn.id] == pytest.approx(normed(main, value), abs=1e-12)
    spoken = [t for e in episodes for t in e.turns if t.role == "searcher"]
    for turn, value in zip(spoken, (0.5, 0.5, 1.0, 0.0), strict=True):
        assert found[turn.id] == pytest.approx(normed(calls, value), abs=1e-12)


def test_m_grpo_gives_each_episode_of_an_agent_one_voice_each_call_its_share_and_each_token_its_share(
    plan, reward, story
):
    episodes = [
        research(story, 0, 1.0, [[(1.0, 4), (0.0, 6)], [(1.0, 5)]]),
        research(story, 1, 0.0, [[(0.0, 8)]]),
    ]
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}), algorithm=Algorithm(use="m_grpo")
    )
    rows = {r.turn_id: r.token_weight for r in batch_of(made, episodes).rows["policy"]}
    first, second = episodes
    weights = [rows.get(t.id) for t in (*first.turns, *second.turns)]
    # 2 episodes; the main agent's 40 tokens in one call; 2 calls of 10 and 5 tokens; 1 call of 8. The call
    # that is worth 0.5 has the mean of (0.5, 1, 0), so that its advantage is 0 and it has no rows.
    main = 1 / (2 * 40)
    assert weights == pytest.approx([main, None, None, 1 / (2 * 2 * 5), main, main, 1 / (2 * 8), main])


# -- MATPO ----------------------------------------------------------------------------------------


def test_matpo_gives_planner_and_workers_the_episodes_advantage(plan, reward, story):
    paid = (0.9, 0.0, 0.1, 0.9)
    episodes = [research(story, i, p, [[(0, 5)]] * i) for i, p in enumerate(paid)]
    made = plan(reward("team", "number", args={"x": "{{ team }}"}), algorithm=Algorithm(use="matpo"))
    batch = batch_of(made, episodes)
    assert [(g.key[2], g.size, len(g.turns)) for g in batch.groups] == [("", 4, 2 + 3 + 4 + 5)]
    found, tokens = advantages_of(batch), sum(t.reply_tokens for e in episodes for t in e.turns)
    for episode, pay in zip(episodes, paid, strict=True):
        for turn in episode.turns:
            assert found[turn.id] == pytest.approx(normed(paid, pay), abs=1e-12)
    assert {row.token_weight for row in batch.rows["policy"]} == {1 / tokens}


# -- GiGPO ----------------------------------------------------------------------------------------


def gigpo_reference(walks, discount, weight, norm):
    """Eq. 3, 5 to 8 of arXiv 2505.10978. Args: walks: of each episode a list of (state, reward)."""

    def relative(values, value):
        if len(values) < 2 or len(set(values)) == 1:
            return 0.0
        return (value - fmean(values)) / (stdev(values) + EPS if norm else 1.0)

    totals = [sum(r for _, r in walk) for walk in walks]
    returns = [
        [sum(discount ** (k - t) * walk[k][1] for k in range(t, len(walk))) for t in range(len(walk))]
        for walk in walks
    ]
    anchors = {}
    for walk, each in zip(walks, returns, strict=True):
        for (state, _), value in zip(walk, each, strict=True):
            anchors.setdefault(state, []).append(value)
    return [
        relative(totals, total) + weight * relative(anchors[state], value)
        for walk, total, each in zip(walks, totals, returns, strict=True)
        for (state, _), value in zip(walk, each, strict=True)
    ]


WALKS = (
    [("hall", 0.0), ("kitchen", 0.0), ("hall", 0.0), ("garden", 10.0)],
    [("hall", -0.1), ("garden", 10.0)],
    [("hall", 0.0), ("cellar", 0.0), ("cellar", 0.0)],
)


@pytest.mark.parametrize("discount", [1.0, 0.95])
@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("norm", [True, False])
def test_gigpo_is_its_equations(plan, reward, story, discount, weight, norm):
    episodes = []
    for sample, walk in enumerate(WALKS):
        episode = story(sample=sample)
        for state, pay in walk:
            episode.say("planner", pay, messages=asked(state))
        episodes.append(episode.end())
    algorithm = Algorithm(
        use="gigpo",
        step_weight=weight,
        **({} if norm else {"advantage": "group_mean"}),  # type: ignore[arg-type]
    )
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        algorithm=algorithm, credit="return_to_go", discount=discount,
    )  # fmt: skip
    batch = batch_of(made, episodes)
    found = advantages_of(batch)
    wanted = gigpo_reference(WALKS, discount, weight, norm)
    assert [found[t.id] for e in episodes for t in e.turns] == pytest.approx(wanted, abs=1e-9)
    assert [(g.key[2], g.size) for g in batch.groups] == [("planner", 3)]


def test_gigpo_by_hand(plan, reward, story):
    """Two walks through one hall. Returns 10 and 0; from the hall 10, 10 (again) and 0."""
    episodes = []
    for sample, walk in enumerate(([("hall", 0.0), ("hall", 10.0)], [("hall", 0.0)])):
        episode = story(sample=sample)
        for state, pay in walk:
            episode.say("planner", pay, messages=asked(state))
        episodes.append(episode.end())
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        algorithm=Algorithm(use="gigpo", advantage="group_mean"), credit="return_to_go",
    )  # fmt: skip
    found = advantages_of(batch_of(made, episodes))
    # Episodes: 5 and -5. Hall: the mean of 10, 10, 0 is 6.67.
    first, again, other = (found[t.id] for e in episodes for t in e.turns)
    assert first == again == pytest.approx(5 + 10 / 3) and other == pytest.approx(-5 - 20 / 3)


def test_gigpos_state_is_the_node_the_system_prompt_and_the_last_message(plan, reward, story):
    told = (
        asked("hall"),
        (*asked("door"), Message("assistant", "go"), Message("user", "hall")),  # the same, later
        (Message("system", "you fly"), Message("user", "hall")),
        asked("cellar"),
    )
    episodes = []
    for sample, (messages, pay) in enumerate(zip(told, (1.0, 0.0, 5.0, 7.0), strict=True)):
        episode = story(sample=sample)
        episode.say("planner", pay, messages=messages)
        episodes.append(episode.end())
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        algorithm=Algorithm(use="gigpo", advantage="group_mean"), credit="return_to_go",
    )  # fmt: skip
    found = advantages_of(batch_of(made, episodes))
    whole = (1.0, 0.0, 5.0, 7.0)
    micro = [
        (found[e.turns[0].id] or 0.0) - (pay - fmean(whole)) for e, pay in zip(episodes, whole, strict=True)
    ]
    assert micro == pytest.approx([0.5, -0.5, 0.0, 0.0])


# -- MAGRPO ---------------------------------------------------------------------------------------


def test_magrpo_subtracts_the_mean_return_at_each_agents_turn(plan, reward, story):
    """Two agents, two turns each; rewards come after each round and belong to the team."""
    steps = ((1.0, 3.0), (0.0, 2.0), (0.5, 0.0))
    episodes = []
    for sample, pays in enumerate(steps):
        episode = story(sample=sample)
        for pay in pays:
            episode.say("planner", 0.0)
            episode.say("answerer", pay)
        episodes.append(episode.end())
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        algorithm=Algorithm(use="magrpo", sum_length=20), credit="return_to_go",
    )  # fmt: skip
    batch = batch_of(made, episodes)
    found = advantages_of(batch)
    for turn_at in (0, 1):
        returns = [sum(pays[turn_at:]) for pays in steps]
        for episode, value in zip(episodes, returns, strict=True):
            for turn in episode.turns[2 * turn_at : 2 * turn_at + 2]:
                assert found[turn.id] == pytest.approx(value - fmean(returns), abs=1e-12)
    # log pi is a sum over tokens: every token weighs 1 / (3 episodes x the constant length).
    assert {row.token_weight for row in batch.rows["policy"]} == {1 / (3 * 20)}


# -- all of them ----------------------------------------------------------------------------------

WIDE = ("dr_mas", "m_grpo", "matpo", "gigpo")


@pytest.mark.parametrize("use", WIDE)
def test_equal_rewards_teach_nothing_and_one_alone_is_skipped(plan, reward, story, use):
    made = plan(reward("team", "number", args={"x": "{{ pay }}"}), algorithm=Algorithm(use=use))
    equal = [story(sample=i, names={"pay": 0.3}) for i in range(3)]
    for episode in equal:
        episode.say("planner", "x", messages=asked("hall"))
    batch = batch_of(made, [episode.end() for episode in equal])
    assert batch.rows == {} and batch.stats["flat_groups"] == 1
    alone = story(names={"pay": 1.0})
    alone.say("planner", "x", messages=asked("hall"))
    batch = batch_of(made, [alone.end()])
    assert batch.rows == {} and batch.stats["singletons"] == 1
    assert batch.groups[0].advantages == (None,)


@pytest.mark.parametrize("use", WIDE)
def test_masked_and_unscored_turns_enter_no_baseline(plan, reward, story, use):
    episodes = []
    for sample, pay in enumerate((1.0, 0.0, 9.0)):
        episode = story(sample=sample, names={"pay": pay})
        episode.say("planner", "x", outcome="ok" if sample < 2 else "cancelled", messages=asked(str(sample)))
        episodes.append(episode.end())
    made = plan(reward("team", "number", args={"x": "{{ pay }}"}), algorithm=Algorithm(use=use))
    found = advantages_of(batch_of(made, episodes))
    assert sorted(a or 0.0 for a in found.values()) == pytest.approx(
        [-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5
    )


def test_long_replies_pay_before_wide_groups_are_compared(plan, reward, story):
    episodes = []
    for sample, tokens in enumerate((10, 256)):
        episode = story(sample=sample, names={"pay": 1.0})
        episode.say("planner", "x", tokens=tokens)
        episodes.append(episode.end())
    made = plan(
        reward("team", "number", args={"x": "{{ pay }}"}),
        algorithm=Algorithm(use="dr_mas", advantage="group_mean", overlong=Overlong(penalty=1.0)),
    )
    assert list(advantages_of(batch_of(made, episodes)).values()) == pytest.approx([0.5, -0.5])
