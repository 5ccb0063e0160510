"""Evaluate the expressions and templates of a workflow; everything that the player asks of them.

Values are plain JSON values, never changed by an expression. A whole expression that is undefined is null.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.environment import Template

from masflow.compiler.analysis import references
from masflow.compiler.direct import Getter, direct
from masflow.compiler.filters import MAX_TEXT, TemplateProblem, bounded, is_null, plain
from masflow.compiler.findings import Reference
from masflow.compiler.templates import (
    RESULT,
    SANDBOX,
    Kind,
    compiled_expression,
    new_context,
    only_expression,
    parse_expression,
    parse_template,
)

__all__ = [
    "Evaluator",
    "Reference",
    "TemplateProblem",
    "compiled",
    "condition",
    "evaluate",
    "references",
    "render",
    "syntax_problem",
    "value",
]

Names = Mapping[str, Any]
Evaluator = Callable[[Names, random.Random | None], Any]
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")
_ERRORS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_WORDS = frozenset(("true", "false", "none", "True", "False", "None", "not"))


def evaluate(text: str, names: Names, rng: random.Random | None = None) -> Any:
    """Value of a bare expression; null when it is undefined.

    Args:
        names: what the expression sees; looked up by need.
        rng: where `shuffle`, `random` and `take` draw from; without it they are a problem.
    Returns:
        A plain JSON value. A bare name gives the very object of `names`: don't change it.
    Raises:
        TemplateProblem: it doesn't parse, or fails on these values.
    """
    return _expression(text)(names, rng)


def condition(text: str, names: Names, rng: random.Random | None = None) -> bool:
    """Whether a condition holds; null counts as false.

    Raises:
        TemplateProblem: its value is neither a bool nor null.
    """
    found = _condition(text)(names, rng)
    if found is None or isinstance(found, bool):
        return bool(found)
    shown = repr(found) if len(repr(found)) < 60 else repr(found)[:57] + "…"
    raise TemplateProblem(
        f"condition '{text}' gave {shown} ({type(found).__name__}); it must be true, false or null"
    )


def value(raw: Any, names: Names, rng: random.Random | None = None) -> Any:
    """A value with the templates anywhere in it filled in.

    A string that is exactly one `{{ expr }}` keeps the expression's type, any other renders to text; what
    is filled in is never rendered again.

    Raises:
        TemplateProblem: a template in it fails.
    """
    if isinstance(raw, str):
        return _value(raw)(names, rng) if "{" in raw else raw
    if type(raw) is dict or isinstance(raw, Mapping):
        return {key: value(item, names, rng) for key, item in raw.items()}
    if isinstance(raw, (list, tuple)):
        return [value(item, names, rng) for item in raw]
    return raw


def render(text: str, names: Names, rng: random.Random | None = None) -> str:
    """Text of a prompt.

    Raises:
        TemplateProblem: it prints null, a list or a mapping, or fails otherwise; says the template's line.
    """
    return _text(text)(names, rng)


def syntax_problem(text: str, kind: Kind) -> str | None:
    """What is wrong with the text itself, whatever its names; None when nothing is."""
    try:
        if kind == "expression":
            _expression(text)
        else:
            _value(text) if kind == "value" else _text(text)
    except TemplateProblem as problem:
        return str(problem)
    return None


def compiled(raw: Any) -> Evaluator:
    """What gives `value(raw, …)` again and again.

    Raises:
        TemplateProblem: a template at its top doesn't parse.
    """
    if isinstance(raw, str):
        return _value(raw) if "{" in raw else lambda names, rng: raw
    return lambda names, rng: value(raw, names, rng)


@lru_cache(maxsize=8192)
def _expression(text: str) -> Evaluator:
    return _path(text) or _evaluator(parse_expression(text))


@lru_cache(maxsize=8192)
def _condition(text: str) -> Evaluator:
    return _path(text) or _evaluator(as_condition(deepcopy(parse_expression(text))))


@lru_cache(maxsize=8192)
def _value(text: str) -> Evaluator:
    only = only_expression(text)
    if only is None:
        return _text(text)
    return _path(text.strip()[2:-2]) or _evaluator(only)


def _path(text: str) -> Evaluator | None:
    """The fast way for `name.field.field`, which is most of what workflows write."""
    path = text.strip()
    if not _PATH.match(path):
        return None
    first, *rest = path.split(".")
    if first in _WORDS or "not" in rest:
        return None

    def look_up(names: Names, rng: random.Random | None) -> Any:
        try:
            found = names[first]
        except KeyError:
            return None
        for name in rest:
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif found is None:
                return None
            else:
                found = SANDBOX.getattr(found, name)
        return None if is_null(found) else plain(found) if callable(found) else found

    return look_up


def as_condition(tree: nodes.Expr) -> nodes.Expr:
    """`a and b` as a condition: b when a is truthy, else false, so that any value may guard another.

    Changes the tree in place.
    """
    if isinstance(tree, nodes.And):
        return nodes.CondExpr(tree.left, as_condition(tree.right), nodes.Const(False), lineno=tree.lineno)
    if isinstance(tree, nodes.Or):
        tree.left, tree.right = as_condition(tree.left), as_condition(tree.right)
    elif isinstance(tree, nodes.CondExpr):
        tree.expr1 = as_condition(tree.expr1)
        tree.expr2 = None if tree.expr2 is None else as_condition(tree.expr2)
    return tree


def _evaluator(tree: nodes.Expr) -> Evaluator:
    get = direct(tree)
    return _by_jinja(tree) if get is None else _directly(get)


def _directly(get: Getter) -> Evaluator:
    def run(names: Names, rng: random.Random | None) -> Any:
        try:
            found = get(names)
            return found if found is None or type(found) is bool else plain(found)
        except _ERRORS as error:
            raise TemplateProblem(_said(error)) from None

    return run


def _by_jinja(tree: nodes.Expr) -> Evaluator:
    root = _compile(lambda: compiled_expression(deepcopy(tree))).root_render_func

    def run(names: Names, rng: random.Random | None) -> Any:
        context = new_context(names, rng)
        try:
            for _ in root(context):
                pass
            found = context.vars[RESULT]
            return found if found is None or type(found) is bool else plain(found)
        except _ERRORS as error:
            raise TemplateProblem(_said(error)) from None

    return run


@lru_cache(maxsize=8192)
def _text(text: str) -> Evaluator:
    template = _compile(lambda: SANDBOX.template(deepcopy(parse_template(text))))
    root = template.root_render_func

    def run(names: Names, rng: random.Random | None) -> str:
        chunks: list[str] = []
        length = 0
        try:
            for chunk in root(new_context(names, rng)):
                chunks.append(chunk)
                length += len(chunk)
                if length > MAX_TEXT:
                    raise TemplateProblem(f"a text of more than {MAX_TEXT} characters")
        except (*_ERRORS, TemplateProblem) as error:
            raise TemplateProblem(_said(error) + _line(template, error)) from None
        whole = "".join(chunks)
        return bounded(whole)

    return run


def _compile(make: Callable[[], Template]) -> Template:
    try:
        return make()
    except (*_ERRORS, SyntaxError) as error:
        raise TemplateProblem(_said(error)) from None


def _said(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, SyntaxError):
        return error.msg
    return str(error).strip() or type(error).__name__


def _line(template: Template, error: BaseException) -> str:
    """` (line N)` of the template, from the innermost frame of its generated code."""
    trace, found = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            found = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {found})" if found else ""
