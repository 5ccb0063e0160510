"""The sandbox in which templates and expressions run: parsing, compiling, bounds on what they may make.

Immutable, without loaders, text never rendered twice. Knows nothing of workflows.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.utils import missing as jinja_missing

from masflow.compiler.filters import (
    FILTERS,
    FUNCTIONS,
    MAX_BITS,
    MAX_ITEMS,
    MAX_TEXT,
    TESTS,
    TemplateProblem,
    as_list,
    bounded,
    join_text,
    safe_format,
    text_of,
)

Kind = Literal["expression", "template", "value"]
MAX_STEPS = 500_000
"""Loop items of one rendering; a call costs as much as `CALL_COST` items."""
CALL_COST = 10
MAX_DEPTH = 80
"""Levels of one template's tree."""
MAX_SOURCE = 200_000
"""Characters of one template's source."""
RESULT = "_value_"

_TEXT_METHODS = """upper lower strip lstrip rstrip split rsplit splitlines startswith endswith find
    rfind title capitalize casefold isdigit isalpha isalnum isspace islower isupper count
    index removeprefix removesuffix partition rpartition replace join"""
STR_METHODS = frozenset(_TEXT_METHODS.split())
DICT_METHODS = frozenset(("items", "keys", "values", "get"))
_FORBIDDEN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)


class Missing(Undefined):
    """Null that knows its name: false, equal to null, its fields missing too; printing it raises."""

    __slots__ = ()
    __str__ = __iter__ = __len__ = Undefined._fail_with_undefined_error

    @property
    def _undefined_message(self) -> str:
        return f"'{self._undefined_name}' is null here"

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Undefined)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(None)


class _Context(Context):
    """Looks names up in the caller's mapping directly, so that making one costs nothing a name."""

    def __init__(self, names: Mapping[str, Any], rng: random.Random | None):
        """Everything that Jinja's own sets; without blocks, globals or a change of escaping there is less."""
        self.environment, self.parent = SANDBOX, names  # type: ignore[assignment]
        self.vars, self.exported_vars = {}, set()
        self.eval_ctx, self.name, self.globals_keys, self.blocks = _EVALUATION, None, set(), {}
        self.rng, self.left = rng, MAX_STEPS

    def resolve_or_missing(self, key: str) -> Any:
        if key in self.vars:
            return self.vars[key]
        try:
            return self.parent[key]
        except KeyError:
            return FUNCTIONS_AND_NAMESPACE.get(key, jinja_missing)

    def spend(self, cost: int = 1) -> None:
        self.left -= cost
        if self.left < 0:
            raise TemplateProblem(f"more than {MAX_STEPS} loop items and calls")


class _Generator(CodeGenerator):
    """Sends `~` through a bounded join."""

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.join_text((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2 with keys before methods, a list's field as the list of fields, and bounded results."""

    code_generator_class = _Generator
    context_class = _Context
    intercepted_binops = frozenset(("+", "*", "**", "%"))
    join_text = staticmethod(join_text)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, undefined=Missing, finalize=text_of, cache_size=0
        )
        self.filters = {**FILTERS, "_steps": _steps}
        self.tests = dict(TESTS)
        self.globals = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if attribute.startswith("__"):
            return self.unsafe_undefined(obj, attribute)
        if isinstance(obj, dict):
            return getattr(obj, attribute) if attribute in DICT_METHODS else self.missing(obj, attribute)
        if obj is None or isinstance(obj, Undefined):
            return self.missing(obj, attribute)
        if isinstance(obj, (list, tuple)):
            return [
                None if isinstance(value := self.getattr(item, attribute), Undefined) else value
                for item in obj
            ]
        if isinstance(obj, str):
            if attribute in STR_METHODS:
                return getattr(obj, attribute)
            raise TemplateProblem(f"text has no field '{attribute}' (in {obj[:40]!r})")
        if isinstance(obj, (int, float)):
            raise TemplateProblem(f"{obj!r} ({type(obj).__name__}) has no field '{attribute}'")
        if isinstance(obj, Mapping):
            return obj[attribute] if attribute in obj else self.missing(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, str):
            if isinstance(obj, Mapping):
                return obj[argument] if argument in obj else self.missing(obj, argument)
            return self.getattr(obj, argument)
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return self.missing(obj, argument)

    def missing(self, obj: Any, name: Any) -> Missing:
        outer = obj._undefined_name if isinstance(obj, Undefined) else None
        return Missing(name=f"{outer}.{name}" if outer else name)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"'{attribute}' of {type(obj).__name__} is out of reach for templates")

    def call(self, context: _Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        context.spend(CALL_COST)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "replace":
                return FILTERS["replace"](owner, *args, **kwargs)
            if obj.__name__ == "join":
                return join_text(as_list(args[0]), owner)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            return safe_format(left, right)
        return bounded(self.binop_table[operator](left, right))

    def template(self, tree: nodes.Template) -> Template:
        return self.from_string(_count_loops(tree))


def _check_product(left: Any, right: Any) -> None:
    for sized, times in ((left, right), (right, left)):
        most = MAX_TEXT if isinstance(sized, str) else MAX_ITEMS if isinstance(sized, (list, tuple)) else None
        if most is not None and isinstance(times, int) and len(sized) * times > most:
            raise TemplateProblem(f"a result of {len(sized)} * {times} parts; at most {most} are allowed")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > 2 * MAX_BITS:
        raise TemplateProblem(f"{left} ** {right} is too large")


@pass_context
def _steps(context: _Context, value: Any) -> Iterator[Any]:
    """Items of a loop, each counted; a problem when the value can't be looped over."""
    for item in as_list(value, "a list to loop over"):
        context.spend()
        yield item


def _count_loops(tree: nodes.Template) -> nodes.Template:
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, "_steps", [], [], None, None, lineno=loop.lineno)
    return tree


SANDBOX = Sandbox()
_EVALUATION = nodes.EvalContext(SANDBOX)
FUNCTIONS_AND_NAMESPACE: dict[str, Any] = {**FUNCTIONS, "namespace": Namespace}
GLOBALS = frozenset(FUNCTIONS_AND_NAMESPACE)
"""Functions that every expression may call."""


@lru_cache(maxsize=8192)
def parse_expression(text: str) -> nodes.Expr:
    """The tree of a bare expression.

    Raises:
        TemplateProblem: it isn't one.
    """
    if "{{" in text or "{%" in text:
        raise TemplateProblem("a bare expression stands here, without {{ }}")
    if not text.strip():
        raise TemplateProblem("the expression is empty")
    try:
        parser = Parser(SANDBOX, _sized(text), state="variable")
        tree = parser.parse_expression()
        if not parser.stream.eos:
            raise TemplateProblem(_after(text, parser.stream.current.value))
    except TemplateSyntaxError as error:
        raise TemplateProblem(_hint(text, error.message or "syntax error")) from None
    except RecursionError:
        raise TemplateProblem("the expression is nested too deeply") from None
    _check_tree(tree)
    return tree


@lru_cache(maxsize=8192)
def parse_template(text: str) -> nodes.Template:
    """The tree of a template.

    Raises:
        TemplateProblem: with `(line N)` at its end where the line is known.
    """
    try:
        tree = SANDBOX.parse(_sized(text))
    except TemplateSyntaxError as error:
        raise TemplateProblem(
            f"{_hint(text, error.message or 'syntax error')} (line {error.lineno})"
        ) from None
    except RecursionError:
        raise TemplateProblem("the template is nested too deeply") from None
    _check_tree(tree)
    return tree


def only_expression(text: str) -> nodes.Expr | None:
    """The expression of a text that is exactly one `{{ }}` (blanks around it don't count), else None."""
    stripped = text.strip()
    if not (stripped.startswith("{{") and stripped.endswith("}}")):
        return None
    body = parse_template(stripped).body
    if len(body) != 1 or not isinstance(body[0], nodes.Output) or len(body[0].nodes) != 1:
        return None
    only = body[0].nodes[0]
    return None if isinstance(only, nodes.TemplateData) else only


def _sized(text: str) -> str:
    if len(text) > MAX_SOURCE:
        raise TemplateProblem(f"{len(text)} characters of source; at most {MAX_SOURCE} are allowed")
    return text


def _check_tree(tree: nodes.Node) -> None:
    stack: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while stack:
        node, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise TemplateProblem(f"nested more than {MAX_DEPTH} levels deep (line {node.lineno})")
        if isinstance(node, (nodes.Filter, nodes.Test)):
            _check_known(node)
        elif isinstance(node, _FORBIDDEN):
            raise TemplateProblem(
                f"{type(node).__name__.lower()} isn't available in templates (line {node.lineno})"
            )
        stack.extend((child, depth + 1) for child in node.iter_child_nodes())


def _check_known(node: nodes.Filter | nodes.Test) -> None:
    kind, known = ("filter", FILTERS) if isinstance(node, nodes.Filter) else ("test", TESTS)
    if node.name not in known:
        near = difflib.get_close_matches(node.name, known, n=1)
        suggestion = f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(sorted(known))}"
        raise TemplateProblem(f"unknown {kind} '{node.name}'{suggestion} (line {node.lineno})")


def _after(text: str, token: object) -> str:
    return _hint(text, f"'{token}' isn't expected where it stands")


def _hint(text: str, message: str) -> str:
    hints = (
        ("&&", "write 'and'"),
        ("||", "write 'or'"),
        ("===", "write '=='"),
        ("!", "write 'not'"),
        ("?", "write 'a if condition else b'"),
    )
    if "'='" in message or "got '='" in message:
        return f"{message}; compare with '=='"
    if "unexpected char" in message or "'|'" in message:
        return next((f"{message}; {hint}" for sign, hint in hints if sign in text), message)
    return message


COMPILE_ERRORS = (
    TemplateProblem,
    TemplateError,
    SyntaxError,
    RecursionError,
    ValueError,
    TypeError,
    AssertionError,
)
"""What compiling an odd but parsed tree may raise."""


def compiled_expression(tree: nodes.Expr) -> Template:
    """A template that leaves the expression's value in the variable `RESULT` of its context."""
    body: list[nodes.Node] = [nodes.Assign(nodes.Name(RESULT, "store"), tree, lineno=1)]
    return SANDBOX.template(nodes.Template(body, lineno=1))


@lru_cache(maxsize=8192)
def compile_problem(text: str, kind: Kind) -> str | None:
    """What is wrong with a text that parses but doesn't compile: `loop` assigned, a keyword twice."""
    try:
        tree = parse_expression(text) if kind == "expression" else parse_template(text)
        copied = deepcopy(tree)
        _ = compiled_expression(copied) if isinstance(copied, nodes.Expr) else SANDBOX.template(copied)
    except COMPILE_ERRORS as error:
        return getattr(error, "msg", None) or str(error) or type(error).__name__
    return None


def new_context(names: Mapping[str, Any], rng: random.Random | None) -> Context:
    """What one rendering sees and spends."""
    return _Context(names, rng)
