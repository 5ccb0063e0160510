"""Evaluation of expressions and templates: types kept, nothing rendered twice or changed, all bounded."""

from __future__ import annotations

import json
import random
import time
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from masflow.compiler.expressions import TemplateProblem, condition, evaluate, render, syntax_problem, value

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)

NAMES = {
    "search": {"action": "stop", "query": None, "items": 3},
    "state": {"steps": [{"q": "a"}, {"q": "b"}], "turn": 1},
    "skipped": None,
    "zeros": "007",
    "numbers": [3, 1, 2],
}


@given(JSON)
def test_a_value_that_is_one_expression_is_the_value_itself(found):
    assert value("{{ x }}", {"x": found}) == found
    assert value(" {{ x }}\n", {"x": found}) == found
    assert type(value("{{ x }}", {"x": found})) is type(found)


def test_the_reply_007_stays_text():
    assert value("{{ zeros }}", NAMES) == "007"
    assert evaluate("zeros", NAMES) == "007"
    assert value({"deep": ["{{ zeros }}"]}, NAMES) == {"deep": ["007"]}


@given(st.text(max_size=40))
def test_text_of_a_reply_is_never_rendered_again(text):
    hostile = "{{ 7 * 7 }}{% for i in x %}" + text + "{# c #}"
    assert render("A {{ x }} Z", {"x": hostile}) == f"A {hostile} Z"
    assert value("{{ x }}", {"x": hostile}) == hostile
    assert value("A {{ x }} Z", {"x": hostile}) == f"A {hostile} Z"


def test_two_expressions_or_text_around_one_make_text():
    assert value("{{ numbers[0] }}{{ numbers[1] }}", NAMES) == "31"
    assert value("n={{ numbers[0] }}", NAMES) == "n=3"
    assert value("{{ '}}' }}", NAMES) == "}}"
    assert value(3, NAMES) == 3


@pytest.mark.parametrize(
    "text", ["nowhere", "skipped.f", "skipped.f.g", "search.query", "search.typo", "numbers[9]"]
)
def test_what_is_undefined_as_a_whole_is_null(text):
    assert evaluate(text, NAMES) is None
    assert evaluate(f"[{text}]", NAMES) == [None]


def test_keys_come_before_methods():
    assert evaluate("search.items", NAMES) == 3
    assert evaluate("search['items']", NAMES) == 3
    assert evaluate("state.items()|length", NAMES) == 2


def test_a_field_of_a_list_is_the_list_of_the_fields_with_null_kept():
    assert evaluate("state.steps.q", NAMES) == ["a", "b"]
    assert evaluate("x.f", {"x": [{"f": 1}, None, {}]}) == [1, None, None]
    assert evaluate("x.f", {"x": []}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("numbers|map('string')", ["3", "1", "2"]),
        ("numbers|select('gt', 1)", [3, 2]),
        ("numbers|reject('gt', 1)", [1]),
        ("numbers|reverse", [2, 1, 3]),
        ("numbers|batch(2)", [[3, 1], [2]]),
        ("numbers|slice(3)", [[3], [1], [2]]),
        ("[1, 1, 2]|unique", [1, 2]),
        ("zip(numbers, 'a b c'.split())", [[3, "a"], [1, "b"], [2, "c"]]),
        ("range(3)", [0, 1, 2]),
        ("state.steps|groupby('q')", [["a", [{"q": "a"}]], ["b", [{"q": "b"}]]]),
        ("state.steps|map(attribute='q')|join('+')", "a+b"),
        ("state.steps|selectattr('q', 'eq', 'b')", [{"q": "b"}]),
        ("[len(numbers), min(numbers), max(numbers), sum(numbers), min([])]", [3, 1, 3, 6, None]),
        ("{'pair': (1, 2)}", {"pair": [1, 2]}),
        ("search.query or 'none'", "none"),
        ("search.query|default('none')", "none"),
        ("skipped is defined", False),
        ("skipped.f is none", True),
        ("numbers|bullets", "- 3\n- 1\n- 2"),
        ("search|json", '{"action": "stop", "query": null, "items": 3}'),
        ("'%.2f'|format(1.239)", "1.24"),
    ],
)
def test_filters_and_functions_give_plain_values(text, expected):
    assert evaluate(text, NAMES) == expected


def test_chance_is_drawn_from_the_seed_that_is_given():
    names = {"x": list(range(50))}
    for text in ("x|shuffle", "shuffle(x)", "x|take(5)", "take(x, 5)", "x|random", "random(x)", "random()"):
        first = evaluate(text, names, random.Random(1))
        assert first == evaluate(text, names, random.Random(1))
        assert any(first != evaluate(text, names, random.Random(seed)) for seed in range(2, 6))
        with pytest.raises(TemplateProblem, match="chance"):
            evaluate(text, names)
    assert sorted(evaluate("x|shuffle", names, random.Random(3))) == names["x"]
    taken = evaluate("x|take(5)", names, random.Random(3))
    assert len(taken) == 5 and taken == sorted(set(taken))
    assert names["x"] == list(range(50))


def test_prompts_trim_the_lines_of_their_blocks():
    text = "{% for n in numbers %}\n  {% if n > 1 %}\n- {{ n }}\n  {% endif %}\n{% endfor %}\nend\n"
    assert render(text, NAMES) == "- 3\n- 2\nend"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\n{{ skipped }}", r"null.*\(line 2\)"),
        ("{{ search.query }}", "null"),
        ("{{ numbers }}", "prints a list"),
        ("\n\n{{ search }}", r"prints a mapping.*\(line 3\)"),
        ("{{ 'a' ~ skipped }}", "null"),
        ("{{ skipped|upper }}", "null"),
        ("{{ [skipped]|join }}", "null"),
        ("{% for i in skipped %}{% endfor %}", "null"),
        ("{% for i in zeros %}{% endfor %}", "expected a list"),
        ("{{ numbers.foo }}", "has no field 'foo'"),
    ],
)
def test_printing_what_has_no_text_is_a_problem(text, said):
    with pytest.raises(TemplateProblem, match=said):
        render(text, NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("search.action == 'stop'", True),
        ("skipped", False),
        ("skipped and skipped.f == 'a'", False),
        ("search.action and search.action == 'go'", False),
        ("'' and true", False),
        ("not skipped", True),
        ("skipped or true", True),
    ],
)
def test_a_condition_is_a_bool_or_null(text, expected):
    assert condition(text, NAMES) is expected


@pytest.mark.parametrize(
    "text", ["search.action", "state.turn", "numbers", "skipped or 'x'", "true and zeros"]
)
def test_any_other_condition_is_a_problem(text):
    with pytest.raises(TemplateProblem, match="must be true, false or null"):
        condition(text, NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "range(10**9)",
        "'x' * 10**9",
        "[0] * 10**9",
        "10**10**10**10**10",
        "'%1000000000d'|format(1)",
        "'%*d'|format(10**9, 1)",
        "'%999999999d' % 1",
        "('a' * 10**6)|replace('', 'b' * 10**6)",
        "('a' * 10**6).replace('a', 'b' * 10**6)",
        "[1]|batch(10**9, 0)|list",
        "5|round(-10**9)",
        "'a'|indent(10**9)",
        "numbers.append(4)",
        "search.update({})",
        "search.pop('action')",
        "().__class__.__bases__",
        "''.__class__.__mro__",
        "'{0.__class__}'.format(1)",
        "joiner()",
        "lipsum()",
        "namespace.__init__.__globals__['os']",
        "(" * 3000 + ")" * 3000,
        "+".join(["1"] * 3000),
        "1/0",
        "[range]",
        "{1: 2}",
    ],
)
def test_what_reaches_too_far_ends_in_a_problem_quickly(text):
    started = time.perf_counter()
    with pytest.raises(TemplateProblem):
        evaluate(text, NAMES)
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(90) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(90) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=0) %}{% for i in range(90) %}{% set ns.x = [ns.x] * 2 %}{% endfor %}"
        "{{ ns.x|json }}",
        "{% set ns = namespace(x=7) %}{% for i in range(90) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% include 'a' %}",
        "{% import 'a' as b %}",
        "{% extends 'a' %}",
    ],
)
def test_a_prompt_that_would_not_end_is_a_problem(text):
    started = time.perf_counter()
    with pytest.raises(TemplateProblem):
        render(text, NAMES)
    assert time.perf_counter() - started < 15


TEXTS = st.sampled_from(
    [
        "x|sort",
        "x|list",
        "x|reverse",
        "x + x",
        "x|map('string')",
        "x|unique",
        "dict(a=x)",
        "x|shuffle",
        "[x, x]",
        "x[1:]",
    ]
)


@given(st.lists(st.integers() | st.text(max_size=3), max_size=5), TEXTS)
def test_an_expression_never_changes_what_it_sees(items, text):
    names = {"x": items}
    before = deepcopy(names)
    try:
        found = evaluate(text, names, random.Random(0))
    except TemplateProblem:
        found = None
    assert names == before
    assert found is None or json.loads(json.dumps(found)) == found


@settings(max_examples=300)
@given(st.text(alphabet="{}%#|()[].,'\"+-*~ abx01\n=!<>&", max_size=30))
def test_any_source_ends_in_a_value_or_a_problem(text):
    for kind in ("expression", "template", "value"):
        if syntax_problem(text, kind) is not None:
            continue
        try:
            if kind == "expression":
                evaluate(text, NAMES, random.Random(0))
            elif kind == "template":
                render(text, NAMES, random.Random(0))
            else:
                value(text, NAMES, random.Random(0))
        except TemplateProblem:
            pass


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("a = 'b'", "expression", "'=='"),
        ("a && b", "expression", "'and'"),
        ("a || b", "expression", "'or'"),
        ("{{ a }}", "expression", "without"),
        ("  ", "expression", "empty"),
        ("a b", "expression", "'b' isn't expected"),
        ("x|joinn(', ')", "expression", "did you mean 'join'"),
        ("x is definde", "expression", "did you mean 'defined'"),
        ("a\n{{ b", "template", r"line 2"),
        ("{% if a %}", "template", "line 1"),
        ("{{ a b }}", "value", "expected"),
    ],
)
def test_a_syntax_problem_says_how_to_write_it(text, kind, said):
    assert said in (syntax_problem(text, kind) or "")
    assert syntax_problem("a", kind) is None


def test_evaluation_is_fast_enough_for_the_player():
    names = {**NAMES, **{f"n{i}": i for i in range(60)}}

    def work() -> None:
        evaluate("state.steps", names)
        condition("search.action == 'stop'", names)
        value({"query": "{{ search.query or '' }}"}, names)
        render("Q {{ zeros }}\n{% for s in state.steps %}\n- {{ s.q }}\n{% endfor %}\n", names)

    work()
    rounds = []
    for _ in range(20):
        started = time.perf_counter()
        work()
        rounds.append(time.perf_counter() - started)
    assert min(rounds) < 200e-6


@pytest.mark.parametrize("text", ['{{ "\\ud800" }}', '{{ ["a", "\\udfff"] }}', '{{ "x" ~ "\\ud800" }} y'])
def test_half_characters_are_refused_and_numbers_stay_finite(text):
    with pytest.raises(TemplateProblem, match="half a character"):
        value(text, {})
    with pytest.raises(TemplateProblem, match="isn't finite"):
        evaluate("1e308 * 10", {})
