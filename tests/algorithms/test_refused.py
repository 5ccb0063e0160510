"""Pairs that are known to be wrong are refused, with the line, the reason and what to write instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from masflow.compiler import check, compile_experiment

Toy = Callable[..., Path]
GRPO = "algorithm: {use: grpo, samples: 4, updates_per_step: 2}"
NODES = "passes: [{node_sampling: {samples: 4}}]\n"
WRONG, USELESS, FIXED = "wrong-pair", "option-without-effect", "fixed-by-algorithm"

REFUSED = [
    ("use: dr_grpo, advantage: group_norm", WRONG, "easy and hard tasks weigh more", "use: grpo"),
    ("use: dr_grpo, weight: token_mean", WRONG, "divides by lengths again", "use: dapo"),
    ("use: dr_grpo, turn_loss: mean", FIXED, "what makes dr_grpo", "remove 'turn_loss'"),
    ("use: dapo, weight: episode", WRONG, "mean over the batch's tokens", "use: grpo with clip_high: 0.28"),
    ("use: rloo, advantage: group_norm", WRONG, "the quotient explodes", "use: grpo"),
    ("use: gspo, ratio: token", FIXED, "what makes gspo", "remove 'ratio'"),
    ("use: cispo, clip: ppo", FIXED, "what makes cispo", "remove 'clip'"),
    ("use: reinforce_pp, advantage: group_mean", FIXED, "what makes reinforce_pp", "remove 'advantage'"),
    ("use: reinforce_pp, singleton: role_baseline", USELESS, "no turn stands alone", "remove it"),
    ("use: reinforce_pp, group: task_role_path", USELESS, "who is in a group doesn't matter", "remove it"),
    ("use: reinforce_pp, kl: {estimator: k3}", WRONG, "isn't additive in tokens", "place: loss"),
    ("use: reinforce_pp, negative_weight: 0.5", WRONG, "each token has one", "place: loss"),
    ("use: reinforce_pp, dynamic: {}", WRONG, "'batch_norm' has no groups", "remove 'dynamic'"),
    ("use: grpo, kl: {weight: 0.1, place: reward}", WRONG, "lost in the turn's mean", "place: loss"),
    ("use: grpo, kl: {place: reward}", USELESS, "has weight 0, so its place", "give kl a weight"),
    ("use: grpo, kl: {estimator: k1}", USELESS, "has weight 0, so its estimator", "give kl a weight"),
    ("use: grpo, clip: none, clip_high: 0.3", USELESS, "no effect with clip: none", "remove it"),
    ("use: grpo, clip: none, dual_clip: 3", USELESS, "clips nothing", "clip: ppo"),
    ("use: cispo, dual_clip: 3", USELESS, "none that grows with the ratio", "clip: ppo"),
    ("use: grpo, weight: token_mean, turn_loss: sum", USELESS, "whichever turn has them", "weight: episode"),
    ("use: grpo, sum_length: 5", USELESS, "no effect with turn_loss: mean", "remove it"),
    ("use: grpo, samples: 1", "group-of-one", "nothing would train", "samples: 8"),
    ("use: dapo, samples: 1, singleton: role_baseline", WRONG, "one episode says nothing", "samples: 8"),
    ("use: grpo, updates_per_step: 5", "too-many-updates", "more than the 3 tasks", "at most 3"),
    ("use: reinforce_pp, ratio: sequence", WRONG, "has one a turn", "ratio: token"),
    ("use: grpo, clip_low: 20", WRONG, "none is ever below 0", "like 0.2"),
    ("use: cispo, clip_low: 1.5", WRONG, "above -0.5", "1 is no lower bound"),
    ("use: grpo, importance: {cap: 0.5}", WRONG, "a factor on every loss", "like 2"),
    ("use: ppo, critic: {warmup_steps: 4}", WRONG, "no policy would ever learn", "at most 3"),
    ("use: ppo, dynamic: {max_rounds: 2}", WRONG, "'gae' has no groups", "remove 'dynamic'"),
]


@pytest.mark.parametrize(("algorithm", "code", "says", "fix"), REFUSED)
def test_a_wrong_pair_is_refused_where_it_stands(toy: Toy, algorithm: str, code: str, says: str, fix: str):
    file = toy((GRPO, f"algorithm:\n  {{{algorithm}}}"))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if algorithm in text)
    found = [p for p in check(file) if p.code == code and says in p.message]
    assert found, [f"{p.code}: {p}" for p in check(file)]
    assert fix in (found[0].fix or "") and found[0].line == line


def test_redrawing_tasks_and_drawing_at_nodes_are_two_ways(toy: Toy):
    text = toy((GRPO, f"algorithm: {{use: dapo}}\n{NODES}"))
    [problem] = check(text)
    assert problem.code == WRONG and "draws actions within one" in problem.message
    assert "dynamic: false" in (problem.fix or "")
    assert not check(toy((GRPO, f"algorithm: {{use: dapo, dynamic: false}}\n{NODES}")))


@pytest.mark.parametrize(
    "algorithm",
    [
        "use: dapo, dynamic: false, overlong: false",
        "use: dr_grpo, sum_length: 5",
        "use: reinforce_pp, samples: 1",
        "use: reinforce_pp, kl: {weight: 0}",
        "use: reinforce_pp, kl: {place: loss, estimator: k3}",
        "use: rloo, importance: {}",
        "use: gspo, dual_clip: 3, epochs: 2",
        "use: grpo, dynamic: {}, kl: {weight: 0.1, estimator: k2}",
    ],
)
def test_what_goes_together_is_not_refused(toy: Toy, algorithm: str):
    assert not check(toy((GRPO, f"algorithm: {{{algorithm}}}")))


OFFERED = """
from masflow.algorithms import Preset

def broken(facts):
    raise ValueError("oops")

def preset(**more):
    return Preset(name="any", paper="ours", says="calm", **more)

gae = {"advantage": "turn_gae", "critic": {"per": "role"}}
calm = preset(fields={**gae, "clip_low": 0.1}, fixed=("clip_low",))
typo = preset(fields={"clip_lo": 0.1})
odd = preset(fields={"samples": -3})
loose = preset(fixed=("clip_low",))
bare = {"clip_low": 0.1}
raising = preset(refuse=broken)
grpo = preset(fields={"clip_low": 0.9})
"""


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is installed that offers algorithms, most of them broken, and a pass."""
    there = tmp_path / "installed"
    (there / "offering-1.0.dist-info").mkdir(parents=True)
    (there / "offering.py").write_text(OFFERED)
    names = ("calm", "typo", "odd", "loose", "bare", "raising", "grpo", "missing")
    lines = [
        "[masflow.algorithms]",
        *(f"{name} = offering:{name}" for name in names),
        "gone = nowhere:PRESET",
    ]
    lines += ["[masflow.passes]", "away = nowhere:Away"]
    (there / "offering-1.0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    (there / "offering-1.0.dist-info" / "METADATA").write_text("Name: offering\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(there)
    monkeypatch.delitem(sys.modules, "offering", raising=False)


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("typo", "unknown key 'clip_lo'"),
        ("odd", "'samples' is -3; it must be at least 1"),
        ("loose", "'fixed' names 'clip_low'"),
        ("bare", "is a dict, not a masflow.algorithms.Preset"),
        ("raising", "refuse: ValueError: oops"),
        ("missing", "has no attribute 'missing'"),
        ("gone", "No module named 'nowhere'"),
    ],
)
def test_a_broken_algorithm_of_a_package_stops_whoever_names_it(toy: Toy, name: str, says: str):
    problems = check(toy((GRPO, f"algorithm: {{use: {name}}}")))
    assert [p.code for p in problems] == ["bad-algorithm"]
    assert says in problems[0].message and "repair that package" in (problems[0].fix or "")


@pytest.mark.usefixtures("offered")
def test_an_algorithm_of_a_package_is_used_by_its_name(toy: Toy):
    assert not check(toy())
    plan = compile_experiment(toy((GRPO, "algorithm: {use: calm}")))
    own = plan.algorithm
    assert (own.use, own.clip_low, own.advantage) == ("calm", 0.1, "turn_gae")
    assert {critic.name for critic in plan.critics} == {critic.roles[0] for critic in plan.critics}
    [problem] = check(toy((GRPO, "algorithm: {use: calm, clip_low: 0.3}")))
    assert problem.code == FIXED and "what makes calm" in problem.message
    assert compile_experiment(toy()).algorithm.clip_low == 0.2  # a name of ours stays ours


@pytest.mark.usefixtures("offered")
def test_a_broken_pass_of_a_package_stops_whoever_names_it(toy: Toy):
    [problem] = check(toy((GRPO, f"{GRPO}\npasses: [away]")))
    assert problem.code == "bad-pass" and "No module named 'nowhere'" in problem.message
