"""Every reply format: what it reads, what it refuses and why, and that no text breaks it."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from masflow.runtime.replies import parse_reply
from masflow.spec.replies import FORMATS, Reply, normalise_reply

SPEC: TypeAdapter[Any] = TypeAdapter(Reply)


def spec(raw: object) -> Any:
    return SPEC.validate_python(normalise_reply(raw))


GOOD = [
    ("text", "  hello \n", {"text": "hello"}),
    ({"tag": "q"}, "I think <q> a  b </q> yes", {"q": "a  b"}),
    ({"tag": "q"}, "<q>first</q> no, <q>second</q>", {"q": "second"}),
    ({"tag": "q"}, "<q></q>", {"q": ""}),
    ({"tags": {"n": "int", "why": "str?"}}, "<n> 42 </n>", {"n": 42, "why": None}),
    ({"tags": {"id": "str"}}, "<id>007</id>", {"id": "007"}),
    ({"tags": {"id": "any"}}, "<id>007</id>", {"id": "007"}),
    ({"tags": {"x": "float", "b": "bool"}}, "<x>-1.5e3</x><b>Yes</b>", {"x": -1500.0, "b": True}),
    ({"tags": {"n": "int?"}}, "<n>none</n>", {"n": None}),
    ({"tags": {"w": "str?"}}, "<w>none</w>", {"w": "none"}),
    ({"tags": {"a": ["go", "stop"]}}, "<a>STOP</a>", {"a": "stop"}),
    ({"tags": {"l": ["str"]}}, '<l>["a", "b"]</l>', {"l": ["a", "b"]}),
    ({"json": {"a": "int", "b": "str?"}}, '{"a": 1}', {"a": 1, "b": None}),
    ({"json": {"a": "int"}}, 'so: ```json\n{"a": 1, "extra": 2}\n```', {"a": 1}),
    ({"json": {"a": "int"}}, 'a set {x} and then {"a": 3} done', {"a": 3}),
    ({"json": {"a": "float"}}, '{"a": 2}', {"a": 2.0}),
    ({"json": {"a": [{"n": "int"}]}}, '{"a": [{"n": 1}, {"n": 2}]}', {"a": [{"n": 1}, {"n": 2}]}),
    ({"json": {"next": ["go", "1"]}}, '{"next": 1}', {"next": "1"}),
    ({"choice": ["yes", "no"]}, " Yes\n", {"choice": "yes"}),
    ({"regex": r"(?P<a>\d+)-(?P<b>\d+)?"}, "about 10-", {"a": "10", "b": None}),
    (
        {"code": "python"},
        "Here:\n```python\nx = 1\n\ny = 2\n```\nand\n```python\nz\n```",
        {"code": "x = 1\n\ny = 2"},
    ),
    ({"code": "python"}, "```bash\nls\n```\n```py\nx\n```", {"code": "x"}),
]


@pytest.mark.parametrize(("raw", "text", "value"), GOOD)
def test_a_reply_has_its_value(raw: object, text: str, value: dict[str, Any]):
    parsed = parse_reply(spec(raw), text)
    assert (parsed.value, parsed.reason) == (value, "")
    assert all(type(parsed.value[k]) is type(v) for k, v in value.items())  # type: ignore[index]


BAD = [
    ("text", " \n", "empty"),
    ({"tag": "q"}, "q: x", "no <q>"),
    ({"tag": "q"}, "<q>x", "never closed"),
    ({"tag": "q"}, "<q>x</q> <q>y", "never closed"),
    ({"tags": {"n": "int"}}, "<n>4.5</n>", "n: expected int, got '4.5'"),
    ({"tags": {"n": "int"}}, "<n>four</n>", "expected int"),
    ({"tags": {"a": ["go", "stop"]}}, "<a>wait</a>", "expected one of go, stop"),
    ({"tags": {"l": ["int"]}}, "<l>[1, 'x']</l>", "not JSON"),
    ({"json": {"a": "int"}}, "nothing", "no JSON object"),
    ({"json": {"a": "int"}}, '{"a": 1', "not JSON"),
    ({"json": {"a": "int"}}, '{"a": "1"}', "a: expected int, got '1' (str)"),
    ({"json": {"a": "int"}}, '{"a": true}', "a: expected int"),
    ({"json": {"a": "int"}}, "{}", "a: expected int, got null"),
    ({"json": {"a": "float"}}, '{"a": NaN}', "isn't JSON"),
    ({"json": {"a": "str"}}, '{"a": "\\ud800"}', "half a character"),
    ({"json": {"a": "any"}}, '{"a": ' + "[" * 100_000, "nested"),
    ({"choice": ["yes", "no"]}, "yes and no", "expected one of yes, no"),
    ({"regex": r"(?P<a>\d+)"}, "none", "isn't found"),
    ({"code": "python"}, "```\nx\n```", "no ```python block"),
    ({"code": "python"}, "```python\nx", "never closed"),
]


@pytest.mark.parametrize(("raw", "text", "reason"), BAD)
def test_a_malformed_reply_says_why(raw: object, text: str, reason: str):
    parsed = parse_reply(spec(raw), text)
    assert parsed.value is None
    assert reason in parsed.reason
    assert len(parsed.reason) < 400


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_a_json_schema_is_held():
    assert parse_reply(spec({"json": SCHEMA}), '{"n": 2}').value == {"n": 2}
    assert "minimum" in parse_reply(spec({"json": SCHEMA}), '{"n": 0}').reason
    assert "required" in parse_reply(spec({"json": SCHEMA}), "{}").reason


def test_a_stop_string_counts_as_written():
    assert parse_reply(spec({"tag": "q"}), "<q>x", stop=("</q>",)).value == {"q": "x"}
    assert parse_reply(spec({"code": "python"}), "```python\nx", stop=("```",)).value == {"code": "x"}
    assert not parse_reply(spec({"tag": "q"}), "<q>x", stop=("</p>",)).ok


def test_choices_given_at_run_time_are_used():
    dynamic = spec({"choice": "{{ words }}"})
    assert parse_reply(dynamic, "2", choices=[1, 2]).value == {"choice": "2"}
    assert not parse_reply(dynamic, "3", choices=[1, 2]).ok


PIECES = ["<q>", "</q>", "<n>", "</n>", '{"a":', '"x"', "1", "}", "[", "]", "```python\n", "```", "\n", "-"]


@given(
    st.sampled_from([raw for raw, _, _ in GOOD] + [{"json": SCHEMA}]),
    st.one_of(
        st.text(st.characters()),
        st.text("<>/qna{}[]\"':,`python \n0123-.eE"),
        st.lists(st.sampled_from([*PIECES, "\x00", "\ud800"])).map("".join),
    ),
)
def test_any_text_ends_in_a_value_that_json_holds_or_in_a_reason(raw: object, text: str):
    parsed = parse_reply(spec(raw), text)
    assert parsed.ok != bool(parsed.reason)
    if parsed.ok:
        assert json.loads(json.dumps(parsed.value)) == parsed.value
        assert parsed == parse_reply(spec(raw), text)


def test_every_format_is_tried_above():
    assert {spec(raw).format for raw, _, _ in GOOD} == {spec(raw).format for raw, _, _ in BAD} == set(FORMATS)


@pytest.mark.parametrize("text", ["<q>" * 200_000, "{" * 200_000, "```python\n" * 100_000, "(" * 100_000])
def test_a_long_reply_takes_no_long_time(text: str):
    import time

    for raw in ({"tag": "q"}, {"tags": {"q": "int"}}, {"json": {"a": "int"}}, {"code": "python"}, "text"):
        start = time.process_time()
        parse_reply(spec(raw), text)
        assert time.process_time() - start < 1


EXPLODES = r"^(?P<x>(a|a)+)+$"


@pytest.mark.parametrize(
    "raw",
    [
        {"regex": EXPLODES},
        {"json": {"type": "object", "properties": {"a": {"type": "string", "pattern": EXPLODES}}}},
        {"json": {"type": "object", "patternProperties": {EXPLODES: {"type": "string"}}}},
    ],
    ids=["regex", "schema", "schema keys"],
)
def test_a_pattern_that_backtracks_without_end_makes_the_reply_malformed(raw):
    letters = "a" * 64 + "b"
    text = letters if "regex" in raw else json.dumps({"a": letters, letters: "a"})
    started = time.monotonic()
    parsed = parse_reply(spec(raw), text)
    assert not parsed.ok
    assert "took more than" in parsed.reason
    assert time.monotonic() - started < 10


def test_patterns_of_a_schema_mean_what_they_say():
    raw = {"json": {"type": "object", "properties": {"a": {"pattern": "^x"}},
                    "patternProperties": {"^n_": {"type": "integer"}}}}  # fmt: skip
    assert parse_reply(spec(raw), '{"a": "xy", "n_b": 3, "m": "free"}').ok
    assert "does not match" in parse_reply(spec(raw), '{"a": "yx"}').reason
    assert "$.n_b" in parse_reply(spec(raw), '{"n_b": "three"}').reason


def test_a_reply_without_a_format_is_text():
    assert spec({"max_tokens": 7}) == spec({"format": "text", "max_tokens": 7})
    assert spec({}) == spec("text")


def test_a_value_that_is_nested_too_deeply_is_malformed():
    assert parse_reply(spec({"json": {"a": "any"}}), '{"a": ' + "[" * 63 + "]" * 63 + "}").ok
    assert (
        "levels deep"
        in parse_reply(spec({"json": {"a": "any"}}), '{"a": ' + "[" * 900 + "]" * 900 + "}").reason
    )


def test_definitions_inside_a_schema_are_found():
    raw = {
        "json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"minimum": 2}}}
    }
    assert parse_reply(spec(raw), '{"a": 2}').ok
    assert "minimum" in parse_reply(spec(raw), '{"a": 1}').reason


THOUGHT = '<think>\n<q>no</q> {"a": 7} yes 8-9 ```python\nw\n```\n</think>\n\n'


@pytest.mark.parametrize(("raw", "text", "value"), GOOD)
def test_a_thought_is_no_part_of_a_value(raw: object, text: str, value: dict[str, Any]):
    assert parse_reply(spec(raw), THOUGHT + text).value == value
    # The prompt may have opened it already.
    assert parse_reply(spec(raw), THOUGHT.removeprefix("<think>\n") + text).value == value


@pytest.mark.parametrize("raw", ["text", {"tag": "q"}, {"json": {"a": "int"}}, {"choice": ["yes", "no"]}])
def test_a_thought_that_is_never_closed_has_no_answer(raw: object):
    open_ = parse_reply(spec(raw), THOUGHT.replace("</think>", ""))
    assert not open_.ok and "<think> is never closed" in open_.reason


def test_a_reply_that_asks_for_the_thought_gets_it():
    text = "<think> a plan </think><answer>4</answer>"
    asked = spec({"tags": {"think": "str", "answer": "int"}})
    assert parse_reply(asked, text).value == {"think": "a plan", "answer": 4}
    shaped = spec({"regex": r"<think>(?P<why>.*)</think>.*<answer>(?P<n>\d+)</answer>"})
    assert parse_reply(shaped, text).value == {"why": " a plan ", "n": "4"}
    assert parse_reply(spec({"tags": {"answer": "int"}}), text).value == {"answer": 4}
