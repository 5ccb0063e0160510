"""Expressions that run without Jinja give what Jinja gives: the same values, the same problems."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from masflow.compiler.direct import direct
from masflow.compiler.expressions import TemplateProblem, _by_jinja, _directly, as_condition
from masflow.compiler.templates import parse_expression

NAMES: list[dict[str, Any]] = [
    {"state": {"count": 3, "text": "abc"}, "found": [1, 2], "ok": True, "none": None, "who": "abc"},
    {"state": {"count": 3.5, "text": ""}, "found": [], "ok": False, "none": None, "who": ["abc"]},
    {"state": None, "found": "12", "ok": None, "none": None, "who": {"text": 1}},
    {},
]
DIRECT = """
state.count
state.missing.more
missing
state.count < 3
state.count >= 3 and ok
state.count != none
state.text == 'abc' or found
not ok
not missing.field
who in state.text
'a' not in state.text
1 in found
state.count + 1
state.text + 'd'
found + found
state.count - 0.5
state.text - 1
found.count
who.text
2 if ok else state.count
none
true
state.text + none
state.count + 10 > 12 and not (ok or missing)
state.items
state.text.upper
""".strip().splitlines()
BY_JINJA = ["found | length", "range(3)", "1 < state.count < 5", "found[0]", "state.count * 2", "2 if ok"]


def told(run: Any, names: dict[str, Any]) -> Any:
    try:
        return run(names, None)
    except TemplateProblem as problem:
        return f"problem: {problem}"


@pytest.mark.parametrize("text", DIRECT)
def test_what_is_evaluated_directly_gives_what_jinja_gives(text: str):
    for tree in (parse_expression(text), as_condition(deepcopy(parse_expression(text)))):
        get = direct(tree)
        assert get is not None
        for names in NAMES:
            mine, theirs = told(_directly(get), names), told(_by_jinja(tree), names)
            assert (mine, type(mine)) == (theirs, type(theirs))


@pytest.mark.parametrize("text", BY_JINJA)
def test_what_needs_jinja_is_left_to_it(text: str):
    assert direct(parse_expression(text)) is None
