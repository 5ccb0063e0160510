"""master_team: whom the master asks, what its agents call, and what everyone is paid, worked out by hand."""

import json

import pytest

PRICE = {
    "name": "shop.price",
    "description": "What an item costs, in euros.",
    "parameters": {
        "type": "dict",
        "properties": {"item": {"type": "string"}, "tax": {"type": "float"}},
        "required": ["item"],
    },
}
TEA = {"shop.price": {"item": ["tea"], "tax": ["", 0.2]}}
MILK = {"shop.price": {"item": ["milk"], "tax": [""]}}
SHOPPING = {
    "question": "What do four teas cost, with two euros for delivery?",
    "functions": [PRICE],
    "kind": "number",
    "answers": ["14"],
    "needs": ["function", "math"],
    "parts": {"function": [TEA], "math": "14"},
    "returns": [{"call": TEA, "value": 3}],
}
LOOKED_UP = {
    "question": "Who invented anemones?",
    "functions": [],
    "kind": "text",
    "answers": ["Carl Linnaeus"],
    "needs": ["qa"],
    "parts": {"qa": ["Carl Linnaeus"]},
    "returns": [],
}
ORDERED = {
    **SHOPPING,
    "question": "Ask for the prices of tea and milk.",
    "kind": "calls",
    "answers": [],
    "needs": ["function"],
    "parts": {"function": [TEA, MILK]},
    "returns": [{"call": TEA, "value": 3}, {"call": MILK, "value": 1}],
}


def say(next_, task=None, answer=None):
    return json.dumps({"next": next_, "task": task, "answer": answer})


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def priced(item, **more):
    return call("call", name="shop.price", arguments={"item": item, **more})


def steps(*lines):
    """What a ReAct agent says in one visit, call by call; the same in each visit."""
    return lambda request: lines[sum(message.role == "assistant" for message in request.messages)]


def told(played, node):
    """What the tools answered at a node, in the last request there."""
    requests = [r for r in played.engine.requests if r.node == node]
    return [json.loads(m.content.split("\n")[0]) for m in requests[-1].messages if m.role == "tool"]


def test_a_price_is_called_for_and_reckoned_with(team, episode):
    script = {
        "decide": [
            say("function", "price of a tea"),
            say("math", "4 * 3 + 2"),
            say("finish", answer="14 euros"),
        ],
        "function": steps(priced("Tea"), "<answer>3</answer>"),
        "math": steps(call("calculator", expression="4 * 3 + 2"), "<answer>14</answer>"),
    }
    played = episode(team("master_team"), SHOPPING, script)
    assert played.outcome == "ok"
    assert played.spoken == [
        "decide@1", "function@2", "function@3", "decide@4", "math@5", "math@6", "decide@7",
    ]  # fmt: skip
    master = 1 + 0.5 * 1  # the answer, and whom it asked; nothing was malformed, and nothing superfluous
    assert played.totals == [master, 1, 1, master, 1, 1, master]
    assert told(played, "function") == [{"value": 3}]
    assert played.output == {"answer": "14 euros", "notes": ["function agent: 3", "math agent: 14"]}
    assert "function agent: 3" in played.prompts("math")[0]


def test_the_wrong_agent_and_a_wrong_answer_pay_nothing_but_cost_nothing_either(team, episode):
    script = {
        "decide": [say("qa", "price of tea"), say("finish", answer="9")],
        "qa": steps(call("wiki", query="tea"), "<answer>9</answer>"),
    }
    played = episode(team("master_team"), SHOPPING, script)
    # routing: {qa} against {function, math} is 0; the QA agent's answer isn't judged, since nobody needs it
    assert played.totals == [0, 0, 0, 0]
    assert played.metrics["routing"] == 0 and played.metrics["accuracy"] == 0


def test_every_step_beyond_those_needed_costs_its_agent(team, episode):
    search = call("wiki", query="anemones")
    script = {
        "decide": [say("qa", "who?"), say("qa", "really?"), say("finish", answer="Linnaeus")],
        "qa": steps(search, search, "<answer>Carl Linnaeus</answer>"),
    }
    played = episode(team("master_team"), LOOKED_UP, script)
    f1 = 2 * 1 * 0.5 / 1.5  # "linnaeus" against "carl linnaeus": precision 1, recall 1/2
    asked = 2 * 1 / (2 + 1)  # qa twice, needed once
    spent = -(3 - 2) / (5 - 2)  # three turns, two are needed, five are allowed
    master = f1 + 0.5 * asked + 0.1 * spent
    agent = (
        1 - 0.1 * 1
    )  # six turns, two are needed, four are allowed in a visit: all of it, and no more than that
    assert played.totals == pytest.approx([master, *[agent] * 3, master, *[agent] * 3, master])


def test_calls_are_the_answer_however_they_are_written_and_in_any_order(team, episode):
    script = {
        "decide": [say("function", "tea and milk"), say("finish")],
        "function": steps(priced("milk"), priced("TEA", tax=0.2), "<answer>1 and 3</answer>"),
    }
    played = episode(team("master_team"), ORDERED, script)
    assert told(played, "function") == [{"value": 1}, {"value": 3}]
    assert played.totals == [1.5, 1, 1, 1, 1.5]


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (priced("juice"), "nothing is recorded for these arguments"),
        (priced("tea", tax="much"), "arguments.tax: 'much' is not of type 'number'"),
        (call("call", name="shop.price", arguments={}), "arguments: 'item' is a required property"),
        (call("call", name="shop.cost", arguments={}), "no function 'shop.cost'; known: shop.price"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong_and_loses_what_calls_earn(team, episode, wrong, answer):
    script = {
        "decide": [say("function", "tea and milk"), say("finish")],
        "function": steps(wrong, priced("tea"), priced("milk"), "<answer>3 and 1</answer>"),
    }
    played = episode(team("master_team"), ORDERED, script)
    assert told(played, "function") == [{"error": answer}, {"value": 3}, {"value": 1}]
    # three calls and an answer are one turn more than two calls and an answer; four are allowed
    assert played.totals == pytest.approx([0.5, *[-0.1] * 4, 0.5])


def test_a_master_that_says_nothing_readable_ends_it(team, episode):
    played = episode(team("master_team"), SHOPPING, {"decide": ["the price, please"]})
    assert played.outcome == "malformed"
    assert played.totals == [-1]  # no answer: 0; nobody asked: routing 0; malformed: -1


def test_an_agent_that_says_nothing_readable_pays_for_it_and_the_master_goes_on(team, episode):
    script = {
        "decide": [say("math", "4 * 3 + 2"), say("finish", answer="14")],
        "math": ["fourteen"],
    }
    played = episode(team("master_team"), SHOPPING, script)
    asked = 2 * 1 / (1 + 2)
    assert played.totals == pytest.approx([1 + 0.5 * asked, -1, 1 + 0.5 * asked])
    assert played.output["notes"] == []  # what is malformed is written nowhere


def test_the_rounds_are_bounded_and_the_last_answer_counts(team, episode):
    script = {
        "decide": [say("math", "again", answer="14")],
        "math": ["<answer>14</answer>"],
    }
    played = episode(team("master_team", rounds=2), SHOPPING, script)
    assert played.spoken == ["decide@1", "math@2", "decide@3", "math@4", "decide@5"]
    assert played.output["answer"] == "14" and played.metrics["accuracy"] == 1


def test_neither_returns_nor_gold_calls_nor_answers_are_in_a_prompt(team, episode):
    secret = {**SHOPPING, "answers": ["987654"], "returns": [{"call": TEA, "value": "hid-1"}]}
    secret["parts"] = {"function": [{"shop.price": {"item": ["hid-2"]}}], "math": "987654"}
    script = {
        "decide": [say("function", "price"), say("math", "sum"), say("qa", "who"), say("finish", answer="?")],
        "function": steps("<answer>?</answer>"),
        "math": ["<answer>?</answer>"],
        "qa": ["<answer>?</answer>"],
    }
    played = episode(team("master_team"), secret, script)
    texts = [m.content for r in played.engine.requests for m in r.messages]
    assert len(played.turns) == 7 and not any("987654" in t or "hid-" in t for t in texts)
    assert "shop.price" in played.prompts("decide")[0] and '"required"' in played.prompts("function")[0]


@pytest.mark.parametrize(
    ("mapping", "policies"),
    [
        ("shared", {"policy"}),
        ("separate", {"own.master", "own.qa_agent", "own.function_agent", "own.math_agent"}),
    ],
)
def test_who_shares_a_model_is_the_mapping_alone(team, mapping, policies):
    assert {p.name for p in team("master_team", mapping).policies} == policies
