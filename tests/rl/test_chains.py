"""What critics are asked about: chains of turns, what they bring, and what a central critic reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from masflow.algorithms import filled
from masflow.compiler.plan import CriticIR, Plan
from masflow.rl.chains import Link, critic_groups, links_of, team_state
from masflow.rl.groups import Entrant
from masflow.spec.experiment import Algorithm
from masflow.spec.mapping import Optimizer
from masflow.trace import Message, Scored, Trajectory

ROLES = ("planner", "searcher", "answerer")


def critic(*roles: str, central: bool = False) -> CriticIR:
    return CriticIR("c", "policy", roles or ROLES, None, "", Optimizer(), central)


Links = Callable[..., dict[str, Link]]


@pytest.fixture
def links(plan: Callable[..., Plan]) -> Links:
    """`links(trajectory, {turn id: return}, …)`: turn id → link, under `turn_gae` unless said otherwise."""

    def make(
        episode: Trajectory,
        totals: Mapping[str, float],
        of: CriticIR | None = None,
        use: str = "turn_ppo",
        discount: float = 1.0,
        credit: Any = "return_to_go",
    ) -> dict[str, Link]:
        algorithm = filled(Algorithm.model_validate({"use": use}))
        found = plan(algorithm=algorithm, discount=discount, credit=credit)
        entrants = [Entrant(t, episode.id, 0, "task0", totals[t.id]) for t in episode.turns if t.id in totals]
        asked = links_of(found, of or critic(), [Scored(episode, {}, {}, {})], entrants, {0: 3})
        return {link.turn_id: link for link in asked}

    return make


def facts(found: Mapping[str, Link], turns: Sequence[Any]) -> list[tuple[Any, ...]]:
    names = {turn.id: number for number, turn in enumerate(turns)}
    return [
        (names[i], round(link.reward, 12), names.get(link.successor), link.decay) for i, link in found.items()
    ]


def test_a_turns_reward_is_what_came_until_its_role_spoke_again(story: Any, links: Links):
    # Rewards: planner 0.1, searcher 0.2 and 0.3, planner 0.4, answerer 1. Returns (no discount) add them up
    # from behind: 2.0, 1.9, 1.7, 1.4, 1.0. The planner's first turn has what came before its second: 0.6.
    episode = story()
    turns = [episode.say(role) for role in ("planner", "searcher", "searcher", "planner", "answerer")]
    returns = dict(zip([t.id for t in turns], (2.0, 1.9, 1.7, 1.4, 1.0), strict=True))
    found = facts(links(episode.end(), returns), turns)
    assert found == [
        (0, 0.6, 3, 1.0), (1, 0.2, 2, 1.0), (2, 1.7, None, 1.0), (3, 1.4, None, 1.0), (4, 1.0, None, 1.0)
    ]  # fmt: skip


def test_a_discount_counts_the_supersteps_between_two_turns(story: Any, links: Links):
    # g = 0.5. Rewards 0, 4, 8 in supersteps 1, 2, 3: returns 0 + 2 + 2 = 4, 4 + 4 = 8, 8. From 1 to 3 the
    # decay is 0.25, and the first turn brought 4 - 0.25 · 8 = 2: the searcher's 4, a step later.
    episode = story()
    turns = [episode.say(role) for role in ("planner", "searcher", "planner")]
    returns = dict(zip([t.id for t in turns], (4.0, 8.0, 8.0), strict=True))
    found = facts(links(episode.end(), returns, discount=0.5), turns)
    assert found == [(0, 2.0, 2, 0.25), (1, 8.0, None, 1.0), (2, 8.0, None, 1.0)]


def test_where_credit_is_each_turns_own_an_episodes_reward_comes_with_the_last_turn(story: Any, links: Links):
    # The team was paid 1, once to each turn; the first planner turn was malformed besides (-1): 1 - 1 = 0. So
    # its chain brings 0 - 1 = -1, then 1 - 1 = 0, then 1. No discount, whatever the graph's default says.
    episode = story()
    turns = [episode.say("planner") for _ in range(3)]
    totals = dict(zip([t.id for t in turns], (0.0, 1.0, 1.0), strict=True))
    found = facts(links(episode.end(), totals, discount=0.5, credit="own"), turns)
    assert found == [(0, -1.0, 1, 1.0), (1, 0.0, 2, 1.0), (2, 1.0, None, 1.0)]


def test_a_central_critics_chain_crosses_roles(story: Any, links: Links):
    episode = story()
    turns = [episode.say(role) for role in ("planner", "searcher", "answerer")]
    returns = dict(zip([t.id for t in turns], (1.5, 1.2, 1.0), strict=True))
    found = facts(links(episode.end(), returns, critic(central=True)), turns)
    assert found == [(0, 0.3, 1, 1.0), (1, 0.2, 2, 1.0), (2, 1.0, None, 1.0)]


def test_copies_that_run_at_once_are_chains_apart_and_meet_again_under_a_central_critic(
    story: Any, links: Links
):
    episode = story()
    turns = [
        episode.say("searcher", item=0),
        episode.say("searcher", item=1, at_once=True),
        episode.say("planner"),
        episode.say("searcher", item=0, visit=2),
    ]
    returns = dict.fromkeys([t.id for t in turns], 1.0)
    apart = facts(links(episode.end(), returns), turns)
    assert apart == [(0, 0.0, 3, 1.0), (1, 1.0, None, 1.0), (2, 1.0, None, 1.0), (3, 1.0, None, 1.0)]
    whole = facts(links(episode.end(), returns, critic(central=True)), turns)
    assert whole == [(0, 0.0, 2, 1.0), (1, 0.0, 2, 1.0), (2, 0.0, 3, 1.0), (3, 1.0, None, 1.0)]


def test_turns_that_do_not_train_are_no_links_and_what_they_were_paid_accrues_before(
    story: Any, links: Links
):
    # The middle turn is masked: it has no return here. The first brought 1.9 - 1.0, the middle's 0.5 with it.
    episode = story()
    turns = [episode.say("planner") for _ in range(3)]
    found = facts(links(episode.end(), {turns[0].id: 1.9, turns[2].id: 1.0}), turns)
    assert found == [(0, 0.9, 2, 1.0), (2, 1.0, None, 1.0)]


def test_an_attempt_that_was_asked_again_is_paid_for_itself_alone(story: Any, links: Links):
    episode = story()
    turns = [
        episode.say("planner", attempt=0, visit=1, last=False),
        episode.say("planner", attempt=1, visit=1),
        episode.say("planner", visit=2),
    ]
    returns = dict(zip([t.id for t in turns], (-1.0, 1.5, 1.0), strict=True))
    found = facts(links(episode.end(), returns), turns)
    assert found == [(0, -1.0, None, 1.0), (1, 0.5, 2, 1.0), (2, 1.0, None, 1.0)]


def test_with_gae_every_turn_is_a_chain_of_its_own(story: Any, links: Links):
    episode = story()
    turns = [episode.say("planner") for _ in range(2)]
    found = facts(links(episode.end(), {t.id: 1.0 for t in turns}, use="ppo"), turns)
    assert found == [(0, 1.0, None, 1.0), (1, 1.0, None, 1.0)]


def test_a_critic_is_asked_about_its_own_roles_alone_with_their_minibatch(story: Any, links: Links):
    episode = story()
    turns = [episode.say(role) for role in ("planner", "searcher")]
    found = links(episode.end(), {t.id: 1.0 for t in turns}, critic("searcher"))
    assert list(found) == [turns[1].id]
    assert found[turns[1].id].minibatch == 3
    assert found[turns[1].id].text is None


def told(role: str, question: str) -> tuple[Message, ...]:
    return (Message("user", f"{role}: {question}"),)


def test_a_central_critic_sees_what_others_said_before_and_never_the_action(story: Any):
    episode = story()
    for role, said in (("planner", "p1"), ("searcher", "s1"), ("planner", "p2"), ("answerer", "a1")):
        episode.say(role, said)
    episode.say("searcher", "s2", at_once=True)
    asked = [replace(turn, messages=told(turn.role, f"q{i}")) for i, turn in enumerate(episode.turns)]
    whole = replace(episode.end(), turns=tuple(asked))
    answer = next(t for t in whole.turns if t.role == "answerer")
    assert team_state(whole, answer, ROLES) == (
        "[planner]\nplanner: q2\np2\n[searcher]\nsearcher: q1\ns1\n[answerer]\nanswerer: q3"
    )
    assert team_state(whole, whole.turns[0], ROLES) == "[planner]\nplanner: q0"


def test_a_role_is_one_group_whose_advantages_are_known(story: Any):
    episode = story()
    turns = [episode.say(role) for role in ("planner", "searcher", "planner")]
    entrants = [Entrant(t, "e", 0, "task0", 1.0) for t in turns]
    groups = critic_groups([critic()], entrants, {turns[0].id: 0.5, turns[2].id: -0.5, turns[1].id: 0.0})
    assert [(g.key[2], g.advantages, g.learnable) for g in groups] == [
        ("planner", (0.5, -0.5), True),
        ("searcher", (0.0,), False),
    ]
