"""One door for built-ins and users' functions: time limits, typed failures, state of an episode."""

import json
import time
from dataclasses import replace
from textwrap import dedent

import numpy
import pytest

from masflow.compiler.graph import FunctionIR, Graph, ToolIR
from masflow.compiler.plan import Plan
from masflow.errors import EpisodeError
from masflow.timelimit import OutOfTime, call_limited
from masflow.tools import ToolBox, fork_state, plain, settings_problems

CODE = dedent(
    """
    import asyncio, time

    def shout(text, suffix="!"):
        return {"text": text.upper() + suffix, "pair": (1, 2)}

    async def slowly(text):
        await asyncio.sleep(0)
        return text[::-1]

    def breaks(text):
        raise KeyError(text)

    def hangs(text):
        while True:
            pass

    async def sleeps(text):
        await asyncio.sleep(60)

    def gives_an_object(text):
        return object()

    def leaves(text):
        raise SystemExit(3)

    def counts(state, text):
        state["n"] = state.get("n", 0) + 1
        return state["n"]

    class Shop:
        def __init__(self, stock=2):
            self.stock = stock
        def __call__(self, item):
            if self.stock == 0:
                return "sold out"
            self.stock -= 1
            return f"sold {item}"
        def fork(self):
            return Shop(self.stock)
    """
)


@pytest.fixture
def box(tmp_path):
    (tmp_path / "tools.py").write_text(CODE)
    return ToolBox(Plan(root="w", workflows={"w": Graph(name="w")}, root_dir=str(tmp_path)))


def tool(box, name, **fields):
    return ToolIR(name, FunctionIR(f"{box.root}/tools.py:{name}"), **fields)


def test_a_function_gets_its_settings_and_args_and_gives_plain_data(box):
    assert box.call("w", tool(box, "shout", settings={"suffix": "?"}), {"text": "hey"}, {}) == {
        "text": "HEY?",
        "pair": [1, 2],
    }


def test_an_async_function_is_awaited(box):
    assert box.call("w", tool(box, "slowly"), {"text": "abc"}, {}) == "cba"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "KeyError: 'abc'"),
        ("gives_an_object", "TypeError: the result must be plain data"),
        ("leaves", "SystemExit: 3"),
    ],
)
def test_a_tool_that_breaks_ends_the_episode_with_tool_error_and_says_whose_it_is(box, name, message):
    with pytest.raises(EpisodeError) as caught:
        box.call("w", tool(box, name), {"text": "abc"}, {})
    assert caught.value.outcome == "tool_error"
    assert message in caught.value.message
    assert f"tool {name} (" in caught.value.message


@pytest.mark.parametrize("name", ["hangs", "sleeps"])
def test_a_tool_that_runs_too_long_ends_with_timeout_and_the_next_call_works(box, name):
    begin = time.monotonic()
    with pytest.raises(EpisodeError) as caught:
        box.call("w", tool(box, name, timeout_s=0.05), {"text": "abc"}, {})
    assert (caught.value.outcome, time.monotonic() - begin < 5) == ("timeout", True)
    assert box.call("w", tool(box, "slowly"), {"text": "abc"}, {}) == "cba"


def test_state_of_an_episode_is_its_own_and_forks(box):
    shop, one, other = tool(box, "Shop", scope="episode", settings={"stock": 1}), {}, {}
    assert box.call("w", shop, {"item": "hat"}, one) == "sold hat"
    branch = fork_state(other)
    assert box.call("w", shop, {"item": "hat"}, branch) == "sold hat"
    forked = fork_state(one)
    one["w/Shop"].stock = 5
    assert box.call("w", shop, {"item": "hat"}, forked) == "sold out"


def test_a_function_with_state_keeps_it_within_one_episode(box):
    counts, episode = tool(box, "counts", scope="episode"), {}
    assert [box.call("w", counts, {"text": ""}, episode) for _ in range(2)] == [1, 2]
    forked = fork_state(episode)
    assert box.call("w", counts, {"text": ""}, forked) == 3
    assert box.call("w", counts, {"text": ""}, episode) == 3
    assert box.call("w", counts, {"text": ""}, {}) == 1


def test_a_shared_class_is_made_once(box):
    shop = tool(box, "Shop")
    assert [box.call("w", shop, {"item": "x"}, {}) for _ in range(3)] == ["sold x", "sold x", "sold out"]


def test_builtins_answer_by_name(box):
    calculator = ToolIR("sums", FunctionIR("calculator"))
    assert box.call("w", calculator, {"expression": "2*21"}, {})["value"] == 42
    with pytest.raises(EpisodeError, match="expression must be text, got None"):
        box.call("w", calculator, {"expression": None}, {})


def test_wrong_settings_are_told_with_the_known_ones():
    assert settings_problems("bm25", {"corpus": "c", "top_k": 3}) == []
    (missing,) = settings_problems("bm25", {})
    assert "setting 'corpus' of bm25: missing key 'corpus'" in missing
    assert len(settings_problems("bm25", {"corpus": "c", "topk": 3, "b": 2})) == 2


def test_a_connection_opened_in_a_function_lives_on_between_calls():
    import threading

    threads = {call_limited(threading.get_ident, {}, 1.0) for _ in range(3)}
    assert len(threads) == 1


def test_out_of_time_says_the_limit():
    with pytest.raises(OutOfTime, match=r"no result within 0\.01 s"):
        call_limited(lambda: time.sleep(0.2), {}, 0.01)


def test_two_workflows_may_have_tools_of_one_name(box):
    episode = {}
    counts = tool(box, "counts", scope="episode")
    assert box.call("w", counts, {"text": ""}, episode) == 1
    assert box.call("v", replace(counts), {"text": ""}, episode) == 1


class _Word(str):
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({1, 2}, "got set"),
        (object(), "got object"),
        (b"x", "got bytes"),
        (float("nan"), "isn't finite"),
        ({"a": [float("inf")]}, "isn't finite"),
        ("\ud800", "half a character"),
        (10**5000, "too many digits"),
        ({1: "x"}, "must be text"),
        (numpy.zeros(2), r"call its \.tolist"),
        ([[]] * 3, None),
        ({"a": (1, 2.5, None, True)}, None),
    ],
    ids=["set", "object", "bytes", "nan", "inf", "half", "huge", "key", "array", "lists", "tuple"],
)
def test_what_comes_back_is_data_that_can_be_written_down(value: object, reason: str | None) -> None:
    if reason is None:
        assert json.dumps(plain(value)) == json.dumps(value)
        return
    with pytest.raises(TypeError, match=reason):
        plain(value)


def test_kinds_of_text_and_numbers_become_plain_ones() -> None:
    assert [type(v) for v in plain([_Word("a"), numpy.float64(1.5), True])] == [str, float, bool]
    looped: list[object] = []
    looped.append(looped)
    with pytest.raises(RecursionError):
        plain(looped)
