"""Lowering: what a document's shorthand becomes in the graph."""

import pytest

from masflow.compiler import compile_workflow
from masflow.errors import SpecError

HEAD = """
name: tiny
task: {question: str}
params: {rounds: 12, agents: 3, team: [ann, bob]}
roles:
  solver: {prompt: "Answer {{ question }}", reply: {tag: answer}}
  critic: {prompt: "Check {{ question }}", reply: {json: {next: [again, done]}}}
"""
LOOP = """
nodes: {solve: {role: solver}, check: {role: critic}, last: {role: solver}}
edges:
  - start -> solve -> check
  - check -> last
  - check -> solve when CONDITION
  - last -> end
"""


def test_the_edge_without_a_condition_is_tried_last(graph_of):
    arrows = graph_of(HEAD + LOOP.replace("CONDITION", "check.next == 'again'")).node("check").arrows
    assert [(a.targets, a.when) for a in arrows] == [(("solve",), "check.next == 'again'"), (("last",), None)]


@pytest.mark.parametrize(
    ("condition", "most"),
    [
        ("visits.solve < 20", 21),
        ("visits.check <= params.rounds", 13),
        ("params.rounds > visits.solve", 13),
        ("visits.solve < params.rounds - 1 and check.next == 'again'", 12),
        ("visits.solve < 3", 8),
        ("check.next == 'again'", 8),
    ],
)
def test_a_bound_in_a_condition_raises_the_limit_of_every_node_in_its_loop(graph_of, condition, most):
    graph = graph_of(HEAD + LOOP.replace("CONDITION", condition))
    assert [graph.node(n).max_visits for n in ("solve", "check", "last")] == [most, most, 8]


def test_the_limit_of_turns_follows_and_an_explicit_one_stays(graph_of):
    bounded = HEAD + LOOP.replace("CONDITION", "visits.solve < 100")
    assert graph_of(bounded).limits.turns == 101 + 101 + 1  # two roles in the loop, one visit after it
    assert graph_of(bounded + "limits: {turns: 30}\n").limits.turns == 30


def test_a_nodes_own_limit_stays(graph_of):
    text = HEAD + LOOP.replace("CONDITION", "visits.check < 50").replace(
        "solve: {role: solver}", "solve: {role: solver, limits: {visits: 4}}"
    )
    assert graph_of(text).node("solve").max_visits == 4


def test_copies_and_families_become_members(graph_of):
    text = (
        HEAD
        + """
  debater: {prompt: "Say {{ question }}", copies: "{{ params.agents }}"}
  player: {prompt: "{{ me }} says {{ question }}", names: "{{ params.team }}"}
nodes:
  solve: {role: solver}
  check: {role: critic}
  speak: {role: debater}
  move: {role: player, speaker: "params.team[0]"}
edges: [start -> solve -> check -> speak -> move -> end]
"""
    )
    graph = graph_of(text)
    assert graph.role("debater").members == ("debater_0", "debater_1", "debater_2")
    assert not graph.role("debater").is_family
    assert graph.role("player").members == ("ann", "bob") and graph.role("player").is_family


def test_prompts_come_from_files_beside_the_workflow_or_at_the_root(graph_of):
    text = """
name: tiny
task: {question: str}
roles:
  one: {prompt: tiny/one.md, system: shared/system.md}
nodes: {a: {role: one}, b: {role: one, prompt: "Again {{ question }}"}}
edges: [start -> a -> b -> end]
"""
    graph = graph_of(text, {"tiny/one.md": "One: {{ question }}\n", "shared/system.md": "Be brief.\n"})
    assert graph.role("one").prompt == graph.node("a").prompt == "One: {{ question }}\n"
    assert graph.role("one").system == "Be brief.\n"
    assert graph.node("b").prompt == "Again {{ question }}"
    assert graph.node("a").prompt_file.endswith("tiny/one.md")


INNER = """
name: inner
task: {topic: str}
params: {depth: 1}
roles: {worker: {prompt: "Work on {{ topic }}", copies: "{{ params.depth }}"}}
nodes: {work: {role: worker}}
edges: [start -> work -> end]
output: {text: "{{ work.text }}"}
"""


def test_a_sub_workflow_is_lowered_once_a_set_of_parameters(project):
    text = (
        HEAD
        + """
nodes:
  first: {workflow: inner.yaml, args: {topic: "{{ question }}"}}
  second: {workflow: inner.yaml, args: {topic: "{{ question }}"}}
  third: {workflow: inner.yaml, args: {topic: "{{ question }}"}, params: {depth: "{{ params.agents }}"}}
  solve: {role: solver}
  check: {role: critic}
edges: [start -> first -> second -> third -> solve -> check -> end]
"""
    )
    root, graphs = compile_workflow(project({"tiny.yaml": text, "inner.yaml": INNER}))
    calls = [graphs[root].node(n).workflow for n in ("first", "second", "third")]
    assert root == "tiny" and calls[0] == calls[1] == "inner" and calls[2] != "inner"
    assert graphs["inner"].role("worker").members == ("worker_0",)
    assert len(graphs[str(calls[2])].role("worker").members) == 3


def test_a_sub_workflow_may_be_named_or_written_in_place(project):
    inline = "{name: small, nodes: {n: {set: {}}}, edges: [start -> n -> end]}"
    text = f"""
name: tiny
workflows: {{helpers: inner.yaml, own: {inline}}}
nodes:
  a: {{workflow: helpers, args: {{topic: tea}}}}
  b: {{workflow: own}}
  c: {{workflow: {inline.replace("small", "other")}}}
edges: [start -> a -> b -> c -> end]
"""
    root, graphs = compile_workflow(project({"tiny.yaml": text, "inner.yaml": INNER}))
    assert [n.workflow for n in graphs[root].nodes] == ["inner", "small", "other"]


def test_two_workflows_that_call_each_other_are_refused(project):
    def calling(name: str, other: str) -> str:
        return f"name: {name}\nnodes: {{go: {{workflow: {other}.yaml}}}}\nedges: [start -> go -> end]\n"

    with pytest.raises(SpecError) as caught:
        compile_workflow(
            project({"ping.yaml": calling("ping", "pong"), "pong.yaml": calling("pong", "ping")})
        )
    assert [p.code for p in caught.value.problems] == ["recursive-workflow"]


def test_calls_that_multiply_are_refused_before_they_fill_the_memory(project):
    text = (
        "name: wI\nnodes: {a: {workflow: wJ.yaml}, b: {workflow: wJ.yaml}}\nedges: [start -> a -> b -> end]\n"
    )
    files = {f"w{i}.yaml": text.replace("I", str(i)).replace("J", str(i + 1)) for i in range(14)}
    last = "name: w14\nnodes: {a: {set: {}}}\nedges: [start -> a -> end]\n"
    with pytest.raises(SpecError) as caught:
        compile_workflow(project({**files, "w14.yaml": last}))
    assert {p.code for p in caught.value.problems} == {"too-many-calls"}


def test_problems_of_several_kinds_come_together(project):
    text = (
        HEAD
        + """
tools: {sums: {use: calculater}}
nodes:
  solve: {role: sovler}
  check: {role: critic, set: {nowhere: 1}}
  sum: {tool: sums, args: {expression: "1"}}
edges:
  - start -> solve -> check -> sum -> end
  - solve -> end
"""
    )
    with pytest.raises(SpecError) as caught:
        compile_workflow(project({"tiny.yaml": text}))
    codes = {p.code for p in caught.value.problems}
    assert {"unknown-tool", "unknown-role", "unknown-state-field", "two-unconditional-edges"} <= codes


def test_a_tool_whose_parameters_are_left_out_offers_those_of_its_function(graph_of):
    text = """
name: tiny
task: {question: str}
roles: {agent: {prompt: "Do {{ question }}", tools: [shop, cart]}}
tools: {shop: {use: "shop.py:find", top_k: 3}, cart: {use: "shop.py:Cart", scope: episode, size: 4}}
nodes: {act: {role: agent}}
edges: [start -> act -> end]
"""
    code = (
        "def find(query: str, top_k: int):\n    return []\n\n\n"
        "class Cart:\n"
        "    def __init__(self, size: int):\n        self.size = size\n\n"
        "    def __call__(self, item: str):\n        return item\n"
    )
    tools = {t.name: t for t in graph_of(text, {"shop.py": code}).tools}
    assert list(tools["shop"].parameters) == ["query"]
    assert list(tools["cart"].parameters) == ["item"]
