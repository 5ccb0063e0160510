"""YAML 1.2 by the core schema, with lines, and nothing changed silently."""

import time

import pytest

from masflow.errors import SpecError
from masflow.spec.yaml import read_yaml


def data(text: str):
    value, _, notes = read_yaml(text, "d.yaml")
    assert not notes, notes
    return value


def codes(text: str) -> list[str]:
    try:
        return [p.code for p in read_yaml(text, "d.yaml")[2]]
    except SpecError as error:
        return [p.code for p in error.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"), ("on", "on"), ("true", True), ("False", False), ("~", None), ("", None),
        ("12", 12), ("-3", -3), ("0", 0), ("0o17", 15), ("0xff", 255), ("1_000", "1_000"), ("1:30", "1:30"),
        ("3e-3", 0.003), (".5", 0.5), ("1.", 1.0), ("1e3", 1000.0), ("2001-01-01", "2001-01-01"),
        ('"007"', "007"), ("'12'", "12"), ("=", "="), ("1.2.3", "1.2.3"), ("0b1", "0b1"), ("str?", "str?"),
    ],
)  # fmt: skip
def test_a_plain_scalar_is_what_the_core_schema_of_yaml_1_2_says(text, value):
    found = data(f"a: {text}\n")["a"]
    assert found == value and type(found) is type(value)


def test_keys_are_their_own_text():
    assert data("{true: 1, 1: 2, null: 3, 1.50: 4}") == {"true": 1, "1": 2, "null": 3, "1.50": 4}


def test_a_byte_order_mark_and_windows_line_ends_are_read():
    value, lines, _ = read_yaml(b"\xef\xbb\xbfa: 1\r\nb:\r\n  - 2\r\n", "d.yaml")
    assert value == {"a": 1, "b": [2]} and lines[("b", 0)] == 3


def test_an_alias_gives_the_anchored_value_again():
    assert data("a: &x {b: [1]}\nc: *x\nd: &y 3\ne: [*y, *x]") == {
        "a": {"b": [1]}, "c": {"b": [1]}, "d": 3, "e": [3, {"b": [1]}]
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "edges:\n  - a -> b when x == 1 # really\n",
        "edges:\n  - a -> b   # first\n",
        "edges:\n  - \"a -> b when x == ' #1'\"\n",
        "when: x in ['a', 'b'] # either\n",
        "a: [don't, won't, it's]\n",
        'a: {say: (hello), b: "f(x, y)"}\n',
        "text: it's a (very\n",
        'a: "{{ x }}"  # a template\n',
        "a: [1, 2] # {{ odd }}\n",
        "a: |\n  {{ x }}\n  b: c #d\n",
    ],
)
def test_what_yaml_did_not_change_is_left_alone(text):
    assert codes(text) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("edges:\n  - a -> b when x == #1\n", "cut-at-comment"),
        ("edges:\n  - a -> b when x == '#1' and y == ' #2'\n", "cut-at-comment"),
        ("edges:\n  - {from: a, to: b, when: x == ' #1'}\n", "yaml-syntax"),
        ("foreach: x[ #1\n", "cut-at-comment"),
        ("a: say {{ x | d(' #') }}\n", "cut-at-comment"),
        ("a: {{ x }}\n", "unquoted-template"),
        ("a: {{ x.y | join(', ') }}\n", "unquoted-template"),
        ("a:\n  - {{ x['k'] }} and more\n", "unquoted-template"),
        ("a: [{{ x }}, 1]\n", "unquoted-template"),
        ("a: {b: {{ x }}}\n", "unquoted-template"),
        ("a: [f(x, y), 1]\n", "split-expression"),
        ("a: {when: x in ('a', 'b')}\n", "yaml-syntax"),
        ("a: b\n  c: d\n", "yaml-syntax"),
        ('a: "b\n', "yaml-syntax"),
        ("a: 'b' c\n", "yaml-syntax"),
        ("a: @b\n", "yaml-syntax"),
        ("a: %b\n", "yaml-syntax"),
        ("a:\n  b: 1\n\tc: 2\n", "tab"),
        ("\ta: b", "tab"),
        ("!!map {a: b}", "yaml-tag"),
        ("a: !env X", "yaml-tag"),
        ("a: 1\n...\nb: 2\n", "several-documents"),
        ("a: 1\na: 2\n", "duplicate-key"),
        ('{a: 1, "a": 2}\n', "duplicate-key"),
        ("? {a: b}\n: c\n", "bad-key"),
        ("[a]: b\n", "bad-key"),
    ],
)
def test_what_yaml_would_change_or_refuse_is_named(text, code):
    assert code in codes(text)


def test_all_notes_of_a_document_come_together():
    assert set(codes("a: {{ x }}\nb: 007\nb: 2\nc: !x 3\n")) == {
        "unquoted-template", "leading-zero", "duplicate-key", "yaml-tag"
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 50_000,
        "- " * 30_000,
        "a: " + "(x, " * 3000 + "1",
        "a: [" + "(x, " * 3000 + "1]",
        "a: [" + "'b, " * 3000 + "1]",
        "&a " * 3000,
        "a: " + "9" * 100_000,
        "\n".join(f"k{i}: v # (" for i in range(4000)),
    ],
    ids=range(9),
)
def test_hostile_sizes_end_quickly(text):
    begin = time.process_time()
    codes(text)
    assert time.process_time() - begin < 5
