"""Rewards of episodes that were really played: retries, tool loops, measured calls, cancelled branches."""

from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.rl.batch import build_batch

FUNCTIONS = '''
def same(a, b) -> float:
    return float(a == b)

def number(x: float) -> float:
    return x

def rate(program: str) -> float:
    return {"bad": 0.0, "half": 0.5, "good": 1.0}[program]

def lookup(word: str) -> str:
    """Look a word up."""
    return word.upper()

def shares(trajectory) -> dict:
    return {turn.id: 1 / turn.superstep for turn in trajectory.turns if turn.ok}
'''


@pytest.fixture
def plan(tmp_path: Path):
    def make(workflow):
        (tmp_path / "fns.py").write_text(FUNCTIONS)
        (tmp_path / "w.yaml").write_text(workflow)
        (tmp_path / "e.yaml").write_text(
            "workflow: w.yaml\nmapping: {models: {m: {roles: rest}}}\nbase: some/model\n"
        )
        return compile_experiment(tmp_path / "e.yaml")

    return make


CODE = """
name: code
task: {goal: str}
roles:
  coder: {prompt: "write {{ goal }}", reply: {tag: program, max_tokens: 4, on_malformed: {retry: 1}}}
  reflector: {prompt: "think about {{ test }}", reply: {max_tokens: 4}}
nodes:
  code: {role: coder}
  test: {call: "fns.py:rate", args: {program: "{{ code.program or 'bad' }}"}}
  reflect: {role: reflector}
edges:
  - start -> code -> test
  - test -> end when test == 1 or visits.test >= 3
  - test -> reflect -> code
output: {rate: "{{ test }}"}
rewards:
  - name: gained
    use: fns.py:number
    otherwise: 0
    measure: {after: [test], args: {x: "{{ result }}"}}
    pay: {coder: gain, reflector: gain}
  - {name: form, use: well_formed, level: turn, weight: 2}
"""


def test_a_measured_call_pays_the_coder_before_it_and_the_reflector_what_follows(plan, episode):
    script = {"code": ["<program>half</program>", "<program>good</program>"], "reflect": ["hm"]}
    played = episode(plan(CODE), {"goal": "sort"}, script)
    assert played.spoken == ["code@1", "reflect@2", "code@3"]
    assert played.totals == [0.5, 0.5, 0.5]
    assert played.metrics == {"gained": 1, "form": 0}


def test_a_retried_attempt_is_paid_for_its_form_only_and_the_last_one_for_the_rest(plan, episode):
    lines = iter(["half", "<program>good</program>"])
    script = {"code": lambda request: next(lines)}
    played = episode(plan(CODE), {"goal": "sort"}, script)
    assert [(t.step.attempt, t.ok) for t in played.turns] == [(0, False), (1, True)]
    assert played.totals == [-2, 1]


def test_a_loop_that_never_gets_there_is_paid_what_it_got(plan, episode):
    script = {"code": ["<program>half</program>", "<program>bad</program>"], "reflect": ["hm"]}
    played = episode(plan(CODE), {"goal": "sort"}, script)
    # 0 -> 0.5 -> 0 -> 0
    assert played.totals == [0.5, -0.5, -0.5, 0, 0]


REACT = """
name: react
task: {word: str}
roles:
  agent: {prompt: "shout {{ word }}", reply: {tag: answer, max_tokens: 8}, tools: [lookup], max_calls: 2}
tools:
  lookup: {use: "fns.py:lookup"}
nodes: {ask: {role: agent}}
edges: [start -> ask -> end]
output: {answer: "{{ ask.answer or '' }}"}
rewards:
  - {name: right, use: "fns.py:same", level: turn, otherwise: 0, args: {a: "{{ result.answer }}", b: HEY}}
  - {name: form, use: well_formed, level: turn, weight: 10}
"""


def test_every_model_call_of_a_tool_loop_earns_what_its_visit_earned(plan, episode):
    call = '{"name": "lookup", "arguments": {"word": "hey"}}'
    lines = [f"<tool_call>{call}</tool_call>", "<answer>HEY</answer>"]
    played = episode(
        plan(REACT), {"word": "hey"}, {"ask": lambda r: lines[sum(m.role == "tool" for m in r.messages)]}
    )
    assert [t.step.model_call for t in played.turns] == [0, 1]
    assert played.totals == [1, 1]
    lines[1] = "HEY"
    broken = episode(
        plan(REACT), {"word": "hey"}, {"ask": lambda r: lines[sum(m.role == "tool" for m in r.messages)]}
    )
    assert broken.totals == [0, -10]


BRANCHES = """
name: branches
task: {goal: str}
roles:
  a: {prompt: "do {{ goal }}", reply: {max_tokens: 4}}
  b: {prompt: "do {{ goal }}", reply: {max_tokens: 4}}
  c: {prompt: "join {{ goal }}", reply: {max_tokens: 4}}
nodes:
  first: {role: a}
  slow: {role: b}
  slower: {role: b}
  done: {role: c, join: any}
edges:
  - start -> first & slow
  - slow -> slower -> done
  - first -> done -> end
output: {}
rewards:
  - {name: share, use: "fns.py:shares", level: turn}
"""


def test_cancelled_branches_are_masked_and_an_allocator_pays_whom_it_likes(plan, episode):
    made = plan(BRANCHES)
    found = [episode(made, {"goal": "x"}, {"*": ["ok"]}, sample) for sample in range(2)]
    played = found[0]
    outcomes = {t.node: t.outcome for t in played.turns}
    assert outcomes == {"first": "ok", "slow": "cancelled", "slower": "cancelled", "done": "ok"}
    totals = {t.node: played.scored.totals[t.id] for t in played.turns}
    assert totals == {"first": 1, "slow": 1, "slower": 0.5, "done": 0.5}
    batch = build_batch(made, [one.scored for one in found], 2, 1)
    assert [g.key[3][-1].node for g in batch.groups] == ["first", "done"]
    assert batch.stats["masked_turns"] == 4
