"""A sub-workflow's rewards fire inside a parent only when its node says `rewards: keep`."""

from pathlib import Path

import pytest

from masflow.compiler import compile_experiment

INNER = """
name: inner
task: {word: str}
roles: {echo: {prompt: "{{ word }}", reply: {tag: said, max_tokens: 4}}}
nodes: {say: {role: echo}}
edges: [start -> say -> end]
output: {said: "{{ say.said or '' }}"}
rewards:
  - {name: end, use: "fns.py:same", args: {a: "{{ say.said }}", b: "{{ word }}"}, otherwise: -1}
  - {name: turn, use: "fns.py:same", level: turn, weight: 10, otherwise: 0,
     args: {a: "{{ result.said }}", b: x}}
"""
OUTER = """
name: outer
task: {words: [str]}
roles: {boss: {prompt: "go on", reply: {max_tokens: 4}}}
nodes:
  begin: {role: boss}
  each: {workflow: inner.yaml, foreach: words, as: word, args: {word: "{{ word }}"}, rewards: KEEP}
edges: [start -> begin -> each -> end]
output: {}
rewards: [{name: team, use: "fns.py:same", args: {a: 1, b: 1}, weight: 100}]
"""


@pytest.fixture
def plan(tmp_path: Path):
    def make(keep):
        (tmp_path / "fns.py").write_text("def same(a, b) -> float:\n    return float(a == b)\n")
        (tmp_path / "inner.yaml").write_text(INNER)
        (tmp_path / "outer.yaml").write_text(OUTER.replace("KEEP", keep))
        (tmp_path / "e.yaml").write_text(
            "workflow: outer.yaml\nmapping: {models: {m: {roles: rest}}}\nbase: some/model\n"
        )
        return compile_experiment(tmp_path / "e.yaml")

    return make


SCRIPT = {"begin": ["go"], "say": ["<said>x</said>"]}


def test_kept_rewards_pay_each_call_by_its_own_names(plan, episode):
    played = episode(plan("keep"), {"words": ["x", "z"]}, SCRIPT)
    # the boss gets the team's 100 alone; call 0 said its word x (1 + 10), call 1 should have said z (0 + 10)
    assert [t.node for t in played.turns] == ["begin", "each/say", "each/say"]
    assert played.totals == [100, 111, 110]
    assert played.metrics == {"team": 1, "each/end": 0.5, "each/turn": 1}


def test_dropped_rewards_pay_nothing(plan, episode):
    played = episode(plan("drop"), {"words": ["x", "z"]}, SCRIPT)
    assert (played.totals, played.metrics) == ([100, 100, 100], {"team": 1})


def test_a_kept_reward_pays_otherwise_when_its_call_was_malformed(plan, episode):
    played = episode(plan("keep"), {"words": ["x"]}, {**SCRIPT, "say": ["no tag"]})
    assert played.totals == [100, 99]


NESTED = """
name: nested
task: {words: [str]}
state: {seen: {type: [str], default: [], merge: append}}
nodes:
  each: {workflow: inner.yaml, foreach: words, as: word, in_order: true, args: {word: "{{ word }}"},
    write: {seen: "{{ word }}"}}
  again: {workflow: inner.yaml, args: {word: last}, write: {seen: last}}
edges: [start -> each -> again -> end]
output: {}
rewards: [{name: count, use: "fns.py:number", level: turn, args: {x: "{{ len(state.seen) }}"}}]
"""


def test_a_turn_reward_on_a_sub_workflows_turn_sees_the_parents_names_at_that_call(tmp_path, plan, episode):
    plan("drop")
    (tmp_path / "fns.py").write_text("def number(x: float) -> float:\n    return x\ndef same(a, b): ...\n")
    (tmp_path / "outer.yaml").write_text(NESTED)
    played = episode(compile_experiment(tmp_path / "e.yaml"), {"words": ["a", "b"]}, SCRIPT)
    assert [t.node for t in played.turns] == ["each/say", "each/say", "again/say"]
    assert played.totals == [
        2,
        2,
        3,
    ]  # both items belong to one visit of `each`, which ends with two words seen
