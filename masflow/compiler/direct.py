"""Expressions that need no Jinja to run: names, fields, constants, comparisons, `and`, `or`, `not`, `+`, `-`.

The same values and the same errors at a third of the cost; whatever holds anything else isn't made here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes

from masflow.compiler.templates import GLOBALS, SANDBOX

Getter = Callable[[Mapping[str, Any]], Any]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def direct(tree: nodes.Expr) -> Getter | None:
    """What evaluates the expression on the names that it sees; None when there is more to it."""
    make = _MAKERS.get(type(tree))
    return None if make is None else make(tree)


def _name(tree: nodes.Name) -> Getter | None:
    name, undefined = tree.name, SANDBOX.undefined
    if name in GLOBALS:
        return None

    def look_up(names: Mapping[str, Any]) -> Any:
        try:
            return names[name]
        except KeyError:
            return undefined(name=name)

    return look_up


def _const(tree: nodes.Const) -> Getter:
    value = tree.value
    return lambda names: value


def _field(tree: nodes.Getattr) -> Getter | None:
    inner, name, get = direct(tree.node), tree.attr, SANDBOX.getattr
    if inner is None:
        return None

    def field(names: Mapping[str, Any]) -> Any:
        found = inner(names)
        return found[name] if type(found) is dict and name in found else get(found, name)

    return field


def _compare(tree: nodes.Compare) -> Getter | None:
    left, [operand, *more] = direct(tree.expr), tree.ops
    right, compare = direct(operand.expr), _COMPARISONS[operand.op]
    if more or left is None or right is None:
        return None
    return lambda names: compare(left(names), right(names))


def _not(tree: nodes.Not) -> Getter | None:
    inner = direct(tree.node)
    return None if inner is None else lambda names: not inner(names)


def _and(tree: nodes.And) -> Getter | None:
    left, right = direct(tree.left), direct(tree.right)
    return None if left is None or right is None else lambda names: left(names) and right(names)


def _or(tree: nodes.Or) -> Getter | None:
    left, right = direct(tree.left), direct(tree.right)
    return None if left is None or right is None else lambda names: left(names) or right(names)


def _choice(tree: nodes.CondExpr) -> Getter | None:
    if tree.expr2 is None:
        return None
    test, one, other = direct(tree.test), direct(tree.expr1), direct(tree.expr2)
    if test is None or one is None or other is None:
        return None
    return lambda names: one(names) if test(names) else other(names)


def _add(tree: nodes.Add) -> Getter | None:
    left, right, call = direct(tree.left), direct(tree.right), SANDBOX.call_binop
    if left is None or right is None:
        return None
    return lambda names: call(None, "+", left(names), right(names))


def _sub(tree: nodes.Sub) -> Getter | None:
    left, right = direct(tree.left), direct(tree.right)
    return None if left is None or right is None else lambda names: left(names) - right(names)


_MAKERS: dict[type[nodes.Node], Callable[[Any], Getter | None]] = {
    nodes.Name: _name,
    nodes.Const: _const,
    nodes.Getattr: _field,
    nodes.Compare: _compare,
    nodes.Not: _not,
    nodes.And: _and,
    nodes.Or: _or,
    nodes.CondExpr: _choice,
    nodes.Add: _add,
    nodes.Sub: _sub,
}
