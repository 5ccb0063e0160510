"""magrpo, dr_mas, m_grpo, matpo, gigpo and at_grpo: four optimizer steps against the papers' formulas in
float64, what they refuse, and whole runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from masflow.compiler import check, compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.plan import Plan
from masflow.errors import SpecError
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics
from tests.algorithms import test_references as reference
from tests.algorithms.test_references import GRPO, TWICE, Spoken

Toy = Callable[..., Path]
TO_GO = ("name: echo\n", "name: echo\ncredit: return_to_go\n")
CALLED = "level: role, roles: [caller], weight: 0"
OWN = (CALLED, "level: turn, roles: [caller], weight: 1")
"""The caller is paid for its own word."""
SHARED = "{policy: {roles: rest}}"
TWO = (SHARED, "{a: {roles: [caller]}, b: {roles: [echoer]}}")

# -- the papers' formulas -------------------------------------------------------------------------


def compared(values: dict[Any, float], mine: Any) -> float:
    """(r - mean) / (std + 1e-6); not a number where there is nothing to compare with."""
    every = np.array(list(values.values()))
    if len(every) < 2:
        return math.nan
    return 0.0 if np.ptp(every) == 0 else (values[mine] - every.mean()) / (every.std(ddof=1) + 1e-6)


def dr_mas(one: Spoken, every: list[Spoken]) -> float:
    """Y_k: all turns of agent k in the task's episodes, each with its reward."""
    mine = [o for o in every if (o.slot, o.turn.role) == (one.slot, one.turn.role)]
    return compared({o.turn.id: o.reward for o in mine}, one.turn.id)


def m_grpo(one: Spoken, every: list[Spoken]) -> float:
    """One number an agent's trajectory; without sub-workflows that is its part of an episode."""
    mine = [o for o in every if (o.slot, o.turn.role) == (one.slot, one.turn.role)]
    return compared(means(mine), one.episode)


def matpo(one: Spoken, every: list[Spoken]) -> float:
    """One number an episode, whoever spoke."""
    return compared(means([o for o in every if o.slot == one.slot]), one.episode)


def means(turns: list[Spoken]) -> dict[str, float]:
    episodes = dict.fromkeys(o.episode for o in turns)
    return {e: float(np.mean([o.reward for o in turns if o.episode == e])) for e in episodes}


def gigpo(one: Spoken, every: list[Spoken]) -> float:
    """Eq. 8 with w = 1; nobody was told anything, so that all of a role's turns are in one state."""
    mine = [o for o in every if (o.slot, o.turn.role) == (one.slot, one.turn.role)]
    returns: dict[str, float] = {}
    for o in mine:
        returns.setdefault(o.episode, o.reward)
    macro = compared(returns, one.episode)
    micro = compared({o.turn.id: o.reward for o in mine}, one.turn.id)
    return macro if math.isnan(micro) else micro if math.isnan(macro) else macro + micro


def plain(lp_T: Tensor, old_T: Tensor, a: float) -> Tensor:
    """MAGRPO, eq. 2: a policy gradient without a clip; off-policy with its ratio."""
    return -(lp_T - old_T).exp() * a


def per_call(one: Spoken, mini: list[Spoken]) -> float:
    """M-GRPO: a mean over an agent's trajectory, then over the episodes."""
    tokens = [o.turn.reply_tokens for o in mini
              if (o.episode, o.turn.role) == (one.episode, one.turn.role)]  # fmt: skip
    return 1 / len({o.episode for o in mini}) / sum(tokens)


FORMULAS: dict[str, tuple[Any, Any, Any]] = {
    "use: magrpo": (reference.less_mean, plain, reference.constant),
    "use: dr_mas": (dr_mas, reference.clipped(0.2, 0.2), reference.per_turn),
    "use: grpo, group: task_call, weight: call_mean": (m_grpo, reference.clipped(0.2, 0.2), per_call),
    "use: matpo": (matpo, reference.clipped(0.2, 0.2), reference.per_token),
    "use: gigpo": (gigpo, reference.clipped(0.2, 0.2), reference.per_turn),
}


@pytest.mark.parametrize("algorithm", FORMULAS)
def test_weights_after_four_steps_are_those_of_the_papers_formula(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
):
    monkeypatch.setitem(reference.FORMULAS, algorithm, FORMULAS[algorithm])
    scored, spoken = reference.team()
    ours, theirs, start = reference.network(), reference.network(), reference.network()
    spoken = reference.off_policy(spoken, start, 0.2)
    plan = reference.planned(toy, f"{algorithm}, {TWICE}")
    metrics = reference.by_masflow(plan, scored, spoken, ours, tmp_path)
    reference.by_formula(algorithm, spoken, theirs)
    assert reference.distance(ours, theirs) < 1e-8 < 1e-3 < reference.distance(ours, start)
    assert metrics["optimizer_steps"] == 4
    assert abs(metrics["ratio"] - 1) > 1e-3, "every ratio is 1: nothing off-policy was compared"
    assert (metrics["clip_frac"] > 0.05) == (algorithm != "use: magrpo")


def test_the_preset_of_m_grpo_is_what_was_compared(toy: Toy):
    plan = plan_of(toy, "use: grpo, group: task_call, weight: call_mean")
    teams = compile_experiment(teamed(toy))
    fields = ("group", "weight", "advantage", "clip", "turn_loss", "ratio")
    assert all(getattr(plan.algorithm, f) == getattr(teams.algorithm, f) for f in fields)


# -- what a plan has ------------------------------------------------------------------------------


def plan_of(toy: Toy, algorithm: str, *changes: tuple[str, str], workflow: Any = ()) -> Plan:
    return compile_experiment(toy((GRPO, f"algorithm: {{{algorithm}}}"), *changes, workflow=workflow))


def teamed(toy: Toy, algorithm: str = "use: m_grpo") -> Path:
    """The toy with its echoer in a sub-workflow that is called for the word and for its twin."""
    inner = """
name: team
task: {heard: str}
roles: {echoer: {prompt: "hear {{ heard }}", reply: {max_tokens: 3}}}
nodes: {echo: {role: echoer}}
edges: [start -> echo -> end]
output: {said: "{{ echo.text }}"}
"""
    file = toy(
        (GRPO, f"algorithm: {{{algorithm}}}"),
        ("warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n", ""),
        workflow=(
            ('  echoer: {prompt: "hear {{ call.text }}", reply: {max_tokens: 3}}\n', ""),
            ("echo: {role: echoer}", 'echo: {workflow: team.yaml, args: {heard: "{{ call.text }}"}}'),
            ("{{ echo.text }}", "{{ echo.said }}"),
        ),
    )
    (file.parent / "team.yaml").write_text(inner, encoding="utf-8")
    return file


def test_explain_tells_what_is_compared(toy: Toy):
    sizes = {
        "use: dr_mas": [["task", "caller", "each turn"], ["task", "echoer", "each turn"]],
        "use: matpo": [["task", "all roles", "each episode"]],
        "use: gigpo": [["task", "caller", "each episode"], ["task", "caller", "equal prompts"],
                       ["task", "echoer", "each episode"], ["task", "echoer", "equal prompts"]],
        "use: magrpo": [["task", "caller", "call"], ["task", "echoer", "echo"]],
    }  # fmt: skip
    for algorithm, keys in sizes.items():
        found = json.loads(explain(plan_of(toy, f"{algorithm}, samples: 4"), "json"))["groups"]
        assert [(g["key"], g["expected_size"]) for g in found] == [(key, 4) for key in keys]
    found = json.loads(explain(compile_experiment(teamed(toy)), "json"))["groups"]
    assert [g["key"] for g in found] == [
        ["task", "caller", "each episode"],
        ["task", "echo/echoer", "each call"],
    ]
    assert "each episode" in explain(plan_of(toy, "use: matpo"))


def test_at_grpo_brings_its_sampler_and_what_the_experiment_says_of_it_wins(toy: Toy):
    plan = plan_of(toy, "use: at_grpo", workflow=(OWN,))
    assert (plan.sampler.kind, plan.sampler.samples, plan.algorithm.samples) == ("nodes", 4, 4)
    assert plan.sampler.options == {"credit": "local", "continuations": 1, "advance": "best"}
    assert [entry["name"] for entry in plan.passes] == ["node_sampling"]
    assert "of a base episode, and goes on with the best; credit local" in explain(plan)
    said = "use: at_grpo}\npasses: [{node_sampling: {samples: 6}}]\n#"
    plan = plan_of(toy, said, workflow=(OWN,))
    assert plan.sampler.samples == 6 and plan.sampler.options["advance"] == "best"


# -- what is refused ------------------------------------------------------------------------------

WRONG, USELESS, FIXED = "wrong-pair", "option-without-effect", "fixed-by-algorithm"
NODES = "use: {}}}\npasses: [{{node_sampling: {{samples: 4}}}}]\n#"
REFUSED = [
    ("use: magrpo", (OWN,), WRONG, "'called' pays some turns alone", "credit: return_to_go"),
    ("use: magrpo, group: task_role", (), FIXED, "what makes magrpo", "remove 'group'"),
    ("use: dr_mas, group: task_role_path", (), FIXED, "what makes dr_mas", "remove 'group'"),
    ("use: dr_mas, singleton: role_baseline", (), WRONG, "turns at one place only", "task_role_path"),
    (NODES.format("dr_mas"), (), WRONG, "compares actions drawn from one context", "at_grpo"),
    ("use: m_grpo", (), WRONG, "no role that learns stands in a sub-workflow", "dr_mas"),
    ("use: matpo", (TO_GO,), WRONG, "gives turns one number", "credit: own"),
    ("use: gigpo", (OWN,), WRONG, "what 'called' pays stays with one turn", "credit: return_to_go"),
    ("use: grpo, step_weight: 0.5", (), USELESS, "aren't compared", "use: gigpo"),
    ("use: at_grpo", (), "no-local-reward", "sees a turn's own rewards", "rollout, advance: base"),
    ("use: at_grpo, samples: 8", (OWN,), "samples-twice", "how many actions are drawn", "node_sampling"),
    ("use: ppo, group: task_role", (), USELESS, "'gae' compares no groups", "group_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "workflow", "code", "says", "fix"), REFUSED)
def test_a_wrong_pair_is_refused_with_its_reason(
    toy: Toy, algorithm: str, workflow: Any, code: str, says: str, fix: str
):
    file = toy((GRPO, f"algorithm: {{{algorithm}}}"), workflow=workflow)
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if text.startswith("algorithm"))
    found = [p for p in check(file) if p.code == code and says in p.message]
    assert found, [f"{p.code}: {p}" for p in check(file)]
    assert fix in (found[0].fix or "") and found[0].line == line


def test_matpo_is_one_model_for_all_roles(toy: Toy):
    with pytest.raises(SpecError, match="here 2 policies learn"):
        plan_of(toy, "use: matpo", TWO)
    plan_of(toy, "use: matpo", (SHARED, TWO[1].replace("[echoer]", "[echoer], train: frozen")))


# -- whole runs -----------------------------------------------------------------------------------


def steps(out: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]


@pytest.mark.parametrize("use", ["magrpo", "dr_mas", "matpo", "gigpo"])
def test_a_run_learns_off_policy_from_wide_groups(toy: Toy, tmp_path: Path, use: str):
    schedule = ("steps: 4,", "steps: 2,")
    train(plan_of(toy, f"use: {use}, samples: 4, updates_per_step: 3, epochs: 2", schedule), tmp_path / "run")
    found = steps(tmp_path / "run")
    assert len(found) == 2 and any(one["batch"]["learnable_group_frac"] for one in found)
    learned = [p for one in found for p in one["policies"].values()]
    assert learned and all(p["optimizer_steps"] >= 2 and p["ratio"] != 1 for p in learned)


def test_a_run_of_m_grpo_learns_at_both_levels(toy: Toy, tmp_path: Path):
    file = teamed(toy, "use: m_grpo, samples: 4, updates_per_step: 3")
    plan = compile_experiment(
        file, overrides={"train.steps": "2", "mapping": "{models: {own: {roles: rest, per: role}}}"}
    )
    train(plan, tmp_path / "run")
    learned = {name for one in steps(tmp_path / "run") for name in one["policies"]}
    assert learned == {"own.caller", "own.echo.echoer"}


def test_a_run_of_at_grpo_draws_candidates_and_goes_on_with_the_best(toy: Toy, tmp_path: Path):
    schedule = ("steps: 4,", "steps: 2,")
    both = (CALLED, "level: turn, roles: [caller, echoer], weight: 1")
    text = ('args: {said: "{{ call.text }}", answer', 'args: {said: "{{ result.text }}", answer')
    plan = plan_of(toy, "use: at_grpo, updates_per_step: 3", schedule, workflow=(both, text))
    train(plan, tmp_path / "run")
    found = steps(tmp_path / "run")
    for one in found:
        assert one["nodes"]["contexts"] == 6 and one["nodes"]["sibling_turns"] == 18
        assert one["nodes"]["suffix_turns"] == 0 and one["episodes"] == 12
        assert one["batch"]["groups"] == 6
    assert any(p["ratio"] != 1 for one in found for p in one["policies"].values())


@pytest.mark.slow
def test_m_grpo_learns_a_toy_of_ten_seconds(toy: Toy, tmp_path: Path):
    """Main agent and sub-agent must say nothing but 'blue', whatever they hear."""
    file = teamed(toy, "use: m_grpo, samples: 4, updates_per_step: 2")
    schedule = {"train.steps": "32", "train.tasks_per_step": "8", "train.save_every": "null"}
    workflow = file.with_name("echo_workflow.yaml")
    head = workflow.read_text().split("rewards:")[0].rstrip()
    args = 'args: {said: "{{ call.text }} {{ echo.said }}"}'
    workflow.write_text(f'{head}\nrewards: [{{name: blue, use: "echo.py:blue", otherwise: 0, {args}}}]\n')
    blue = 'def blue(said: str) -> float:\n    return said.split().count("blue") / 6\n'
    file.with_name("echo.py").write_text(blue)
    train(compile_experiment(file, overrides=schedule), tmp_path / "run")
    rewards = [one["rewards"]["blue"] for one in steps(tmp_path / "run")]
    assert np.mean(rewards[:3]) < 0.15 and np.mean(rewards[-3:]) > 0.3, rewards
