"""Tools, people, hand-overs and outcomes, each in a small workflow on the scripted engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler.demonstrations import demonstration_problems
from masflow.compiler.plan import Plan, SourceIR
from masflow.errors import EpisodeError, RunError
from masflow.models.engine import Reply, Request
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.runtime.state import EpisodeState
from masflow.trace import DEFAULT_POLICY, EpisodeKey, Trajectory

Play = Callable[..., Trajectory]
Compile = Callable[..., Plan]


def key(slot: int = 0) -> EpisodeKey:
    return EpisodeKey(7, "train", 3, slot, f"task{slot}", 0)


def call(name: str, **arguments: object) -> str:
    return f"let me see <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


REACT = """
    name: react
    tools: {double: {use: "fns.py:double"}}
    roles:
      solver: {prompt: "solve it", reply: {tag: answer}, tools: [double], max_calls: 2}
    nodes: {solve: {role: solver}}
    edges: [start -> solve -> end]
    output: {answer: "{{ solve.answer }}"}
"""
DOUBLE = {"fns.py": 'def double(n: int) -> int:\n    """Twice a number."""\n    return 2 * n\n'}


def test_a_react_role_calls_tools_until_it_answers(played: Play):
    said = iter([call("double", n=2), call("double", n=4), "<answer>8</answer>"])
    one = played(REACT, {"solver": lambda _: next(said)}, files=DOUBLE)
    assert one.output == {"answer": "8"}
    assert [turn.step.model_call for turn in one.turns] == [0, 1, 2]
    assert [(turn.ok, turn.last, turn.value) for turn in one.turns] == [
        (True, False, None),
        (True, False, None),
        (True, True, {"answer": "8"}),
    ]
    assert {turn.visit for turn in one.turns} == {1}
    assert [m.role for m in one.turns[2].messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert one.turns[2].messages[3].content == "4"
    assert [turn.parent for turn in one.turns] == [None, one.turns[0].id, one.turns[1].id]
    assert '"double"' in one.turns[0].messages[0].content
    assert "Twice a number." in one.turns[0].messages[0].content
    assert [effect.value for effect in one.effects] == [4, 8]


def test_the_last_permitted_call_offers_no_tools(compiled: Compile):
    said = iter([call("double", n=1)] * 3)
    engine = ScriptedEngine({"solver": lambda _: next(said)})
    player = Player(compiled(REACT, DOUBLE))
    [one] = play(player, [player.start({}, key())], engine.generate)
    assert [len(request.tools) for request in engine.requests] == [1, 1, 0]
    assert "No tool calls are left" in engine.requests[2].messages[-1].content
    assert (one.outcome, one.turns[-1].ok) == ("malformed", False)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        "<tool_call>[1]</tool_call>",
        call("triple", n=1),
        call("double", n="one"),
        call("double", m=1),
        call("double", n=1) * 2,
        '<tool_call>{"name": "double"',
    ],
)
def test_a_tool_call_that_does_not_parse_is_a_malformed_turn(played: Play, text: str):
    # FIELD_PROBLEMS, Tokens: tool-call parse errors scroll by -> a rate a role, kept in the trace.
    workflow = REACT.replace("tag: answer", "tag: answer, on_malformed: {retry: 1}")
    said = iter([text, "<answer>1</answer>"])
    one = played(workflow, {"solver": lambda _: next(said)}, files=DOUBLE)
    assert [(t.outcome, t.step.model_call, t.step.attempt) for t in one.turns] == [
        ("malformed", 0, 0),
        ("ok", 0, 1),
    ]
    assert one.turns[0].detail
    assert one.outcome == "ok"


def test_a_tool_node_passes_arguments_and_may_fail(played: Play):
    workflow = """
        name: tools
        task: {n: int}
        tools: {double: {use: "fns.py:double"}}
        nodes: {twice: {tool: double, args: {n: "{{ n }}"}}}
        edges: [start -> twice -> end]
        output: {n: "{{ twice }}"}
    """
    one = played(workflow, {}, {"n": 21}, files=DOUBLE)
    assert (one.output, one.effects[0].args) == ({"n": 42}, {"n": 21})
    bad = {"bad.py": "def double(n: int):\n    raise OSError('gone')\n"}
    broken = played(workflow.replace("fns.py", "bad.py"), {}, {"n": 21}, files=bad)
    assert (broken.outcome, broken.effects[0].value) == ("tool_error", None)
    assert "gone" in broken.detail


STATEFUL = """
    name: cart
    tools: {add: {use: "fns.py:Cart", scope: episode}}
    roles: {a: {prompt: "buy what?"}}
    nodes:
      x: {role: a}
      one: {tool: add, args: {item: "{{ x.text }}"}}
      y: {role: a}
      two: {tool: add, args: {item: "{{ y.text }}"}}
      z: {role: a}
      three: {tool: add, args: {item: "{{ z.text }}"}}
    edges: [start -> x & y, x -> one -> z, y -> two -> z, z -> three -> end]
    output: {one: "{{ one }}", two: "{{ two }}", three: "{{ three }}"}
"""
CART = """
class Cart:
    def __init__(self):
        self.items = []

    def __call__(self, item: str) -> list[str]:
        self.items.append(item)
        return list(self.items)
"""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_episode_tools_state_forks_with_branches_and_is_rebuilt_by_replay(
    compiled: Compile, order: tuple[int, int]
):
    player = Player(compiled(STATEFUL, {"fns.py": CART}))
    state = player.start({}, key())
    requests = player.advance(state)
    for i in order:
        player.deliver(state, Reply(requests[i].turn_id, "apple" if i == 0 else "pear"))
        player.advance(state)
    state = EpisodeState.from_json(state.to_json())
    [last] = player.advance(state)
    player.deliver(state, Reply(last.turn_id, "fig"))
    assert player.advance(state) == []
    output = player.trajectory(state).output
    assert output == {"one": ["apple"], "two": ["pear"], "three": ["apple", "pear", "fig"]}


HUMAN = """
    name: asks
    roles: {a: {prompt: "say {{ who.text if who else 'nobody' }}"}}
    nodes:
      who: {human: {ask: "who is it?\\n", reply: text, in_training: HOW}}
      say: {role: a}
    edges: [start -> who -> say -> end]
    output: {said: "{{ say.text }}"}
"""


@pytest.mark.parametrize(
    ("how", "prompt"),
    [
        ("skip", "say nobody"),
        ('{value: {text: "Ann"}}', "say Ann"),
        ("{value: Eve}", "say Eve"),
        ('{call: "fns.py:someone"}', "say Bob"),
        ('{call: "fns.py:typed"}', "say Dan"),
        ("{role: a}", "say Cid"),
    ],
)
def test_training_answers_for_people(played: Play, how: str, prompt: str):
    files = {"fns.py": "def someone():\n    return {'text': 'Bob'}\n\ndef typed():\n    return 'Dan'\n"}
    one = played(HUMAN.replace("HOW", how), {"who": ["Cid"], "say": ["hi"]}, files=files)
    assert one.outcome == "ok"
    assert one.turns[-1].messages[-1].content == prompt


@pytest.mark.parametrize(
    ("reply", "value", "detail"),
    [
        ("text", "{said: Ann}", "'text' is missing"),
        ("text", "3", "got 3"),
        ("{choice: [yes, no]}", "maybe", "expected one of yes, no"),
        ("{tags: {a: int, b: 'str?'}}", "{b: x}", "'a' is missing"),
    ],
)
def test_what_stands_in_for_a_person_gives_what_a_person_could(played: Play, reply, value, detail):
    asks = HUMAN.replace("reply: text, in_training: HOW", f"reply: {reply}, in_training: {{value: {value}}}")
    one = played(asks.replace("who.text if who else 'nobody'", "who | json"), {"say": ["hi"]})
    assert one.outcome == "tool_error"
    assert detail in one.detail


def test_a_person_chooses_among_words_worked_out(compiled: Compile):
    asks = HUMAN.replace("reply: text", """reply: {choice: "{{ ['a', 'b'] }}"}""").replace("HOW", "skip")
    player = Player(compiled(asks.replace("who.text", "who.choice")), mode="eval", interactive=True)
    state = player.start({}, key())
    player.advance(state)
    [question] = player.questions(state)
    with pytest.raises(ValueError, match="expected one of a, b"):
        player.answer(state, question, "c")
    player.answer(state, question, "B")
    [one] = play(player, [state], ScriptedEngine({"a": ["hi"]}).generate)
    assert one.turns[0].messages[-1].content == "say b"


def test_an_episode_waits_for_a_person_saves_itself_and_goes_on(compiled: Compile):
    player = Player(compiled(HUMAN.replace("HOW", "skip")), mode="eval", interactive=True)
    engine = ScriptedEngine({"a": ["hi"]})
    state = player.start({}, key())
    [paused] = play(player, [state], engine.generate)
    assert paused.outcome == "paused"
    state = EpisodeState.from_json(state.to_json())
    [question] = player.questions(state)
    assert (question.text.strip(), question.node) == ("who is it?", "who")
    with pytest.raises(ValueError, match="empty"):
        player.answer(state, question, "  ")
    player.answer(state, question, "Dee")
    [done] = play(player, [state], engine.generate)
    assert done.outcome == "ok"
    assert done.turns[0].messages[-1].content == "say Dee"


@pytest.mark.parametrize(("answer", "told"), [("yes", "6"), ("no", "null")])
def test_a_person_approves_a_tool_call(compiled: Compile, answer: str, told: str):
    workflow = REACT.replace('use: "fns.py:double"', 'use: "fns.py:double", approve: human')
    player = Player(compiled(workflow, DOUBLE), interactive=True)
    said = iter([call("double", n=3), "<answer>x</answer>"])
    engine = ScriptedEngine({"solver": lambda _: next(said)})
    state = player.start({}, key())
    [paused] = play(player, [state], engine.generate)
    assert (paused.outcome, paused.effects) == ("paused", ())
    [question] = player.questions(state)
    assert "double(n=3)" in question.text
    player.answer(state, question, answer)
    [one] = play(player, [state], engine.generate)
    assert one.turns[-1].messages[-1].content == told


def test_a_hand_over_pushes_the_chosen_name_on_a_stack(played: Play):
    workflow = """
        name: desk
        state: {stack: {type: [str], default: []}}
        roles:
          front: {prompt: "how can I help?", handoff: {push: [flight, hotel], to: state.stack}}
          flight: {prompt: "which flight?"}
          hotel: {prompt: "which hotel?"}
        nodes: {hello: {role: front}, fly: {role: flight}, stay: {role: hotel}}
        edges:
          - start -> hello
          - hello -> fly when state.stack and state.stack[-1] == 'flight'
          - hello -> stay when state.stack and state.stack[-1] == 'hotel'
          - hello -> end
          - fly -> end
          - stay -> end
        output: {stack: "{{ state.stack }}"}
    """
    one = played(workflow, {"front": [call("handoff", to="hotel")], "hotel": ["the Ritz"], "flight": ["BA1"]})
    assert one.output == {"stack": ["hotel"]}
    assert [turn.node for turn in one.turns] == ["hello", "stay"]
    assert played(workflow, {"front": ["done"]}).output == {"stack": []}
    assert played(workflow, {"front": [call("handoff", to="moon")]}).outcome == "malformed"


ONE = """
    name: one
    limits: {tokens: 8}
    roles: {a: {prompt: "say it", reply: {tag: t, on_malformed: RULE}}}
    nodes: {first: {role: a}, second: {role: a}}
    edges: [start -> first -> second -> end]
    output: {said: "{{ second.t or none }}"}
"""


@pytest.mark.parametrize(
    ("rule", "reply", "outcome", "turns"),
    [
        ("end", Reply("", "<t>x</t>"), "ok", ["ok", "ok"]),
        ("end", Reply("", "none"), "malformed", ["malformed"]),
        ("continue", Reply("", "none"), "ok", ["malformed", "malformed"]),
        ("end", Reply("", "<t>x", finish="length"), "truncated", ["truncated"]),
        ("end", Reply("", "<t>x</t> and", finish="length"), "ok", ["truncated", "truncated"]),
        ("continue", Reply("", "", finish="prompt_too_long"), "prompt_too_long", []),
        ("continue", Reply("", "", finish="error", detail="no GPU"), "engine_error", []),
        ("end", Reply("", "<t>x</t>", prompt_tokens=5, reply_tokens=4), "limit", ["ok"]),
    ],
)
def test_outcomes_of_replies(played: Play, rule: str, reply: Reply, outcome: str, turns: list[str]):
    # FIELD_PROBLEMS, Silent failures: partial episodes are trained after an agent failed -> typed outcomes;
    # budgets of turn, trajectory and window are confused -> truncated, limit, prompt_too_long.
    one = played(ONE.replace("RULE", rule), {"a": lambda _: reply})
    assert (one.outcome, [turn.outcome for turn in one.turns]) == (outcome, turns)
    if one.outcome != "ok":
        assert "first" in one.detail or "second" in one.detail


def test_every_outcome_has_the_default_policy_of_the_design():
    """Rejected replies teach too; what a tool or engine broke, or nobody finished, teaches nothing."""
    by_policy: dict[str, set[str]] = {}
    for outcome, policy in DEFAULT_POLICY.items():
        by_policy.setdefault(policy, set()).add(outcome)
    assert by_policy == {
        "train": {"ok", "malformed", "truncated", "limit", "prompt_too_long"},
        "mask": {"cancelled"},
        "drop_episode": {"tool_error", "timeout", "engine_error", "paused"},
    }


def test_a_stop_string_that_closes_a_tag_counts_as_written(played: Play):
    workflow = ONE.replace("RULE}", 'end}, sampling: {train: {stop: ["</t>"]}}')
    assert played(workflow.replace("tokens: 8", "turns: 9"), {"a": ["<t>cut"]}).output == {"said": "cut"}


def test_sampling_follows_the_mode_and_the_role(compiled: Compile):
    workflow = ONE.replace(
        "RULE}", "end, max_tokens: 9}, sampling: {train: {top_p: 0.5}, eval: {temperature: 0.3}}"
    )
    plan = compiled(workflow)
    [train] = Player(plan).advance(Player(plan).start({}, key()))
    [evaluated] = Player(plan, mode="eval").advance(Player(plan).start({}, key()))
    assert (train.sampling.temperature, train.sampling.top_p, train.sampling.max_tokens) == (1.0, 0.5, 9)
    assert (evaluated.sampling.temperature, evaluated.sampling.top_p) == (0.3, 1.0)


def test_a_reply_twice_counts_once_and_a_stranger_is_refused(compiled: Compile):
    player = Player(compiled(ONE.replace("RULE", "end")))
    state = player.start({}, key())
    [request] = player.advance(state)
    reply = Reply(request.turn_id, "<t>x</t>")
    player.deliver(state, reply)
    player.deliver(state, reply)
    assert len(player.advance(state)) == 1
    with pytest.raises(RunError, match="did not ask"):
        player.deliver(state, Reply("nobody", "x"))


def test_a_member_without_a_model_is_an_error(compiled: Compile):
    from dataclasses import replace

    player = Player(replace(compiled(ONE.replace("RULE", "end")), policy_of={}))
    with pytest.raises(RunError, match="no model plays 'a'"):
        player.advance(player.start({}, key()))


DEMO = """
    name: demo
    task: {n: int}
    tools: {double: {use: "fns.py:double"}}
    roles: {a: {prompt: "n {{ n }}"}, b: {prompt: "got {{ twice }}"}}
    nodes: {ask: {role: a}, twice: {tool: double, args: {n: "{{ n }}"}}, tell: {role: b}}
    edges: [start -> ask -> twice -> tell -> end]
"""


def demonstrate(plan: Plan, turns: list[Any]) -> Trajectory:
    return Player(plan).demonstrate(
        {"task": {"n": 4}, "turns": turns}, EpisodeKey(0, "warm_start", 0, 0, "12", 0)
    )


def test_a_demonstration_is_replayed_with_its_values_or_the_tool_itself(compiled: Compile):
    plan = compiled(DEMO, DOUBLE)
    ask, tell = {"node": "ask", "reply": "hm", "train": False}, {"node": "tell", "reply": "eight"}
    given = demonstrate(plan, [ask, {"node": "twice", "value": 9}, tell])
    assert given.turns[1].messages[-1].content == "got 9"
    assert [turn.demonstrated for turn in given.turns] == [False, True]
    run = demonstrate(plan, [ask, tell])
    assert run.turns[1].messages[-1].content == "got 8"


CALLS = """
    name: demo
    task: {n: int}
    tools: {double: {use: "fns.py:double"}}
    roles: {a: {prompt: "n {{ n }}", tools: [double]}, b: {prompt: "got {{ ask.text }}"}}
    nodes: {ask: {role: a}, tell: {role: b}}
    edges: [start -> ask -> tell -> end]
"""


def test_a_demonstration_says_what_a_called_tool_returned_or_the_tool_is_run(compiled: Compile):
    plan = compiled(CALLS, DOUBLE)
    call = '<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>'
    ask, told = {"node": "ask", "reply": call}, {"node": "ask", "value": 9}
    rest = [{"node": "ask", "reply": "so"}, {"node": "tell", "reply": "eight"}]
    given = demonstrate(plan, [ask, told, *rest])
    assert [turn.messages[-1].content for turn in given.turns] == ["n 4", "9", "got so"]
    run = demonstrate(plan, [ask, *rest])
    assert [turn.messages[-1].content for turn in run.turns] == ["n 4", "8", "got so"]


def test_only_a_role_that_calls_tools_may_have_a_value_among_its_turns(compiled: Compile, tmp_path: Path):
    graph = compiled(CALLS, DOUBLE).workflows["demo"]
    turns = [{"node": "ask", "value": 9}, {"node": "tell", "value": 9}]
    (tmp_path / "demos.jsonl").write_text(json.dumps({"task": {"n": 4}, "turns": turns}) + "\n")
    [problem] = demonstration_problems(SourceIR(str(tmp_path / "demos.jsonl")), graph)
    assert (problem.code, problem.path) == ("bad-demonstration", "turns[1].reply")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            [{"node": "tell", "reply": "x"}, {"node": "ask", "reply": "x"}],
            "at node 'ask', but turn 1 is of node 'tell'",
        ),
        ([{"node": "ask", "reply": "x"}], "at node 'tell', but it has no turn left"),
        ([{"node": n, "reply": "x"} for n in ("ask", "tell", "tell")], "ended before turn 3"),
        ([{"node": "ask", "reply": "x", "value": 1}], "turn 1"),
        ([{"node": "ask", "reply": "x"}, {"node": "twice", "value": 1}], "no turn left"),
    ],
)
def test_a_demonstration_that_does_not_fit_is_named(compiled: Compile, turns: list[Any], message: str):
    with pytest.raises(EpisodeError, match=message) as caught:
        demonstrate(compiled(DEMO, DOUBLE), turns)
    assert "demonstration 12" in str(caught.value)


def test_the_scripted_engine_says_whom_it_has_no_line_for():
    request = Request("t", "p", (), None, 0, node="x/ask", role="x/a", member="x/a_0")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="no line for node 'x/ask'"):
        ScriptedEngine({"b": ["hi"]}).generate([request])
    for name in ("x/ask", "ask", "x/a_0", "a_0", "a", "*"):
        [reply] = ScriptedEngine({name: ["hi"]}).generate([request])
        assert (reply.text, reply.turn_id) == ("hi", "t")


@pytest.mark.parametrize(
    ("body", "outcome", "detail"),
    [
        ("old.append(new); return old", "ok", ""),
        ("return {new}", "tool_error", "got set"),
        ("raise SystemExit(3)", "tool_error", "SystemExit"),
        ("while True: pass", "timeout", "no result within"),
    ],
)
def test_a_merge_function_has_copies_and_a_time_limit_and_gives_plain_data(
    played: Play, monkeypatch, body, outcome, detail
):
    monkeypatch.setattr("masflow.runtime.board.MERGE_TIMEOUT_S", 0.3)
    one = played(
        """
        name: merging
        state: {seen: {type: [int], default: [], merge: "rule.py:merge"}, before: {type: [int], default: []}}
        nodes:
          first: {set: {before: "{{ state.seen }}"}}
          second: {write: {seen: 4}}
        edges: [start -> first -> second -> end]
        output: {seen: "{{ state.seen }}", before: "{{ state.before }}"}
        """,
        {},
        files={"rule.py": f"def merge(old, new):\n    {body}"},
    )
    assert one.outcome == outcome
    assert detail in one.detail
    if outcome == "ok":
        assert one.output == {"seen": [4], "before": []}
