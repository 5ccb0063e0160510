"""The Python builder gives the spec that the YAML gives, and its problems name the caller's line."""

# pyright: reportUnusedExpression=false
# `a >> b` draws an edge.

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from masflow.compiler import compile_workflow
from masflow.dsl import Workflow, experiment, field, mapping, runtime
from masflow.errors import SpecError
from masflow.project import Loaded, load, load_data
from masflow.spec.workflow import Workflow as WorkflowSpec

ROOT = Path(__file__).resolve().parents[1]


def document(tmp_path: Path, text: str) -> Loaded[Any]:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    return load(path)


def line() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


@dataclass
class Step:
    question: str
    answer: str


def test_a_loop_with_state_measured_rewards_and_python_types_is_the_shipped_m_ask():
    team = Workflow(
        "m_ask",
        summary="Plan, then search, condense and revise for some rounds, answering after each.",
        task={"question": str, "answers": field(list[str], hidden=True)},
        params={"rounds": 3, "top_k": 5, "corpus": "passages.jsonl"},
        state={"steps": field(list[Step], default=[]), "guess": field(str, default="")},
    )
    planner = team.role(
        "planner",
        prompt="m_ask/planner.md",
        reply={"json": {"steps": list[Step], "answer": str}, "max_tokens": 256},
    )
    searcher = team.role(
        "searcher",
        prompt="m_ask/searcher.md",
        reply={"tags": {"action": Literal["search", "stop"], "query": str | None}, "max_tokens": 48},
    )
    summariser = team.role(
        "summariser", prompt="m_ask/summariser.md", reply={"tag": "evidence", "max_tokens": 128}
    )
    updater = team.role(
        "updater",
        prompt="m_ask/updater.md",
        reply={"json": {"step": int | None, "question": str, "answer": str}, "max_tokens": 96},
    )
    answerer = team.role("answerer", prompt="m_ask/answerer.md", reply={"tag": "answer", "max_tokens": 32})
    wiki = team.tool("wiki", use="bm25", corpus="{{ params.corpus }}", top_k="{{ params.top_k }}")

    plan = team.node(
        "plan", role=planner, set={"steps": "{{ result.steps }}", "guess": "{{ result.answer }}"}
    )
    search = team.node("search", role=searcher)
    retrieve = team.node("retrieve", tool=wiki, args={"query": "{{ search.query or '' }}"})
    summarise = team.node("summarise", role=summariser)
    update = team.node("update", role=updater)
    edit = team.node(
        "edit",
        call="m_ask/steps.py:edit",
        args={"steps": "{{ state.steps }}", "change": "{{ update }}"},
        set={"steps": "{{ result }}"},
    )
    answer = team.node("answer", role=answerer, set={"guess": "{{ result.answer }}"})

    team.start >> plan >> search
    search.when("search.action == 'stop'") >> team.end
    search >> retrieve >> summarise >> update >> edit >> answer
    answer.when("visits.answer < params.rounds") >> search
    answer >> team.end

    team.output(answer="{{ state.guess }}", steps="{{ state.steps }}")
    others = dict.fromkeys([searcher, summariser, updater], "gain")
    team.reward(
        "f1",
        use="rewards/qa.py:token_f1",
        otherwise=0,
        measure={
            "after": [plan, answer],
            "args": {"prediction": "{{ result.answer }}", "answers": "{{ answers }}"},
        },
        pay={planner: "value", answerer: "value", **others},
    )
    team.reward("form", use="well_formed", level="turn")
    assert team.build().spec == load(ROOT / "workflows/m_ask.yaml").spec


def test_fan_out_foreach_switch_and_join_equal_their_yaml(tmp_path):
    written = document(
        tmp_path,
        """
name: mix
task: {question: str, topics: [str]}
roles:
  writer: {prompt: "Write about {{ question }}", copies: 2, reply: {tag: text}}
  judge: {prompt: "Judge {{ question }}", reply: {choice: [good, bad]}}
nodes:
  a: {role: writer}
  b: {role: writer, foreach: topics, as: topic, when: topics, with: {about: "{{ topic }}"}}
  c: {role: judge, join: any}
edges:
  - start -> a & b -> c
  - {from: c, switch: c.choice, to: {good: end, bad: [a, b]}}
limits: {visits: 4}
""",
    )
    team = Workflow("mix", task={"question": str, "topics": list[str]}, limits={"visits": 4})
    writer = team.role("writer", prompt="Write about {{ question }}", copies=2, reply={"tag": "text"})
    judge = team.role("judge", prompt="Judge {{ question }}", reply={"choice": ["good", "bad"]})
    a = team.node("a", role=writer)
    b = team.node(
        "b", role=writer, foreach="topics", as_="topic", when="topics", with_={"about": "{{ topic }}"}
    )
    c = team.node("c", role=judge, join="any")
    team.start >> (a & b) >> c
    c.switch("c.choice", {"good": team.end, "bad": [a, b]})
    assert team.build().spec == written.spec


def test_a_sub_workflow_of_another_builder_equals_one_written_in_place(tmp_path):
    written = document(
        tmp_path,
        """
name: outer
task: {question: str}
nodes:
  ask:
    workflow:
      name: inner
      task: {topic: str}
      roles: {worker: {prompt: "Say {{ topic }}"}}
      nodes: {say: {role: worker}}
      edges: [start -> say -> end]
      output: {text: "{{ say.text }}"}
    args: {topic: "{{ question }}"}
    rewards: keep
edges: [start -> ask -> end]
output: {text: "{{ ask.text }}"}
""",
    )
    inner = Workflow("inner", task={"topic": str})
    say = inner.node("say", role=inner.role("worker", prompt="Say {{ topic }}"))
    inner.start >> say >> inner.end
    inner.output(text="{{ say.text }}")
    team = Workflow("outer", task={"question": str})
    ask = team.node("ask", workflow=inner, args={"topic": "{{ question }}"}, rewards="keep")
    team.start >> ask >> team.end
    team.output(text="{{ ask.text }}")
    assert team.build().spec == written.spec
    root, graphs = compile_workflow(team.build())
    assert root == "outer" and set(graphs) == {"outer", "inner"}


def test_the_builders_documents_equal_the_shipped_ones():
    assert mapping({"policy": {"roles": "rest"}}).spec == load(ROOT / "mappings/shared.yaml").spec
    local = load(ROOT / "runtime/local.yaml")
    assert runtime(**local.spec.model_dump()).spec == local.spec
    shipped = load(ROOT / "examples/quickstart.yaml").spec
    settings = shipped.model_dump(exclude_unset=True, exclude={"workflow", "mapping"})
    built = experiment("workflows/quickstart.yaml", "mappings/shared.yaml", **settings)
    assert built.spec == shipped


def test_an_experiment_holds_a_builder_and_a_mapping_in_place():
    team = tiny()
    built = experiment(
        team, mapping({"own": {"roles": "rest", "per": "role"}}), params={"n": 2}, train={"steps": 3}
    ).spec
    assert isinstance(built.workflow.use, WorkflowSpec) and built.workflow.params == {"n": 2}
    assert built.mapping.models["own"].per == "role" and built.train.steps == 3


def tiny() -> Workflow:
    team = Workflow("tiny", task={"question": str})
    solve = team.node("solve", role=team.role("solver", prompt="Answer {{ question }}"))
    team.start >> solve >> team.end
    return team


def exact(answer: str) -> float:
    return 0.0


def test_a_function_of_a_file_is_named_by_its_file():
    team = tiny()
    team.reward("exact", use=exact, args={"answer": "{{ solve.text }}"})
    assert team.build().spec.rewards[0].use == f"{Path(__file__).resolve()}:exact"


def test_problems_name_the_callers_file_and_line():
    team = Workflow("tiny", task={"question": str})
    solver = team.role("solver", prompt="Answer {{ question }}", replay={"tag": "answer"})
    role_line = line() - 1
    solve = team.node("solve", role=solver, tool="calculator")
    node_line = line() - 1
    team.start >> solve
    team.edge("solve -> end when")
    edge_line = line() - 1
    team.reward("exact", use=lambda answer: 0.0)
    reward_line = line() - 1
    with pytest.raises(SpecError) as caught:
        team.build()
    assert [(p.code, p.line) for p in caught.value.problems] == [("local-function", reward_line)]
    team._problems.clear()
    with pytest.raises(SpecError) as caught:
        team.build()
    found = {(p.code, p.line) for p in caught.value.problems}
    assert found == {("unknown-key", role_line), ("several-kinds", node_line), ("cut-edge", edge_line)}
    assert all(p.file.endswith("test_dsl.py") for p in caught.value.problems)


def test_a_name_used_twice_names_both_lines():
    team = tiny()
    first = line() - 1
    team.role("critic", prompt="Judge {{ question }}")
    team.role("critic", prompt="Judge {{ question }}")
    second = line() - 1
    with pytest.raises(SpecError, match=f"test_dsl.py:{second - 1}") as caught:
        team.build()
    assert caught.value.problems[0].line == second > first


def test_a_nullable_list_is_refused_because_the_language_has_none():
    with pytest.raises(SpecError, match="can't be null"):
        Workflow("x", task={"a": list[str] | None})


@pytest.mark.parametrize("whole", [True, False])
def test_a_spec_dumped_as_data_reads_back_equal(whole):
    for folder in ("workflows", "mappings", "runtime", "examples"):
        for path in sorted((ROOT / folder).glob("*.yaml")):
            loaded = load(path)
            data = loaded.spec.model_dump(exclude_unset=not whole)
            again = load_data(data, loaded.source, loaded.kind, loaded.root)
            assert again.spec == loaded.spec, path
