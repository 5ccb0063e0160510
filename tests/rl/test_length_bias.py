"""Chains of different lengths under return_to_go: what the update expects to push, over every outcome of two
episodes, against the true gradient of the expected reward.

A planner stops, or goes on to a searcher whose reply wins or loses. With probability P it goes on, with Q the
searcher wins. Stopping pays STOP, winning WIN, losing nothing, each with the last turn. For the logit of
going on the true gradient is P (1 - P) (Q WIN - STOP), for that of winning P Q (1 - Q) WIN.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from masflow.rl.batch import build_batch
from masflow.rl.score import score
from masflow.spec.experiment import Algorithm


@dataclass(frozen=True)
class Game:
    win: float
    q: float
    stop: float = 0.4
    p: float = 0.5

    @property
    def going_on(self) -> float:
        return self.p * (1 - self.p) * (self.q * self.win - self.stop)

    @property
    def winning(self) -> float:
        return self.p * self.q * (1 - self.q) * self.win


LONG_IS_BETTER = Game(win=1.0, q=0.45)
"""0.45 in two turns, or 0.4 in one."""
SHORT_IS_BETTER = Game(win=0.5, q=0.6)
"""0.3 in two turns, or 0.4 in one."""
ENDS = ("stop", "win", "lose")


def expected(game, plan, reward, story, **algorithm):
    """(push on the logit of going on, on that of winning), the mean over all pairs of episodes."""
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        algorithm=Algorithm(**algorithm), credit="return_to_go",
    )  # fmt: skip
    chances = {"stop": 1 - game.p, "win": game.p * game.q, "lose": game.p * (1 - game.q)}
    on = win = 0.0
    for pair in itertools.product(ENDS, repeat=2):
        slopes: dict[str, tuple[float, float]] = {}
        episodes = []
        for sample, end in enumerate(pair):
            episode = story(sample=sample)
            first = episode.say("planner", game.stop if end == "stop" else 0.0)
            slopes[first.id] = (-game.p if end == "stop" else 1 - game.p, 0.0)
            if end != "stop":
                last = episode.say("searcher", game.win if end == "win" else 0.0)
                slopes[last.id] = (0.0, 1 - game.q if end == "win" else -game.q)
            episodes.append(episode.end())
        batch = build_batch(made, score(made, episodes), 2, 1)
        chance = chances[pair[0]] * chances[pair[1]]
        for row in itertools.chain(*batch.rows.values()):
            push = chance * row.token_weight * 10 * row.advantage  # ten tokens a turn
            on, win = on + push * slopes[row.turn_id][0], win + push * slopes[row.turn_id][1]
    return on, win


@pytest.mark.parametrize(
    ("game", "true", "normed"),
    [(LONG_IS_BETTER, 0.0125, -0.017678), (SHORT_IS_BETTER, -0.025, 0.035355)],
)
def test_dividing_by_a_turns_deviation_prefers_the_worse_length_and_leave_one_out_does_not(
    plan, reward, story, game, true, normed
):
    """By hand, P = 1/2: of two episodes one stops and one goes on with chance 1/2. The difference, divided
    by its own deviation, is 0.7071 for whoever wins: 1/2 · 1/2 · 0.7071 · (0.45 - 0.55) and
    1/2 · 1/2 · 0.7071 · (0.6 - 0.4). How much is won doesn't count. Undivided it is the gradient itself."""
    assert game.going_on == pytest.approx(true)
    on, _ = expected(game, plan, reward, story, advantage="group_norm")
    assert on == pytest.approx(normed, abs=1e-6) and on * true < 0
    on, _ = expected(game, plan, reward, story, advantage="leave_one_out")
    assert on == pytest.approx(true, abs=1e-12)
    on, _ = expected(game, plan, reward, story, advantage="group_mean")
    assert on == pytest.approx(true / 2, abs=1e-12)  # (G - 1) / G


@pytest.mark.parametrize("game", [LONG_IS_BETTER, SHORT_IS_BETTER, Game(win=2.0, q=0.3, p=0.8)])
def test_a_visit_that_nobody_else_made_has_its_roles_baseline_or_is_left_out(plan, reward, story, game):
    """Both episodes reach the searcher with chance P²: skipping the others leaves P times the gradient, the
    same direction. No searcher spoke in the other episode, so `role_baseline` has nothing to add there."""
    for singleton in ("skip", "role_baseline"):
        on, win = expected(game, plan, reward, story, advantage="leave_one_out", singleton=singleton)
        assert on == pytest.approx(game.going_on, abs=1e-12)
        assert win == pytest.approx(game.p * game.winning, abs=1e-12)


@pytest.mark.parametrize("game", [LONG_IS_BETTER, SHORT_IS_BETTER, Game(win=2.0, q=0.3, p=0.8)])
def test_matched_visits_and_a_role_baseline_are_the_gradient_where_the_role_speaks_in_every_episode(
    plan, reward, story, game
):
    """One role makes both turns: a lone second visit is compared with what that role earned in the other
    episode, so that all of P²'s and P (1 - P)'s shares of the gradient are there."""
    made = plan(
        reward("own", "number", level="turn", args={"x": "{{ result }}"}),
        algorithm=Algorithm(advantage="leave_one_out", singleton="role_baseline"), credit="return_to_go",
    )  # fmt: skip
    chances = {"stop": 1 - game.p, "win": game.p * game.q, "lose": game.p * (1 - game.q)}
    win = 0.0
    for pair in itertools.product(ENDS, repeat=2):
        episodes, slopes = [], {}
        for sample, end in enumerate(pair):
            episode = story(sample=sample)
            episode.say("planner", game.stop if end == "stop" else 0.0)
            if end != "stop":
                last = episode.say("planner", game.win if end == "win" else 0.0)
                slopes[last.id] = 1 - game.q if end == "win" else -game.q
            episodes.append(episode.end())
        batch = build_batch(made, score(made, episodes), 2, 1)
        for row in itertools.chain(*batch.rows.values()):
            push = row.token_weight * 10 * row.advantage * slopes.get(row.turn_id, 0.0)
            win += chances[pair[0]] * chances[pair[1]] * push
    assert win == pytest.approx(game.winning, abs=1e-12)


def test_dividing_by_an_episodes_own_length_has_the_wrong_sign(plan, reward, story):
    """A pays 1 in 10 turns or nothing in 2, each with chance 1/2; B pays 0.4 in 2. A is worth 0.5, and still
    1/N weighting pushes towards B: a tenth of every success, a half of every failure."""

    def pushed(weight):
        """Towards A, its turns being one decision each, over the four pairs of episodes."""
        made = plan(
            reward("team", "number", args={"x": "{{ pay }}"}),
            algorithm=Algorithm(advantage="leave_one_out", weight=weight),
        )
        total = 0.0
        for ours, (pay, turns) in itertools.product((0, 1), ((1.0, 10), (0.0, 2))):
            episodes = []
            for sample in (0, 1):
                is_a = sample == ours
                episode = story(sample=sample, names={"pay": pay if is_a else 0.4})
                for _ in range(turns if is_a else 2):
                    episode.say("planner" if is_a or not episode.turns else "critic", "x")
                episodes.append(episode.end())
            batch = build_batch(made, score(made, episodes), 2, 1)
            rows = {r.turn_id: r for rows in batch.rows.values() for r in rows}
            for sample, episode in enumerate(episodes):  # the choice is the first turn
                row = rows[episode.turns[0].id]
                slope = 0.5 if sample == ours else -0.5
                total += 0.25 * row.token_weight * 10 * row.advantage * slope
        return total

    # Success pushes by 0.6 · 1/2, failure by -0.4 · 1/2, each times the weights of both first turns:
    # 1/2 (0.3 (1/2 + 1/2) - 0.2 (1/2 + 1/2)), against 1/2 (0.3 (1/20 + 1/4) - 0.2 (1/4 + 1/4)).
    assert pushed("episode") == pytest.approx(0.05)
    assert pushed("episode_mean") == pytest.approx(-0.005)


def test_one_baseline_for_all_of_an_agents_turns_holds_back_long_successes(plan, reward, story):
    """dr_mas as published: ten turns that won 1 and two that won 0 have the mean 5/6, and the push on the
    first turn is 1/6 for the success against 5/6 for the failure. Matched by their visits it is balanced."""

    def firsts(group):
        made = plan(
            reward("team", "number", args={"x": "{{ pay }}"}),
            algorithm=Algorithm(advantage="group_mean", group=group),
        )
        episodes = []
        for sample, (pay, turns) in enumerate(((1.0, 10), (0.0, 2))):
            episode = story(sample=sample, names={"pay": pay})
            for _ in range(turns):
                episode.say("planner", "x")
            episodes.append(episode.end())
        batch = build_batch(made, score(made, episodes), 2, 1)
        worth = {t: a for g in batch.groups for t, a in zip(g.turns, g.advantages, strict=True)}
        return [worth[episode.turns[0].id] for episode in episodes]

    assert firsts("task_role") == pytest.approx([1 / 6, -5 / 6])
    assert firsts("task_role_path") == pytest.approx([0.5, -0.5])
