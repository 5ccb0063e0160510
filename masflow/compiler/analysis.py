"""Analyses whole texts: what an expression, condition, template or value is, uses and misuses.

Knows names only through a `Scope`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jinja2 import nodes

from masflow.compiler import inference as types
from masflow.compiler.findings import Env, Finding, Found, Issue, Reference, Scope, article
from masflow.compiler.guards import Facts, guards, path_of
from masflow.compiler.inference import UNKNOWN, join, nullable
from masflow.compiler.templates import (
    Kind,
    TemplateProblem,
    compile_problem,
    only_expression,
    parse_expression,
    parse_template,
)
from masflow.compiler.typing import ExpressionWalker, source_of
from masflow.spec.types import Type

__all__ = ["analyse", "analyse_condition", "facts_of", "references"]


def analyse(
    text: str, kind: Kind, scope: Scope, facts: Facts = frozenset(), lenient: bool = False
) -> Finding:
    """Type and issues of a text; a syntax problem is its only issue.

    Args:
        facts: paths known not to be null.
        lenient: null is no issue (arguments of rewards).
    """
    walker = _TemplateWalker(scope, lenient)
    env = Env({}, facts)
    try:
        if kind == "expression":
            walker.value(parse_expression(text), env)
        elif kind == "value" and (only := only_expression(text)) is not None:
            walker.value(only, env)
        else:
            walker.block(parse_template(text).body, env)
            walker.found.type = types.STR
        if (
            not walker.found.issues
            and ("{%" in text or "(" in text)
            and (told := compile_problem(text, kind))
        ):
            walker.found.issues.append(_syntax_issue(told))
    except TemplateProblem as problem:
        walker.found.issues.append(_syntax_issue(str(problem)))
    return walker.found


def analyse_condition(text: str, scope: Scope, facts: Facts = frozenset(), lenient: bool = False) -> Finding:
    """As `analyse`, of a condition; one that is neither a bool nor null is an issue."""
    walker = _TemplateWalker(scope, lenient)
    try:
        walker.found.type = walker.condition(parse_expression(text), Env({}, facts))
        if not walker.found.issues and "(" in text and (told := compile_problem(text, "expression")):
            walker.found.issues.append(_syntax_issue(told))
    except TemplateProblem as problem:
        walker.found.issues.append(_syntax_issue(str(problem)))
    return walker.found


def _syntax_issue(told: str) -> Issue:
    """The problem of a text that is none, with its line where the parser knew it."""
    line = re.search(r" \(line (\d+)\)\Z", told)
    message = told[: line.start()] if line else told
    return Issue("bad-expression", message, "correct the expression", int(line[1]) if line else 1)


def facts_of(text: str, facts: Facts = frozenset()) -> Facts:
    """What holds where a condition held: the paths that are then not null, beside those known already."""
    try:
        return facts | guards(parse_expression(text))[0]
    except TemplateProblem:
        return facts


class _Open:
    """A scope in which every name exists and may be null."""

    def find(self, name: str, entry: str | None = None) -> Found | None:
        return Found(nullable(UNKNOWN))

    def container(self, name: str) -> str:
        return ""

    def known(self, container: str = "") -> Iterable[str]:
        return ()


def references(text: str, kind: Kind) -> tuple[Reference, ...]:
    """Every use of a name from outside, in order; empty when the text doesn't parse."""
    return tuple(analyse(text, kind, _Open()).references)


class _TemplateWalker(ExpressionWalker):
    """Follows statements, with the names that they bind and the guards that hold in their bodies."""

    def block(self, body: Iterable[nodes.Node], env: Env) -> Env:
        for node in body:
            env = self.statement(node, env)
        return env

    def statement(self, node: nodes.Node, env: Env) -> Env:
        if isinstance(node, nodes.Output):
            for child in node.nodes:
                if not isinstance(child, nodes.TemplateData):
                    self._printed(child, env)
        elif isinstance(node, nodes.If):
            self._if(node, env)
        elif isinstance(node, nodes.For):
            self._for(node, env)
        elif isinstance(node, nodes.Assign):
            return env.binding(self._bind(node.target, self.expr(node.node, env)))
        elif isinstance(node, nodes.AssignBlock):
            self.block(node.body, env)
            return env.binding(self._bind(node.target, types.STR))
        elif isinstance(node, nodes.Macro):
            inner = env.binding(
                {**{a.name: UNKNOWN for a in node.args}, "caller": UNKNOWN, "varargs": UNKNOWN}
            )
            self.block(node.body, inner)
            return env.binding({node.name: UNKNOWN})
        elif isinstance(node, nodes.With):
            names: dict[str, Type] = {}
            for target, given in zip(node.targets, node.values, strict=True):
                names |= self._bind(target, self.expr(given, env))
            self.block(node.body, env.binding(names))
        elif isinstance(node, nodes.Expr):
            self.expr(node, env)
        else:
            for child in node.iter_child_nodes():
                self.statement(child, env)
        return env

    def _if(self, node: nodes.If, env: Env) -> None:
        self._test(node.test, env)
        holds, fails = guards(node.test)
        self.block(node.body, env.knowing(holds))
        env = env.knowing(fails)
        for branch in node.elif_:
            self._test(branch.test, env)
            holds, fails = guards(branch.test)
            self.block(branch.body, env.knowing(holds))
            env = env.knowing(fails)
        self.block(node.else_, env)

    def _for(self, node: nodes.For, env: Env) -> None:
        found = self._needs(node.iter, env, "looped over")
        if found.kind not in ("list", "any", "null", "record"):
            self.issue("not-a-list", f"loops over {article(found)}", "loop over a list", node)
        item = found.item or UNKNOWN if found.kind == "list" else UNKNOWN
        inner = env.binding({**self._bind(node.target, item), "loop": UNKNOWN})
        if node.test is not None:
            self._test(node.test, inner)
            inner = inner.knowing(guards(node.test)[0])
        self.block(node.body, inner)
        self.block(node.else_, env)

    def _bind(self, target: nodes.Node, type_: Type) -> dict[str, Type]:
        if isinstance(target, nodes.Name):
            return {target.name: type_}
        if isinstance(target, nodes.Tuple):
            item = type_.item or UNKNOWN if type_.kind == "list" else UNKNOWN
            return {k: v for part in target.items for k, v in self._bind(part, item).items()}
        return {}

    def condition(self, node: nodes.Node, env: Env) -> Type:
        """Type of a condition; as `expressions.as_condition` has it, the left of an `and` may be anything."""
        if isinstance(node, nodes.And):
            self._test(node.left, env)
            return self.condition(node.right, env.knowing(guards(node.left)[0]))
        if isinstance(node, nodes.Or):
            left = self.condition(node.left, env)
            return join(left, self.condition(node.right, env.knowing(guards(node.left)[1])))
        if isinstance(node, nodes.Not):
            self._test(node.node, env)
            return types.BOOL
        if isinstance(node, nodes.CondExpr):
            self._test(node.test, env)
            holds, fails = guards(node.test)
            first = self.condition(node.expr1, env.knowing(holds))
            return join(first, self.condition(node.expr2, env.knowing(fails)) if node.expr2 else types.NULL)
        found = self.expr(node, env)
        if found.kind not in ("bool", "any", "null"):
            message = (
                f"the condition {source_of(node)} is {article(found)}; a condition is true, false or null"
            )
            fix = f'compare it, e.g. "{source_of(node)} == …"' if path_of(node) else "make it a comparison"
            self.issue("condition-type", message, fix, node)
        return found
