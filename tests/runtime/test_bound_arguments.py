"""Arguments that a tool gets from the task: nobody passes them, no prompt shows them, every call has them."""

from __future__ import annotations

import json

import pytest

from masflow.compiler import check
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from tests.runtime.conftest import key

FNS = '''
def price(item: str, prices: dict, currency: str = "EUR") -> dict:
    """What an item costs."""
    return {"text": f"{prices.get(item)} {currency}"}

def count(item: str, prices: dict, state: dict) -> int:
    """How often an item of the list was asked for."""
    state[item] = state.get(item, 0) + (item in prices)
    return state[item]
'''
TASK = "task: {question: str, prices: {type: any, hidden: true}, money: {type: str, hidden: true}}"
TOOLS = (
    'tools: {price: {use: "fns.py:price", bind: {prices: "{{ prices }}", currency: "in {{ money }}"}},'
    ' count: {use: "fns.py:count", scope: episode, bind: {prices: "{{ task.prices }}"}}}'
)
REACT = f"""
name: tiny
{TASK}
{TOOLS}
roles:
  seller:
    {{prompt: "{{{{ question }}}}", tools: [price, count], max_calls: 3, reply: {{tag: answer}}}}
nodes:
  sell: {{role: seller}}
edges: [start -> sell -> end]
output: {{answer: "{{{{ sell.answer }}}}"}}
"""
NODE = f"""
name: tiny
{TASK}
{TOOLS}
nodes:
  cost: {{tool: price, args: {{item: tea}}}}
  one:  {{tool: count, args: {{item: tea}}}}
  two:  {{tool: count, args: {{item: tea}}}}
edges: [start -> cost -> one -> two -> end]
output: {{answer: "{{{{ cost.text }}}}", times: "{{{{ two }}}}"}}
"""
GIVEN = {"question": "How much is tea?", "prices": {"tea": 3}, "money": "pounds"}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_role_is_offered_what_is_left_and_its_call_gets_the_rest(compiled):
    lines = [
        call("price", item="tea"),
        call("count", item="tea"),
        call("count", item="tea"),
        "<answer>3</answer>",
    ]
    given: list = []

    def say(request):
        given.append(request)
        return lines[len(given) - 1]

    player = Player(compiled(REACT, {"fns.py": FNS}))
    [found] = play(player, [player.start(GIVEN, key())], ScriptedEngine({"seller": say}).generate)
    assert [effect.value for effect in found.effects] == [{"text": "3 in pounds"}, 1, 2]
    assert [effect.args for effect in found.effects] == [{"item": "tea"}] * 3
    told = given[0].messages[0].content
    assert '"item"' in told and "prices" not in told and "currency" not in told
    assert all("pounds" not in message.content for message in given[0].messages)


def test_a_call_that_passes_it_all_the_same_is_malformed(compiled, played):
    script = {"seller": [call("price", item="tea", prices={"tea": 0}), "<answer>0</answer>"]}
    found = played(REACT, script, GIVEN, {"fns.py": FNS})
    assert not found.turns[0].ok and "prices" in found.turns[0].detail
    assert found.effects == ()


ANY = """
name: tiny
tools: {tell: {use: "fns.py:tell"}}
roles: {talker: {prompt: "say so", tools: [tell], max_calls: 2}}
nodes: {say: {role: talker}}
edges: [start -> say -> end]
"""


def test_a_parameter_of_any_type_must_be_passed_unless_it_has_a_default(played):
    fns = {"fns.py": "def tell(what: dict, how=None):\n    return [what, how]\n"}
    told: list = []

    def say(request):
        told.append(request)
        return [call("tell", what={"a": 1}), "so"][len(told) - 1]

    found = played(ANY, {"talker": say}, {}, fns)
    assert [effect.value for effect in found.effects] == [[{"a": 1}, None]]
    schema = told[0].messages[0].content
    assert '"required": ["what"]' in schema
    broken = played(ANY, {"talker": [call("tell", how=1)]}, {}, fns)
    assert not broken.turns[0].ok and "what" in broken.turns[0].detail and broken.effects == ()


def test_a_node_passes_the_rest_and_states_are_rebuilt_with_what_is_bound(played):
    found = played(NODE, {}, GIVEN, {"fns.py": FNS})
    assert found.output == {"answer": "3 in pounds", "times": 2}


def test_a_function_that_is_a_workflow_calls_it_without(planned):
    files = {
        "fns.py": FNS,
        "team.py": """
        from masflow import workflow

        @workflow(
            task={"question": "str", "prices": {"type": "any", "hidden": True}},
            tools={"price": {"use": "fns.py:price", "bind": {"prices": "{{ prices }}"}}},
        )
        async def team(agents, task, ctx):
            mine = await ctx.tool("price", item="tea")
            return {"answer": mine["text"]}
        """,
    }
    player = Player(planned("team.py:team", files))
    [found] = play(player, [player.start(GIVEN, key())], ScriptedEngine({}).generate)
    assert found.output == {"answer": "3 EUR"}
    files["team.py"] = files["team.py"].replace('item="tea")', 'item="tea", prices={})')
    player = Player(planned("team.py:team", files))
    [found] = play(player, [player.start(GIVEN, key())], ScriptedEngine({}).generate)
    assert found.outcome == "tool_error" and "'prices' is bound by the workflow" in found.detail


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        ("args: {item: tea}", "args: {item: tea, prices: 3}", "bound-argument", "binds 'prices' itself"),
        ('currency: "in {{ money }}"', "curency: x", "unknown-argument", "'curency'"),
        (
            'currency: "in {{ money }}"',
            "currency: 3",
            "wrong-argument-type",
            "'currency' is bound to a number",
        ),
        ('currency: "in {{ money }}"', 'currency: "{{ mony }}"', "unknown-name", "mony"),
        ('currency: "in {{ money }}"', 'currency: "{{ cost.text }}"', "unknown-name", "cost"),
        (
            'price: {use: "fns.py:price",',
            'price: {use: "fns.py:price", currency: EUR,',
            "bound-argument",
            "a setting",
        ),
        ("scope: episode, bind: {", "scope: episode, bind: {state: 3, ", "bound-argument", "the state"),
    ],
)
def test_what_is_bound_wrongly_is_said_with_its_line(tmp_path, before, after, code, said):
    assert before in NODE
    (tmp_path / "fns.py").write_text(FNS)
    (tmp_path / "main.yaml").write_text(NODE.replace(before, after, 1))
    (tmp_path / "pyproject.toml").touch()
    found = [problem for problem in check(tmp_path / "main.yaml") if problem.code == code]
    assert found and said in found[0].message and found[0].line > 3, check(tmp_path / "main.yaml")
