"""Workflows that are functions, played on the scripted engine: identity, order, effects, limits, faults."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.engine import Reply, Request
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.runtime.state import EpisodeState
from masflow.trace import EpisodeKey, Trajectory, path_json

Programmed = Callable[..., Plan]
KEY = EpisodeKey(7, "train", 3, 0, "task0", 0)
HEAD = "from masflow import gather, workflow\n\n\n"
SAY = '{"prompt": "say {{ what }}"}'


@pytest.fixture
def programmed(planned: Callable[[str, Mapping[str, str]], Plan]) -> Programmed:
    """(source of main.py, {file: text}) → its plan."""

    def plan(source: str, files: Mapping[str, str] | None = None) -> Plan:
        return planned("main.py:main", {**(files or {}), "main.py": HEAD + textwrap.dedent(source)})

    return plan


def team(body: str, roles: str = f'{{"a": {SAY}, "b": {SAY}}}', **settings: str) -> str:
    """A workflow of roles that say what they are told to, around the body of its function."""
    more = "".join(f", {key}={value}" for key, value in settings.items())
    code = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"@workflow(roles={roles}{more})\nasync def main(task, agents, ctx):\n{code}\n"


def told(request: Request) -> str:
    """Says what it was asked to say."""
    return request.messages[-1].content.removeprefix("say ")


def run(plan: Plan, script: Any = told, task: Mapping[str, Any] | None = None, **options: Any) -> Trajectory:
    player = Player(plan, **options)
    lines = script if isinstance(script, Mapping) else {"*": script}
    [trajectory] = play(player, [player.start(dict(task or {}), KEY)], ScriptedEngine(lines).generate)
    return trajectory


def places(trajectory: Trajectory) -> list[str]:
    """`role[item]#visit@superstep` of every turn."""
    return [
        f"{t.node}{'' if t.step.item is None else f'[{t.step.item}]'}#{t.visit}@{t.superstep}"
        for t in trajectory.turns
    ]


def said(trajectory: Trajectory, *, by: str | None = None) -> list[str]:
    return [t.text for t in trajectory.turns if by in (None, t.role)]


# identity and order


def test_a_call_is_its_role_and_its_key_or_its_ordinal_when_it_was_made(programmed):
    plan = programmed(team("""
        first, second = agents.a(what="1"), agents.a(what="2")
        await second
        await first
        await agents.a(what="k", key="k")
        await agents.a(what="3")
    """))  # fmt: skip
    one = run(plan)
    assert {t.text: (t.visit, t.step.item) for t in one.turns} == {
        "1": (1, None), "2": (2, None), "k": (1, "k"), "3": (3, None)
    }  # fmt: skip
    assert len({path_json(t.path) for t in one.turns}) == 4


def test_a_superstep_counts_what_had_been_awaited_when_the_call_was_made(programmed):
    plan = programmed(team("""
        x, y = agents.a(what="x"), agents.a(what="y")
        one = await x
        z = agents.b(what=one.text + "z")      # knows x, not y
        both = await gather(y, z)
        await agents.b(what=both[0].text + both[1].text, key="end")
    """))  # fmt: skip
    one = run(plan)
    at = {t.text: t for t in one.turns}
    before = {t.text: sorted(at_id.text for at_id in one.turns if at_id.id in one.predecessors[t.id])
              for t in one.turns}  # fmt: skip
    assert before == {"x": [], "y": [], "xz": ["x"], "yxz": ["xz", "y"]}
    assert [at[text].superstep for text in ("x", "y", "xz", "yxz")] == [1, 1, 2, 3]


TREE = team("""
    async def dig(name, depth):
        found = await agents.a(what=f"{name}")
        seen.append(found.text)
        if depth == 0:
            return [found.text]
        below = await gather(dig(name + "l", depth - 1), dig(name + "r", depth - 1))
        last = await agents.b(what=f"{name}:{len(seen)}:{ctx.rng.randrange(100)}")
        return [found.text, *below[0], *below[1], last.text]
    seen = []
    side = agents.b(what="side", key="side")
    found = await gather(dig("x", 2), dig("y", 1))
    return {"found": found, "seen": seen, "side": (await side).text}
""")


def test_coroutines_side_by_side_have_ordinals_of_their_own(programmed):
    one = run(programmed(TREE))
    assert one.outcome == "ok", one.detail
    assert "a[~0.0.1]#1@3" in places(one)
    assert len({path_json(t.path) for t in one.turns}) == len(one.turns) == 15


@pytest.fixture
def tree(programmed: Programmed) -> Plan:
    return programmed(TREE)


@pytest.fixture
def forked(programmed: Programmed) -> Plan:
    return programmed(FORKED)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.randoms(use_true_random=False))
def test_replies_in_any_order_of_arrival_give_the_same_trajectory(tree, order):
    player = Player(tree)
    state = player.start({}, KEY)
    waiting: list[Request] = []
    while not player.finished(state):
        waiting += player.advance(state)
        if waiting:
            one = waiting.pop(order.randrange(len(waiting)))
            player.deliver(state, Reply(one.turn_id, told(one), reply_tokens=1))
    expected = run(tree, lambda r: Reply("", told(r), reply_tokens=1))
    assert player.trajectory(state) == expected
    assert player.trajectory(state).predecessors == expected.predecessors


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 100), saved=st.booleans())
def test_a_fork_that_is_told_the_same_again_equals_the_original(forked, at, saved):
    player = Player(forked)
    state = player.start({}, KEY)
    engine = ScriptedEngine({"*": lambda r: Reply("", told(r), reply_tokens=1)})
    [original] = play(player, [state], engine.generate)
    chosen = original.turns[at % len(original.turns)]
    fork = player.fork(state, chosen.id, (path_json(chosen.path), 1, 0))
    if saved:
        fork = EpisodeState.from_json(fork.to_json())
    [again] = play(player, [fork], engine.generate)
    assert [(t.path, t.text, t.superstep, t.messages[-1].content) for t in again.turns] == [
        (t.path, t.text, t.superstep, t.messages[-1].content) for t in original.turns
    ]
    kept = {t.id for t in original.turns} & {t.id for t in again.turns}
    after = {chosen.id}
    for turn in original.turns:
        if after.intersection(original.predecessors[turn.id]):
            after.add(turn.id)
    assert kept == {t.id for t in original.turns} - after
    assert again.output == original.output


FORKED = team("""
    async def dig(name, depth):
        found = await agents.a(what=f"{name}")
        if depth == 0:
            return found.text
        below = await gather(dig(name + "l", depth - 1), dig(name + "r", depth - 1))
        return (await agents.b(what=f"{name}:{''.join(below)}")).text
    side = agents.b(what="side", key="side")
    found = await gather(dig("x", 2), dig("y", 1))
    return {"found": found, "side": (await side).text}
""")


def test_chance_is_the_episodes_and_a_fork_draws_anew_behind_its_turn(programmed):
    plan = programmed(team("""
        early = ctx.rng.random()
        await agents.a(what="x")
        rng = ctx.rng
        late = [rng.random(), rng.gauss(0, 1), rng.choice("abcdefgh"), rng.sample(range(9), 3)]
        return {"early": early, "late": late}
    """))  # fmt: skip
    player, engine = Player(plan), ScriptedEngine({"*": told})
    state = player.start({}, KEY)
    [one] = play(player, [state], engine.generate)
    assert run(plan).output == one.output
    fork = player.fork(state, one.turns[0].id, (path_json(one.turns[0].path), 1, 0))
    [other] = play(player, [fork], engine.generate)
    assert other.output["early"] == one.output["early"]
    assert other.output["late"] != one.output["late"]
    another = player.start({}, replace(KEY, sample=1))
    assert play(player, [another], engine.generate)[0].output["early"] != one.output["early"]


def test_a_function_that_asks_something_else_when_it_is_replayed_stops_the_run(programmed):
    plan = programmed(team("""
        import time
        await agents.a(what=f"now {time.time_ns()}", key="when")
        await agents.b(what="x")
    """))  # fmt: skip
    player = Player(plan)
    state = player.start({}, KEY)
    [one] = play(player, [state], ScriptedEngine({"*": told}).generate)
    fork = player.fork(state, one.turns[1].id, (path_json(one.turns[1].path), 1, 0))
    with pytest.raises(
        RunError, match=r"main.py:7: the function isn't deterministic: a call of 'a' .*when.* first"
    ):
        player.advance(fork)


def test_the_turn_that_a_fork_asks_again_is_asked_the_same(programmed):
    plan = programmed(team("""
        global asked
        asked += 1
        await agents.a(what=f"{asked}")
    """) + "\n\nasked = 0\n")  # fmt: skip
    player = Player(plan)
    state = player.start({}, KEY)
    [one] = play(player, [state], ScriptedEngine({"*": told}).generate)
    fork = player.fork(state, one.turns[0].id, (path_json(one.turns[0].path), 1, 0))
    with pytest.raises(RunError, match=r"main.py:8: the function isn't deterministic.*'user: say 1' first"):
        player.advance(fork)


def test_a_key_may_be_whatever_a_model_wrote(programmed):
    plan = programmed(team("""
        words = [task.word + end for end in "xy"]
        got = await gather(*[agents.a(what=str(i), key=word) for i, word in enumerate(words)])
        return {"all": got[0].text + got[1].text}
    """, task='{"word": str}'))  # fmt: skip
    word = "ü\n/🎉" * 2000
    one = run(plan, task={"word": word})
    assert one.output == {"all": "01"} and max(len(path_json(t.path)) for t in one.turns) < 1000
    turns = [{"node": "a", "key": word + end, "reply": end} for end in "yx"]
    again = Player(plan).demonstrate({"task": {"word": word}, "turns": turns}, KEY)
    assert sorted(t.text for t in again.turns) == ["x", "y"]


def test_keys_of_one_member_differ_as_text(programmed):
    roles = '{"a": {"prompt": "say {{ what }}", "copies": 2}}'
    body = 'await agents.a[0](what="x", key=1)\nawait agents.a[1](what="x", key="1")\n'
    assert run(programmed(team(body, roles))).outcome == "ok"
    one = run(programmed(team(body + 'await agents.a[0](what="y", key="1")', roles)))
    assert "'a' has a call with key '1' already" in one.detail


def test_a_reply_that_a_replay_does_not_ask_for_stops_the_run(programmed):
    plan = programmed(
        team("""
        if main_flag.on:
            await agents.a(what="x", key="x")
        await agents.b(what="y")
    """)
        + "\n\nimport main_flag\n",
        {"main_flag.py": "on = True\n"},
    )
    import sys

    try:
        player = Player(plan)
        state = player.start({}, KEY)
        play(player, [state], ScriptedEngine({"*": told}).generate)
        sys.modules["main_flag"].on = False  # type: ignore[attr-defined]
        with pytest.raises(RunError, match="isn't asked for any more"):
            player.trajectory(state.copy())
    finally:
        sys.modules.pop("main_flag", None)


def test_a_spawned_coroutine_goes_on_beside_the_one_that_spawned_it(programmed):
    one = run(programmed(team("""
        async def side():
            first = await agents.b(what="1")
            return {"text": (await agents.b(what=first.text + "2")).text}
        going = ctx.spawn(side())
        await agents.a(what="x")
        await agents.a(what="y")
        return {"side": (await going).get("text")}    # what a coroutine returns is given as it is
    """)))  # fmt: skip
    assert one.output == {"side": "12"}
    assert sorted(places(one)) == ["a#1@1", "a#2@2", "b[~0]#1@1", "b[~0]#2@2"]


def test_an_episode_is_copied_saved_and_gone_on_with_anywhere(programmed):
    plan = programmed(TREE)
    expected = run(plan)
    player, engine = Player(plan), ScriptedEngine({"*": told})
    state = player.start({}, KEY)
    while not player.finished(state):
        state = EpisodeState.from_json(state.copy().to_json())
        for reply in engine.generate(player.advance(state)):
            player.deliver(state, reply)
    assert player.trajectory(state) == expected


# replies


def test_a_malformed_reply_ends_the_episode_when_its_siblings_have_finished(programmed):
    roles = '{"a": {"prompt": "say {{ what }}", "reply": {"tag": "x"}}}'
    plan = programmed(team("""
        try:
            await gather(*[agents.a(what=w, key=w) for w in ("1", "<x>2</x>", "<x>3</x>")])
        finally:
            seen.append("closed")
        await agents.a(what="never", key="never")
    """, roles) + "\n\nseen = []\n")  # fmt: skip
    one = run(plan)
    assert one.outcome == "malformed" and "main.py:7" in one.detail
    assert said(one) == ["1", "<x>2</x>", "<x>3</x>"]
    from masflow.functions import load_callable

    assert load_callable(f"{plan.root_dir}/main.py:main", plan.root_dir).__globals__["seen"] == ["closed"]


def test_continue_gives_none_and_retry_asks_again(programmed):
    roles = '{"a": {"prompt": "{{ what }}", "reply": {"tag": "x", "on_malformed": RULE}}}'
    body = 'got = await agents.a(what="?")\nreturn {"got": None if got is None else got.x}'
    one = run(programmed(team(body, roles.replace("RULE", '"continue"'))), lambda r: "nothing")
    assert (one.outcome, one.output, one.turns[0].ok) == ("ok", {"got": None}, False)
    answers = iter(["no", "still no", "<x>7</x>"])
    two = run(programmed(team(body, roles.replace("RULE", '{"retry": 2}'))), lambda r: next(answers))
    assert two.output == {"got": "7"} and [t.step.attempt for t in two.turns] == [0, 1, 2]


def test_values_are_read_by_attribute_and_can_not_be_changed(programmed):
    roles = (
        '{"a": {"prompt": "say it", "reply": {"json": {"steps": [{"do": str, "keys": int}], "items": str}}}}'
    )
    body = """
        plan = await agents.a()
        first = plan.steps[0]
        try:
            first.do = "other"
        except AttributeError as error:
            problem = str(error)
        return {"do": first.do, "keys": first.keys, "items": plan["items"], "problem": problem, "all": plan}
    """
    given = '{"steps": [{"do": "go", "keys": 3}], "items": "i"}'
    one = run(programmed(team(body, roles)), lambda r: given)
    assert one.output == {
        "do": "go", "keys": 3, "items": "i", "problem": "'do' can't be set: a value is what was said",
        "all": {"steps": [{"do": "go", "keys": 3}], "items": "i"},
    }  # fmt: skip


def test_a_conversation_goes_on_in_the_thread_that_a_call_names(programmed):
    roles = '{"a": {"prompt": "say {{ what }}", "next_prompt": "say {{ what }}", "conversation": "role"}}'
    plan = programmed(team("""
        await agents.a(what="1")
        await gather(agents.a(what="2"), agents.a(what="x", thread="x"))
        await agents.a(what="3", key="k")
        await agents.a(what="y", thread="x")
    """, roles))  # fmt: skip
    one = run(plan)
    heard = {t.text: [m.content for m in t.messages] for t in one.turns}
    assert heard["3"] == ["say 1", "1", "say 2", "2", "say 3"]
    assert heard["y"] == ["say x", "x", "say y"]
    ids = {t.text: t.id for t in one.turns}
    assert {t.text: t.parent for t in one.turns}["3"] == ids["2"]


def test_two_calls_at_once_in_one_conversation_are_an_error(programmed):
    roles = '{"a": {"prompt": "say {{ what }}", "conversation": "role"}}'
    one = run(programmed(team('await gather(agents.a(what="1"), agents.a(what="2"))', roles)))
    assert one.outcome == "tool_error"
    assert "main.py:6: role 'a' speaks in a conversation whose last call isn't awaited here" in one.detail


def test_members_are_indexed_named_or_gone_through(programmed):
    roles = """{"a": {"prompt": "say {{ me }}{{ what }}", "copies": 2},
        "b": {"prompt": "say {{ me }}", "names": ["ann", "bob"]}}"""
    plan = programmed(team("""
        await gather(*[one(what=str(i)) for i, one in enumerate(agents.a)])
        await agents.a[1](what="!")
        await agents.b["bob"]()
        await agents.b(member="ann", key="k")
        return {"n": len(agents.a)}
    """, roles))  # fmt: skip
    one = run(plan)
    assert [(t.member, t.text, t.visit, t.step.item) for t in one.turns] == [
        ("a_0", "a_00", 1, 0), ("a_1", "a_11", 1, 1), ("a_1", "a_1!", 2, 1),
        ("bob", "bob", 1, "bob"), ("ann", "ann", 1, "ann:k"),
    ]  # fmt: skip
    assert one.output == {"n": 2}


# effects


TOOLS = """
    def double(n: int) -> int:
        calls.append(n)
        return 2 * n

    def broken(n: int) -> int:
        raise ValueError("it broke")

    calls = []

    class Cart:
        def __init__(self):
            self.things = []
        def __call__(self, thing: str) -> list:
            self.things.append(thing)
            return list(self.things)
"""


def test_a_tool_is_used_once_and_replayed_ever_after(programmed):
    plan = programmed(team("""
        x = await ctx.tool("double", n=2, key="x")
        y, z = await gather(ctx.tool("double", n=x), ctx.tool("double", n=5))
        await agents.a(what=str([x, y, z]))
    """, tools='{"double": {"use": "fns.py:double"}}'), {"fns.py": TOOLS})  # fmt: skip
    player = Player(plan)
    state = player.start({}, KEY)
    [one] = play(player, [state], ScriptedEngine({"*": told}).generate)
    assert said(one) == ["[4, 8, 10]"]
    assert [(path_json(e.path), e.args, e.value) for e in one.effects] == [
        ('[["","double",1,"x",0,0]]', {"n": 2}, 4),
        ('[["","double",1,null,0,0]]', {"n": 4}, 8),
        ('[["","double",2,null,0,0]]', {"n": 5}, 10),
    ]
    from masflow.functions import load_callable

    fork = player.fork(state, one.turns[0].id, (path_json(one.turns[0].path), 1, 0))
    [again] = play(player, [fork], ScriptedEngine({"*": told}).generate)
    assert again.effects == one.effects
    calls = load_callable(f"{plan.root_dir}/fns.py:double", plan.root_dir).__globals__["calls"]
    assert calls[0] == 2 and sorted(calls) == [2, 4, 5]  # the gathered ones side by side


def test_a_tool_that_breaks_ends_the_episode_whatever_the_function_catches(programmed):
    body = """
        try:
            await ctx.tool("broken", n=1)
        except BaseException:
            pass
        await agents.a(what="on")
    """
    one = run(programmed(team(body, tools='{"broken": "fns.py:broken"}'), {"fns.py": TOOLS}))
    assert one.outcome == "tool_error" and not one.turns
    assert "main.py:7" in one.detail and "it broke" in one.detail


def test_an_episodes_tool_remembers_along_what_was_awaited(programmed):
    plan = programmed(team("""
        await ctx.tool("cart", thing="a")
        left, right = await gather(ctx.tool("cart", thing="l"), ctx.tool("cart", thing="r"))
        return {"left": left, "right": right, "end": await ctx.tool("cart", thing="z")}
    """, tools='{"cart": {"use": "fns.py:Cart", "scope": "episode"}}'), {"fns.py": TOOLS})  # fmt: skip
    assert run(plan).output == {"left": ["a", "l"], "right": ["a", "r"], "end": ["a", "l", "r", "z"]}


def test_a_role_calls_tools_on_its_own(programmed):
    roles = '{"a": {"prompt": "double {{ n }}", "tools": ["double"], "reply": {"tag": "x"}}}'
    plan = programmed(
        team('return {"x": (await agents.a(n=4)).x}', roles, tools='{"double": "fns.py:double"}'),
        {"fns.py": TOOLS},
    )
    answers = iter(['<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>', "<x>8</x>"])
    one = run(plan, lambda r: next(answers))
    assert one.output == {"x": "8"} and [t.step.model_call for t in one.turns] == [0, 1]
    assert one.turns[1].messages[-1].content == "8"


HIDDEN = {
    "tools": '{"double": "fns.py:double"}',
    "task": '{"q": str, "n": {"type": int, "hidden": True}}',
}


def test_hidden_fields_go_to_tools(programmed):
    body = 'return {"twice": await ctx.tool("double", n=task.n)}'
    one = run(programmed(team(body, **HIDDEN), {"fns.py": TOOLS}), task={"q": "?", "n": 4})
    assert one.output == {"twice": 8}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "await agents.a(what=task.n)",
            "main.py:6: the hidden field 'n' may be read by rewards and tools only",
        ),
        (
            'await agents.a(what=f"{task.n}")',
            "main.py:6: TypeError: the hidden field 'n' may be handed to tools",
        ),
        ("return {'n': task.n}", "what the function returns: the hidden field 'n' may be read by rewards"),
        (
            'await agents.a(prompt="say {{ n }}")',
            "main.py:6: the prompt names the hidden field 'n', which only rewards and tools read",
        ),
        ("if task.n:\n    pass", "main.py:6: TypeError: the hidden field 'n' may be handed to tools"),
        ("return {'n': [*task.n]}", "main.py:6: TypeError: the hidden field 'n' may be handed to tools"),
    ],
)
def test_hidden_fields_go_no_further(programmed, body, why):
    one = run(programmed(team(body, **HIDDEN), {"fns.py": TOOLS}), task={"q": "?", "n": 4})
    assert one.outcome == "tool_error" and why in one.detail, one.detail


def test_a_tool_that_a_person_approves_pauses_the_episode(programmed):
    body = 'return {"twice": await ctx.tool("double", n=3)}'
    plan = programmed(
        team(body, tools='{"double": {"use": "fns.py:double", "approve": "human"}}'), {"fns.py": TOOLS}
    )
    player = Player(plan, mode="eval", interactive=True)
    state = player.start({}, KEY)
    assert player.advance(state) == [] and player.finished(state)
    [question] = player.questions(state)
    assert "double(n=3)" in question.text and player.trajectory(state).outcome == "paused"
    player.answer(state, question, "yes")
    player.advance(state)
    assert player.trajectory(state).output == {"twice": 6}


# limits


@pytest.mark.parametrize(
    ("limits", "body", "turns", "detail"),
    [
        ('{"turns": 3}', 'while True:\n    await agents.a(what="x")', 3, "the 3 turns are used up"),
        ('{"tokens": 7}', 'while True:\n    await agents.a(what="x")', 3, "the 7 tokens are used up"),
        ('{"visits": 2}', 'while True:\n    await agents.a(what="x")', 2, "role a reached its 2 visits"),
        ('{"items": 4}', 'while True:\n    agents.a(what="x")', 4, "5 calls under way; limits.items is 4"),
        ("{}", "while True:\n    await gather()", 0, "the function made 100 calls"),
        ("{}", "async def f():\n    await gather(f())\nawait f()", 0, "the function made 100 calls"),
        ("{}", 'while True:\n    await ctx.tool("double", n=1)', 0, "the function made 100 calls"),
    ],
)
def test_a_limit_ends_the_episode(programmed, limits, body, turns, detail, monkeypatch):
    monkeypatch.setattr("masflow.runtime.program.MAX_CALLS", 100)
    plan = programmed(team(body, limits=limits, tools='{"double": "fns.py:double"}'), {"fns.py": TOOLS})
    one = run(plan)
    assert (one.outcome, len(one.turns)) == ("limit", turns), one.detail
    assert detail in one.detail and "main.py:" in one.detail


# faults of the function


@pytest.mark.parametrize(
    ("body", "outcome", "detail"),
    [
        ('x = {}\nx["k"]', "tool_error", "main.py:7: KeyError: 'k'"),
        ('await agents["c"](what="x")', "tool_error", "main.py:6: no role 'c'; known: a, b"),
        ('await agents.a[0](what="x")', "tool_error", "role 'a' is one voice, without members"),
        ('await ctx.tool("wik" + "ki", n=1)', "tool_error", "main.py:6: no tool 'wikki'; known: double"),
        ('await ctx.run("oth" + "er")', "tool_error", "no workflow 'other'; known: none"),
        ("await agents.a()", "tool_error", "the call gives no 'what': write agents.a(what=…)"),
        ("await agents.a(what={1, 2})", "tool_error", "main.py:6: a value must be plain data"),
        ('await agents.a(what="x", key=1.5)', "tool_error", "a key is text or a whole number"),
        ('await agents.a(what="x", thread="t")', "tool_error", "role 'a' has no conversation"),
        (
            'await agents.a(what="x", key="k")\nawait agents.a(what="y", key="k")',
            "tool_error",
            "main.py:7: 'a' has a call with key 'k' already, made at ",
        ),
        (
            'async def side():\n    pass\nctx.spawn(side())\nawait agents.a(what="x")',
            "tool_error",
            "main.py:8: the coroutine is never awaited; write 'await'",
        ),
        (
            'async def side():\n    return 1 / 0\nctx.spawn(side())\nawait agents.a(what="x")',
            "tool_error",
            "main.py:7: ZeroDivisionError",
        ),
        ('agents.a(what="x")', "tool_error", "main.py:6: a call of 'a' is never awaited; write 'await'"),
        (
            'call = agents.a(what="x")\nawait call\nawait call',
            "tool_error",
            "main.py:6: a call of 'a' is awaited twice; keep its value",
        ),
        ("import asyncio\nawait asyncio.sleep(0)", "tool_error", "main.py:7: awaits a NoneType; a workflow"),
        ("import asyncio\nawait asyncio.sleep(1)", "tool_error", "RuntimeError: no running event loop"),
        (
            'import asyncio\nawait asyncio.gather(agents.a(what="x"))',
            "tool_error",
            "masflow.gather",
        ),
        ("return object()", "tool_error", "what the function returns: the result must be plain data"),
        ("await gather(3)", "tool_error", "main.py:6: awaits a int"),
        (
            'call = agents.a(what="x")\nreturn call.text',
            "tool_error",
            "main.py:7: AttributeError: a call of 'a' isn't awaited: write (await …).text",
        ),
        ("class Odd(Exception):\n    def __str__(self):\n        raise SystemExit\nraise Odd", "tool_error",
         "main.py:9: Odd: (its message can't be read)"),
        ('raise ValueError("x" * 100_000)', "tool_error", "x" * 1000 + "…"),
        ('await gather([agents.a(what="x")])', "tool_error", "main.py:6: awaits a list; gather takes calls"),
        ('await gather(agents.a(what=w) for w in "xy")', "tool_error", "write gather(*…)"),
        ("x = []\nx.append(x)\nreturn x", "tool_error", "what the function returns: it holds itself"),
        ("x = []\nx.append(x)\nawait agents.a(what=x)", "tool_error", "main.py:8: it holds itself"),
        (
            "async def f():\n    pass\nc = f()\nawait gather(c, c)",
            "tool_error",
            "main.py:9: a coroutine is awaited twice; call its function once",
        ),
        (
            "async def f():\n    pass\nreturn f()",
            "tool_error",
            "main.py:4: what the function returns: the result must be plain data",
        ),
        (
            "import asyncio\nlock = asyncio.Lock()\nasync def f():\n    async with lock:\n"
            '        await agents.a(what="x")\nawait gather(f(), f())',
            "tool_error",
            "masflow.gather only",
        ),
        ('await agents.a("x")', "tool_error", "main.py:6: values have names: write agents.a(NAME=…)"),
        ("await agents.a", "tool_error", "main.py:6: a role is called: write await agents.a(…)"),
        ('await ctx.tool("double", 1)', "tool_error", "write ctx.tool('double', NAME=…)"),
        ('await ctx.tool("double", m=1)', "tool_error", "tool 'double': no argument 'm'; known: n"),
        ('await ctx.tool("double")', "tool_error", "main.py:6: tool 'double': needs 'n'; write n=…"),
        ('await ctx.tool("double", n="1")', "tool_error", "n: expected int, got '1' (str)"),
        ('await ctx.tool("double", n=None)', "tool_error", "n: expected int, got null"),
        ('await ctx.run("di" + "g", "x")', "tool_error", "task fields have names"),
        ('await agents.a(what="x", task="y")', "tool_error", "main.py:6: 'task' is what masflow calls it"),
        ('await agents.a(what="x", prompt=3)', "tool_error", "a prompt is a template's text; got 3"),
        ('await agents.a(what="x", prompt="a/b.md")', "tool_error", "'a/b.md' looks like a file"),
        ('await agents.a(what="x", key="~1")', "tool_error", "a key begins without '~'"),
        ('await agents.a(what="x", key="\\ud800")', "tool_error", "half a character"),
        ('await agents.a(what="x", thread=1.5)', "tool_error", "a thread is text or a whole number; got 1.5"),
        ("while True:\n    pass", "timeout", "the function's own code took more than 0.2 s"),
        ("raise SystemExit(3)", "tool_error", "SystemExit"),
    ],
)  # fmt: skip
def test_what_the_function_does_wrong_ends_the_episode_with_its_place(programmed, body, outcome, detail):
    limit = "0.2" if outcome == "timeout" else "60"
    settings = {"tools": '{"double": "fns.py:double"}', "timeout_s": limit}
    plan = programmed(team(body, **settings), {"fns.py": TOOLS})
    one = run(plan)
    assert one.outcome == outcome
    assert detail in one.detail, one.detail
    assert "main.py:" in one.detail


def test_what_a_coroutine_raises_can_be_caught_where_it_is_awaited(programmed):
    one = run(programmed(team("""
        async def side(word):
            found = await agents.a(what=word, key=word)
            if word == "2":
                raise ValueError(word)
            return found.text
        try:
            return {"got": await gather(*[side(word) for word in "123"])}
        except ValueError as error:
            caught = str(error)
        going = ctx.spawn(side("2" * 1)) if not caught else ctx.spawn(side("4"))
        return {"caught": caught, "later": await going, "last": (await agents.b(what="b")).text}
    """)))  # fmt: skip
    assert one.output == {"caught": "2", "later": "4", "last": "b"}, one.detail
    assert {t.text: t.superstep for t in one.turns} == {"1": 1, "2": 1, "3": 1, "4": 2, "b": 3}


def test_what_ends_an_episode_goes_before_what_a_coroutine_beside_it_raises(programmed):
    one = run(programmed(team("""
        async def side():
            raise ValueError("caught")
        try:
            await gather(side(), agents.a())
        except ValueError:
            pass
    """)))  # fmt: skip
    assert one.outcome == "tool_error" and "the call gives no 'what'" in one.detail


@pytest.mark.parametrize(
    ("decorator", "outcome", "detail"),
    [
        ("return f(*given)", "ok", ""),
        ("raise ValueError('no')", "tool_error", "main.py:7: ValueError: no"),
        ("return 3", "tool_error", "calling it gives no coroutine but a int; what decorates it?"),
        ("__import__('time').sleep(9)", "timeout", "calling it took more than 0.3 s; what decorates it?"),
    ],
)
def test_a_decorator_above_the_workflow_breaks_no_more_than_the_episode(
    programmed, decorator, outcome, detail
):
    above = "import functools\ndef deco(f):\n    @functools.wraps(f)\n    def made(*given): " + decorator
    one = run(programmed(f"{above}\n    return made\n@deco\n" + team("return {}", timeout_s="0.3")))
    assert one.outcome == outcome and detail in one.detail, one.detail


def test_what_a_function_imports_when_it_runs_may_stand_in_the_projects_root(programmed):
    body = "from late_neighbour_of_test import N\nreturn {'n': N}"
    assert run(programmed(team(body), {"late_neighbour_of_test.py": "N = 3\n"})).output == {"n": 3}


def test_many_calls_at_once_cost_no_more_each_than_few(programmed, monkeypatch):
    class Counted(dict):
        looked = 0

        def get(self, *given):
            Counted.looked += 1
            return super().get(*given)

    limits = '{"turns": 5000, "visits": 5000, "items": 5000}'
    counts = []
    for number in (40, 400):
        plan = programmed(team(f"""
            async def two(i):
                first = await agents.a(what=str(i), key=i)
                return (await agents.b(what=first.text, key=i)).text
            first = await gather(*[two(i) for i in range({number})])
            return {{"n": len(first), "end": (await agents.a(what="end")).text}}
        """, limits=limits))  # fmt: skip
        player = Player(plan)
        state = player.start({}, KEY)
        requests, Counted.looked = player.advance(state), 0
        assert state.live is not None
        state.live.predecessors = Counted(state.live.predecessors)
        while requests:
            for reply in ScriptedEngine({"*": told}).generate(requests):
                player.deliver(state, reply)
            requests = player.advance(state)
        one = player.trajectory(state)
        assert one.output["n"] == number, one.detail
        assert one.turns[-1].superstep == 3 and len(one.predecessors[one.turns[-1].id]) == number
        counts.append(Counted.looked)
    assert counts[1] <= 12 * max(counts[0], 40), counts


def test_a_misuse_ends_the_episode_even_where_the_function_catches_it(programmed):
    one = run(programmed(team("""
        try:
            await agents["nobody"]()
        except Exception:
            await agents.a(what="on")
    """)))  # fmt: skip
    assert one.outcome == "tool_error" and "no role 'nobody'" in one.detail


# any function


ANY = """
    from zlib import crc32

    async def go(node, heard):
        kind, *inner = node
        if kind == "seq":
            for one in inner:
                heard = await go(one, heard)
            return heard
        if kind == "par":
            return str(crc32("".join(await gather(*[go(one, heard) for one in inner])).encode()))
        if kind == "tool":
            return str(await ctx.tool("double", n=len(heard))) + heard
        if kind == "run":
            return (await ctx.run("dig", topic=heard, gold="")).found[-6:]
        asked = agents[kind](what=heard + str(len(heard)))
        return (await asked).text[-8:]

    early = agents.b(what="early", key="early")
    heard = await go(task.tree, "0")
    return {"all": heard + (await early).text}
"""
LEAVES = st.sampled_from([["a"], ["b"], ["tool"], ["run"]])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda kind, parts: [kind, *parts],
        st.sampled_from(["seq", "par"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=9,
)


@pytest.fixture
def anything(programmed: Programmed) -> Plan:
    more = {"task": '{"tree": "any"}', "tools": '{"double": "fns.py:double"}'}
    source = team(ANY, workflows='{"dig": "inner.py:dig"}', **more)
    return programmed(source, {"fns.py": TOOLS, "inner.py": INNER})


def seen(trajectory: Trajectory) -> list[Any]:
    return [(t.path, t.text, t.superstep, t.messages[-1].content, t.outcome) for t in trajectory.turns] + [
        (e.path, e.args, e.value, e.superstep) for e in trajectory.effects
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, order=st.randoms(use_true_random=False), at=st.integers(0, 99), saved=st.booleans())
def test_any_function_is_the_same_whatever_arrives_first_and_forks_as_it_happened(
    anything, tree, order, at, saved
):
    player, task = Player(anything), {"tree": tree}
    expected = run(anything, lambda r: Reply("", told(r), reply_tokens=1), task)
    assert expected.outcome == "ok", expected.detail
    state, waiting = player.start(task, KEY), []
    while not player.finished(state):
        if saved and order.random() < 0.3:
            state, waiting = EpisodeState.from_json(state.to_json()), []
        waiting += player.advance(state)
        if waiting:
            one = waiting.pop(order.randrange(len(waiting)))
            player.deliver(state, Reply(one.turn_id, told(one), reply_tokens=1))
    original = player.trajectory(state)
    assert original == expected and original.predecessors == expected.predecessors
    chosen = original.turns[at % len(original.turns)]
    fork = player.fork(state, chosen.id, (path_json(chosen.path), 1, 0))
    again = play(
        player, [fork], ScriptedEngine({"*": lambda r: Reply("", told(r), reply_tokens=1)}).generate
    )[0]
    assert seen(again) == seen(original) and again.output == original.output
    after = {chosen.id}
    for turn in original.turns:
        if after.intersection(original.predecessors[turn.id]):
            after.add(turn.id)
    assert {t.id for t in again.turns} & {t.id for t in original.turns} == {
        t.id for t in original.turns
    } - after


# other workflows inside


INNER = '''
from masflow import workflow


@workflow(task={"topic": str, "gold": {"type": str, "hidden": True}},
          roles={"digger": {"prompt": "say {{ topic }}-{{ round }}"}}, output={"found": "{{ result }}"})
async def dig(task, agents, ctx):
    """Digs into a topic."""
    first = await agents.digger(round=1)
    return (await agents.digger(round=first.text)).text
'''
INNER_YAML = """
name: hop
task: {topic: str}
roles: {hopper: {prompt: "say {{ topic }}", reply: {tag: x}}}
nodes: {hop: {role: hopper}}
edges: [start -> hop -> end]
output: {x: "{{ hop.x }}"}
"""


def test_a_function_runs_other_workflows_as_often_as_it_likes(programmed):
    plan = programmed(team("""
        start = await agents.a(what="ab")
        found = await gather(*[ctx.run("dig", topic=t, gold=task.gold, key=t) for t in start.text])
        hop = await ctx.run("hop", topic=found[0].found)
        last = await agents.b(what=found[1].found)
        return {"hop": hop, "last": last.text}
    """, task='{"gold": {"type": str, "hidden": True}}',
        workflows='{"dig": "inner.py:dig", "hop": {"use": "hop.yaml"}}'),
        {"inner.py": INNER, "hop.yaml": INNER_YAML})  # fmt: skip
    assert sorted(plan.policy_of) == ["a", "b", "dig/digger", "hop/hopper"]
    one = run(plan, task={"gold": "g"})
    assert one.output == {"hop": None, "last": "b-b-1"}, one.detail
    assert [(t.role, t.text, t.superstep) for t in one.turns] == [
        ("a", "ab", 1), ("dig/digger", "a-1", 2), ("dig/digger", "b-1", 2), ("dig/digger", "a-a-1", 3),
        ("dig/digger", "b-b-1", 3), ("hop/hopper", "a-a-1", 4), ("b", "b-b-1", 5),
    ]  # fmt: skip
    assert path_json(one.turns[1].path) == '[["","dig",1,"a",0,0],["dig","digger",1,null,0,0]]'


def test_a_role_calls_a_workflow_like_a_tool(programmed):
    roles = '{"a": {"prompt": "say {{ what }}", "tools": ["dig"], "reply": {"tag": "x"}}}'
    plan = programmed(
        team('return {"x": (await agents.a(what="go", key="k")).x}', roles,
             task='{"gold": {"type": str, "hidden": True}}', workflows='{"dig": "inner.py:dig"}'),
        {"inner.py": INNER},
    )  # fmt: skip
    answers = iter([
        '<tool_call>{"name": "dig", "arguments": {"topic": "t"}}</tool_call>',
        '<tool_call>{"name": "dig", "arguments": {"topic": "u"}}</tool_call>',
        "<x>8</x>",
    ])  # fmt: skip
    player = Player(plan)
    state = player.start({"gold": "g"}, KEY)
    engine = ScriptedEngine({"a": lambda r: next(answers), "dig/digger": told})
    [one] = play(player, [state], engine.generate)
    assert one.output == {"x": "8"}, one.detail
    assert [(t.role, t.text[:10], t.superstep) for t in one.turns] == [
        ("a", "<tool_call", 1), ("dig/digger", "t-1", 2), ("dig/digger", "t-t-1", 3),
        ("a", "<tool_call", 4), ("dig/digger", "u-1", 5), ("dig/digger", "u-u-1", 6), ("a", "<x>8</x>", 7),
    ]  # fmt: skip
    assert one.turns[6].messages[-1].content == "u-u-1"
    assert '"description": "Digs into a topic."' in one.turns[0].messages[0].content
    fork = player.fork(state, one.turns[4].id, (path_json(one.turns[4].path), 1, 0))
    [again] = play(player, [fork], ScriptedEngine({"a": lambda r: "<x>9</x>", "dig/digger": told}).generate)
    assert again.output == {"x": "9"} and [t.id for t in again.turns[:4]] == [t.id for t in one.turns[:4]]


def test_a_graph_runs_a_function_as_one_of_its_nodes(compiled):
    plan = compiled(
        """
        name: outer
        task: {topics: [str]}
        roles: {last: {prompt: "say {{ research.found | join('+') }}"}}
        nodes:
          research: {workflow: "inner.py:dig", foreach: topics, as: it, args: {topic: "{{ it }}", gold: g}}
          last: {role: last}
        edges: [start -> research -> last -> end]
        output: {all: "{{ last.text }}"}
        """,
        {"inner.py": INNER},
    )
    assert run(plan, task={"topics": ["a", "b"]}).output == {"all": "a-a-1+b-b-1"}


# rewards and demonstrations


def test_rewards_select_by_role_and_by_key_and_read_what_was_said(programmed):
    from masflow.rl.score import score

    plan = programmed(team("""
        first = await agents.a(what="1")
        await gather(*[agents.b(what=k, key=k) for k in ("x", "yy")])
        await agents.a(what=first.text + "2", key="final")
    """, rewards="""[
        {"name": "size", "use": "fns.py:size", "level": "turn",
         "roles": ["b"], "args": {"text": "{{ result.text }}"}},
        {"name": "key", "use": "fns.py:size", "level": "turn",
         "nodes": ["a:final"], "args": {"text": "{{ key }}"}},
        {"name": "when", "use": "fns.py:size", "level": "turn",
         "when": "item == 'yy'", "args": {"text": "{{ key }}"}},
        {"name": "grown", "use": "fns.py:size", "otherwise": 0, "pay": {"a": "gain", "b": "gain"},
         "measure": {"after": ["a"], "args": {"text": "{{ result.text }}"}}},
        {"name": "last", "use": "fns.py:size", "args": {"text": "{{ a.text }}"}},
    ]"""), {"fns.py": "def size(text: str) -> float:\n    return float(len(text))\n"})  # fmt: skip
    one = score(plan, [run(plan)])[0]
    paid = {t.text: one.components[t.id] for t in one.trajectory.turns}
    assert paid == {
        "1": {"grown": 1.0, "last": 2.0},
        "x": {"size": 1.0, "grown": 1.0, "last": 2.0},
        "yy": {"size": 2.0, "when": 2.0, "grown": 1.0, "last": 2.0},
        "12": {"key": 5.0, "grown": 1.0, "last": 2.0},
    }


def test_a_demonstration_names_its_turns_by_role_and_key(programmed):
    plan = programmed(team("""
        got = await gather(*[agents.a(what=k, key=k) for k in ("x", "y")])
        twice = await ctx.tool("double", n=len(got))
        await agents.b(what=f"{got[0].text}{got[1].text}{twice}")
    """, tools='{"double": "fns.py:double"}'), {"fns.py": TOOLS})  # fmt: skip
    turns = [
        {"node": "a", "key": "y", "reply": "Y"},
        {"node": "a", "key": "x", "reply": "X", "train": False},
        {"node": "double", "value": 40},
        {"node": "b", "reply": "end"},
    ]
    one = Player(plan).demonstrate({"task": {}, "turns": turns}, KEY)
    assert [(t.text, t.demonstrated) for t in one.turns] == [("X", False), ("Y", True), ("end", True)]
    assert one.turns[2].messages[-1].content == "say XY40"
