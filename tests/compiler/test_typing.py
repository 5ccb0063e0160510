"""What the analysis says of single expressions: types, guards, misuse; and that it agrees with evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from masflow.compiler.analysis import analyse, analyse_condition, references
from masflow.compiler.expressions import TemplateProblem, condition, evaluate, render
from masflow.compiler.findings import Found
from masflow.compiler.guards import ran, went_well
from masflow.compiler.inference import UNKNOWN, declared, fits, join, nullable, type_of
from masflow.spec.types import Type, mismatch, parse_type

SEARCH = parse_type({"action": ["search", "stop"], "query": "str?"})


class Scope:
    """`search` may not have run; `steps`, `q`, `words`, `any` are there; `state` and `visits` hold others."""

    names: Mapping[str, Found] = {
        "search": Found(
            nullable(SEARCH), "it may not have run", guards=frozenset((ran("s"), went_well("s")))
        ),
        "steps": Found(parse_type([{"a": "str", "n": "int?"}])),
        "q": Found(parse_type("str")),
        "words": Found(parse_type(["str"])),
        "any": Found(UNKNOWN),
        "state": Found(UNKNOWN),
        "visits": Found(UNKNOWN),
        "ok": Found(UNKNOWN),
    }
    entries: Mapping[str, Mapping[str, Found]] = {
        "state": {"guess": Found(parse_type("str")), "n": Found(parse_type("int"))},
        "visits": {"s": Found(parse_type("int"))},
        "ok": {"s": Found(parse_type("bool?"))},
    }

    def container(self, name: str) -> str:
        return {"state": "state field", "visits": "node", "ok": "node"}.get(name, "")

    def find(self, name: str, entry: str | None = None) -> Found | None:
        return self.names.get(name) if entry is None else self.entries[name].get(entry)

    def known(self, container: str = "") -> Iterable[str]:
        return self.entries[container] if container else self.names


def codes(text: str, kind: str = "expression") -> list[str]:
    return [issue.code for issue in analyse(text, kind, Scope()).issues]  # type: ignore[arg-type]


GUARDED = [
    "search and search.action",
    "search.action if search",
    "search.action if search else 'stop'",
    "search.action if search is defined",
    "search.action if search is not none",
    "search.action if search != none",
    "'a' if search is none else search.action",
    "'a' if not search else search.action",
    "search.query or ''",
    "search.query | default('')",
    "search is defined and search.action == 'stop'",
    "not search or search.action == 'stop'",
    "search is none or search.action == 'stop'",
    "search.action if visits.s > 0",
    "search.action if visits.s",
    "search.action if 1 <= visits.s",
    "search.action if ok.s",
    "search.action if ok.s == true",
    "search.action if search and q == 'a'",
    "search.action is none",
    "search['action'] or 'x'",
]


@pytest.mark.parametrize("text", GUARDED)
def test_a_guarded_field_is_no_issue(text):
    assert codes(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "search.action",
        "search['action']",
        "search.action == 'stop'",
        "search.action if q",
        "search.action if not search",
        "search.action if search or q",
        "search.action if visits.s >= 0",
        "search.action if visits.s < 3",
        "search.action if ok.s == false",
        "search and q or search.action",
        "search.action and search",
        "[search.action]",
        "'x' if search.action == 'stop' and search",
    ],
)
def test_an_unguarded_field_of_null_is_an_issue(text):
    expected = [] if text == "search.action and search" else ["null-field"]
    assert codes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% if search %}{{ search.action }}{% endif %}", []),
        ("{% if not search %}none{% else %}{{ search.action }}{% endif %}", []),
        ("{% if search is none %}none{% elif q %}{{ search.action }}{% endif %}", []),
        ("{% if search.query %}{{ search.query }}{% endif %}", []),
        ("{% if search %}{{ search.query }}{% endif %}", ["null-printed"]),
        ("{% if q %}{{ search.action }}{% endif %}", ["null-field"]),
        ("{% if search %}a{% endif %}{{ search.action }}", ["null-field"]),
        ("{% for s in steps %}{{ s.a }} {{ loop.index }}{% endfor %}", []),
        ("{% for s in steps if s.n %}{{ s.n }}{% endfor %}", []),
        ("{% for s in steps %}{{ s.n }}{% endfor %}", ["null-printed"]),
        ("{% for s in steps %}{{ s.b }}{% endfor %}", ["unknown-field"]),
        ("{% for s in search %}{% endfor %}", ["null-used"]),
        ("{% for s in search or [] %}{{ s }}{% endfor %}", []),
        ("{% for s in q %}{% endfor %}", ["not-a-list"]),
        ("{% set x = search %}{{ x.action }}", ["null-field"]),
        ("{% set x = search %}{% if x %}{{ x.action }}{% endif %}", []),
        ("{% set search = steps[0] %}{{ search.a }}", []),
        ("{% if search %}{% set search = any %}{{ search.action }}{% endif %}", []),
        ("{% macro m(x) %}{{ x.y }}{{ nope }}{% endmacro %}{{ m(q) }}", ["unknown-name"]),
        ("{% for a, b in zip(words, words) %}{{ a }}{{ b }}{% endfor %}", []),
        ("{{ words }}", ["list-printed"]),
        ("{{ words | join(', ') }}", []),
        ("{{ steps | map(attribute='a') | bullets }}", []),
        ("{{ steps | map(attribute='z') | bullets }}", ["unknown-field"]),
        ("{{ 'x' if q }}", ["null-printed"]),
        ("{{ 'x' if q else '' }}", []),
        ("{{ q ~ words }}", ["list-printed"]),
        ("{{ search | json }}", []),
        ("{{ loop.index }}", ["unknown-name"]),
    ],
)
def test_prompts_are_followed_statement_by_statement(text, expected):
    assert codes(text, "template") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q", "str"),
        ("steps", "[{a: str, n: int?}]"),
        ("steps.a", "[str]"),
        ("steps.n", "[int?]"),
        ("steps[0].n", "int?"),
        ("state.n + 1", "int"),
        ("state.n / 2", "float"),
        ("len(words) > 1", "bool"),
        ("words | length", "int"),
        ("words | first", "str"),
        ("words | sort", "[str]"),
        ("q.split()", "[str]"),
        ("q.startswith('a')", "bool"),
        ("{'a': q, 'b': [1]}", "{a: str, b: [int]}"),
        ("'a' if q else 1", "any"),
        ("'a' if q", "str?"),
        ("search.query or 'x'", "str"),
        ("search.query | default('x')", "str"),
        ("any.x.y", "any"),
        ("range(3)", "[int]"),
        ("q ~ 1", "str"),
        ("search and search.action", "[search, stop]?"),
    ],
)
def test_types_follow_from_what_is_declared(text, expected):
    finding = analyse(text, "expression", Scope())
    assert not finding.issues
    assert str(finding.type).removesuffix("?") == expected.removesuffix("?")
    assert finding.type.nullable == expected.endswith("?")


@pytest.mark.parametrize(
    ("text", "code", "fragment"),
    [
        ("serach", "unknown-name", "write 'search'"),
        ("state.gues", "unknown-state-field", "write 'state.guess'"),
        ("search and search.acton", "unknown-field", "write 'search.action'"),
        ("q.foo", "unknown-field", "it has no field 'foo'"),
        ("q.formt()", "unknown-method", "text has no method"),
        ("lenn(q)", "unknown-function", "write 'len'"),
        ("range", "function-as-value", "call it"),
        ("search and search.action == 'stpo'", "unknown-choice", "write 'stop'"),
        ("search and 'halt' != search.action", "unknown-choice", "never 'halt'"),
        ("search and search.action in ['stop', 'go']", "unknown-choice", "never 'go'"),
        ("q + 1", "operand-type", "~"),
        ("search.query < 'a' if search", "null-used", "compared"),
        ("'a' in search", "null-used", "searched"),
        ("len(search)", "null-used", "len()"),
        ("q | join(', ')", "not-a-list", "needs a list"),
        ("words | upper", "not-text", "map"),
    ],
)
def test_misuse_is_named_with_its_fix(text, code, fragment):
    [issue] = analyse(text, "expression", Scope()).issues
    assert issue.code == code
    assert fragment in f"{issue.message} {issue.fix}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("state.n < 3", []),
        ("search and search.action == 'stop'", []),
        ("state.n and q == 'a'", []),
        ("any.done", []),
        ("not q", []),
        ("none", []),
        ("q", ["condition-type"]),
        ("state.n", ["condition-type"]),
        ("words", ["condition-type"]),
        ("state.n > 1 or q", ["condition-type"]),
        ("state.n > 1 and q", ["condition-type"]),
        ("search and search.action", ["condition-type"]),
    ],
)
def test_a_condition_has_to_be_a_bool_or_null(text, expected):
    assert [issue.code for issue in analyse_condition(text, Scope()).issues] == expected


def test_an_issue_says_the_line_of_its_template():
    issues = analyse("a\n{{ q }}\n\n{{ words }}\n{{ nope }}", "template", Scope()).issues
    assert [(issue.code, issue.line) for issue in issues] == [("list-printed", 4), ("unknown-name", 5)]


def test_references_tell_guarded_and_printed_uses_of_outer_names():
    text = "{% for s in steps %}{{ s.a }}{{ a.b }}{% if x %}{{ x.y }}{% endif %}{% endfor %}\n{{ q.r or '' }}"
    found = references(text, "template")
    assert [(r.path, r.guarded, r.printed, r.line) for r in found] == [
        (("steps",), True, False, 1),
        (("a", "b"), False, True, 1),
        (("x",), True, False, 1),
        (("x", "y"), True, True, 1),
        (("q", "r"), True, False, 2),
    ]
    assert references("{{ broken", "template") == ()


TYPES = st.recursive(
    st.sampled_from(["str", "int", "float", "bool", "str?", "int?"]) | st.just(["yes", "no"]),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=1).filter(lambda raw: raw[0] not in ("yes", "no"))
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
).map(parse_type)


def values(type_: Type) -> st.SearchStrategy:
    kinds: Mapping[str, st.SearchStrategy] = {
        "str": st.text(max_size=4),
        "int": st.integers(-99, 99),
        "float": st.floats(-9, 9),
        "bool": st.booleans(),
    }
    if type_.kind == "choice":
        found = st.sampled_from(type_.choices)
    elif type_.kind == "list":
        found = st.lists(values(type_.item or UNKNOWN), max_size=3)
    elif type_.kind == "record":
        found = st.fixed_dictionaries({name: values(inner) for name, inner in type_.fields})
    else:
        found = kinds[type_.kind]
    return st.none() | found if type_.nullable else found


@given(st.data(), TYPES, TYPES)
def test_a_joined_type_holds_the_values_of_both(data, a, b):
    both = join(a, b)
    assert mismatch(data.draw(values(a)), both) is None
    assert mismatch(data.draw(values(b)), both) is None
    assert join(b, a).kind == both.kind


@given(st.data(), TYPES)
def test_the_type_of_a_value_fits_its_declaration(data, type_):
    value = data.draw(values(type_))
    assert value is None or fits(type_of(value), type_)


EXPRESSIONS = st.sampled_from(
    [
        "x",
        "[x]",
        "x if y else none",
        "x or y",
        "y and x",
        "x.a",
        "x.a.b or y",
        "x | default('d')",
        "x.a | default(1)",
        "x == y",
        "not x",
        "x is none",
        "(x if x is defined else 'n')",
        "x[0]",
        "x | json",
        "{'a': x, 'b': y}",
        "x.a if x.a else y",
        "x | length if x is string else 0",
    ]
)


@settings(max_examples=400)
@given(st.data(), TYPES, TYPES, EXPRESSIONS)
def test_what_passes_the_analysis_evaluates_to_a_value_of_the_inferred_type(data, x, y, text):
    scope = Scope()
    scope.names = {"x": Found(declared(x)), "y": Found(declared(y))}
    names = {"x": data.draw(values(x)), "y": data.draw(values(y))}
    finding = analyse(text, "expression", scope)
    if finding.issues:
        return
    found = evaluate(text, names)
    if "[0]" in text and found is None:
        return  # an empty list: whether it has items isn't known
    if finding.type.kind != "null":
        assert mismatch(found, finding.type if finding.type != UNKNOWN else nullable(UNKNOWN)) is None
    checked = analyse_condition(text, scope)
    if not checked.issues and checked.type.kind == "bool":
        assert condition(text, names) in (True, False)
    printed = "{{ " + text + " }}"
    if not analyse(printed, "template", scope).issues and finding.type != UNKNOWN:
        assert isinstance(render(printed, names), str)


@given(st.text(alphabet="xy.|[]() ='and or not if else 0", max_size=24))
def test_the_analysis_of_any_source_ends_and_passes_nothing_that_does_not_parse(text):
    finding = analyse(text, "expression", Scope())
    if not finding.issues:
        try:
            evaluate(text, {})
        except TemplateProblem as problem:
            assert "expected token" not in str(problem)
