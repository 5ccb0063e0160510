"""Workflows that are functions: deep research played whole, and M-ASK as a graph and as a function."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from masflow.compiler import check, compile_experiment
from masflow.models.scripted import ScriptedEngine
from masflow.rl.batch import build_batch
from masflow.rl.score import score
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.runtime.recorded import recorded_graph
from masflow.trace import EpisodeKey, path_json

ROOT = Path(__file__).parents[2]
TWIN = Path(__file__).parent / "twins" / "m_ask.py"
QUESTION = {"question": "Which river flows through the birthplace of Marie Curie?", "answers": ["Vistula"]}


def compiled(path, workflow, mapping="shared", **params):
    path.write_text(
        json.dumps(
            {
                "workflow": {"use": str(workflow), "params": params},
                "mapping": str(ROOT / "mappings" / f"{mapping}.yaml"),
                "base": "some/model",
            }
        )
    )
    return compile_experiment(path)


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def last(request):
    return request.messages[-1].content


def reader(request):
    """Searches for its topic once, then reports the first passage."""
    if request.messages[-1].role == "tool":
        return f"<report>{last(request).splitlines()[0]}</report>"
    topic = last(request).splitlines()[0].removeprefix("Look up: ")
    return "no idea" if topic == "nothing" else call("wiki", query=topic)


def lead(request):
    """Sends one browser more and the clerk, then answers."""
    turns = sum(m.role == "assistant" for m in request.messages)
    asks = [call("browse", topic="Vistula"), call("compute", problem="6 times 7")]
    return asks[turns] if turns < 2 else "<answer>the Vistula</answer>"


def clerk(request):
    return f"<report>{last(request)}</report>" if "tool" in request.messages[-1].role else call(
        "calculator", expression="6*7"
    )  # fmt: skip


SCRIPT = {
    "planner": ['{"topics": ["Marie Curie", "nothing", "Warsaw", "one too many"]}'],
    "lead": lead,
    "reader": reader,
    "clerk": clerk,
}


def one_episode(plan, script=SCRIPT, task=QUESTION, sample=0):
    player = Player(plan)
    state = player.start(task, EpisodeKey(0, "train", 1, 0, "task", sample))
    [trajectory] = play(player, [state], ScriptedEngine(script).generate)
    return player, state, trajectory


@pytest.fixture
def research(tmp_path):
    assert check(ROOT / "workflows" / "deep_research.py") == []
    return compiled(tmp_path / "e.yaml", ROOT / "workflows" / "deep_research.py", "separate")


def test_deep_research_starts_an_inner_episode_a_call_on_a_policy_of_its_own(research):
    _, _, one = one_episode(research)
    assert one.outcome == "ok" and one.output == {"answer": "the Vistula"}, one.detail
    assert [(t.node, t.superstep) for t in one.turns] == [
        ("planner", 1),
        ("browse/reader", 2), ("browse/reader", 2), ("browse/reader", 2),
        ("browse/reader", 3), ("browse/reader", 3),
        ("lead", 4), ("browse/reader", 5), ("browse/reader", 6),
        ("lead", 7), ("compute/clerk", 8), ("compute/clerk", 9), ("lead", 10),
    ]  # fmt: skip
    assert {t.policy for t in one.turns} == {
        "own.planner",
        "own.lead",
        "own.browse.reader",
        "own.compute.clerk",
    }
    prompts = [t.messages for t in one.turns if t.node == "lead"]
    assert "- Marie Curie: Marie Curie" in prompts[0][-1].content and "nothing:" not in prompts[0][-1].content
    assert prompts[1][-1].content == "Warsaw, the capital of Poland, lies on the river Vistula."
    assert "42" in prompts[2][-1].content
    assert len({path_json(t.path) for t in one.turns}) == len(one.turns)


def test_an_inner_episode_is_paid_the_score_of_the_main_one(research):
    _, _, one = one_episode(research)
    [scored] = score(research, [one])
    assert scored.metrics["f1"] == 1.0 and scored.metrics["form"] == pytest.approx(-1 / 13)
    assert [scored.totals[t.id] for t in one.turns] == [
        0.5 if t.text == "no idea" else 1.0 for t in one.turns
    ]


def test_calls_at_the_same_place_are_compared_though_their_number_varies(research):
    few = {**SCRIPT, "planner": ['{"topics": ["Warsaw"]}']}
    wrong = {**SCRIPT, "lead": ["<answer>Oder</answer>"]}
    episodes = [one_episode(research, script, sample=i)[2] for i, script in enumerate((SCRIPT, few, wrong))]
    batch = build_batch(research, score(research, episodes), num_episodes=3, step=1)
    sizes = {}
    for group in batch.groups:
        sizes.setdefault(group.key[2], []).append(len(group.turns))
    assert sizes["planner"] == [3] and sizes["lead"][0] == 3
    assert sorted(sizes["browse/reader"], reverse=True)[0] == 3  # the first topic's browser, in all three
    assert 1 in sizes["browse/reader"] or 2 in sizes["browse/reader"]


@settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 12))
def test_deep_research_forks_at_any_turn_and_told_the_same_is_the_same(research, at):
    player, state, one = one_episode(research)
    fork = player.fork(state, one.turns[at].id, (path_json(one.turns[at].path), 1, 0))
    [again] = play(player, [fork], ScriptedEngine(SCRIPT).generate)
    assert [(t.path, t.text, t.superstep, t.messages[-1].content) for t in again.turns] == [
        (t.path, t.text, t.superstep, t.messages[-1].content) for t in one.turns
    ]
    assert [(e.path, e.args, e.value) for e in again.effects] == [
        (e.path, e.args, e.value) for e in one.effects
    ]
    assert (again.outcome, again.output) == (one.outcome, one.output)


def test_the_recorded_graph_has_the_turns_and_their_order(research):
    _, _, one = one_episode(research)
    text = recorded_graph(one)
    assert text.startswith("flowchart TD") and text.count("subgraph") == 5
    assert (text.count('(["reader"])'), text.count('(["reader call 2"])')) == (3, 3)
    assert '(["reader: malformed"])' in text and 'subgraph b1["browse [0]"]' in text
    arrows = [line.split(" --> ") for line in text.splitlines() if "-->" in line]
    pairs = sum(max(1, len(ids)) for ids in one.predecessors.values())
    assert len(arrows) == pairs + 1  # and one to the end


STEP = {"question": "Where was Marie Curie born?", "answer": "?"}
M_ASK = {
    "plan": ['{"steps": [' + json.dumps(STEP) + '], "answer": "Seine"}'],
    "search": ["<action>search</action><query>Marie Curie</query>", "<action>search</action>",
               "<action>stop</action>"],
    "summarise": ["<evidence>born in Warsaw</evidence>", "<evidence>Warsaw lies on the Vistula</evidence>"],
    "update": ['{"step": 1, "question": "Where was Marie Curie born?", "answer": "Warsaw"}',
               '{"step": null, "question": "Which river?", "answer": "Vistula"}'],
    "answer": ["<answer>river Weichsel</answer>", "<answer>the Vistula</answer>"],
}  # fmt: skip
ROLE_OF = {"plan": "planner", "search": "searcher", "summarise": "summariser", "update": "updater",
           "answer": "answerer"}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [{}, {"search": ["<action>stop</action>"]}, {"update": ["no JSON"]}, {"summarise": ["nothing"]},
     {"plan": ['{"steps": [], "answer": "a"}']}],
)  # fmt: skip
def test_m_ask_as_a_function_is_the_same_episode(tmp_path, changed):
    graph = compiled(tmp_path / "graph.yaml", ROOT / "workflows" / "m_ask.yaml", rounds=3, top_k=2)
    function = compiled(tmp_path / "function.yaml", f"{TWIN}:m_ask", rounds=3, top_k=2)
    assert [p.code for p in check(TWIN)] == ["warn-order-unknown"]
    script = {**M_ASK, **changed}
    ones = [
        score(plan, [one_episode(plan, lines)[2]])[0]
        for plan, lines in (
            (graph, script),
            (function, {ROLE_OF[node]: lines for node, lines in script.items()}),
        )
    ]
    told = [
        [(t.role, t.visit, t.superstep, t.messages, t.text, t.value, t.ok, t.outcome, one.totals[t.id],
          one.components[t.id]) for t in one.trajectory.turns]
        for one in ones
    ]  # fmt: skip
    drop_ids = [
        [(*row[:3], [(m.role, m.content) for m in row[3]], *row[4:]) for row in rows] for rows in told
    ]
    assert drop_ids[0] == drop_ids[1] and len(drop_ids[0]) >= 2
    a, b = (one.trajectory for one in ones)
    assert a.outcome == b.outcome and ones[0].metrics == ones[1].metrics
    tools = [[(e.args, e.value, e.superstep) for e in t.effects if e.kind == "tool"] for t in (a, b)]
    assert tools[0] == tools[1]
    if a.outcome == "ok":
        assert a.output == b.output
