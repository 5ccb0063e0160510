"""`calculator`: arithmetic that a model writes, worked out without `eval` and bounded in size.

A wrong expression is a result that says so, never an error of the tool: models may learn from it.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

__all__ = ["calculate", "make"]

MAX_CHARS = 1000
MAX_BITS = 4096

Number = int | float


class _Wrong(Exception):
    """What is wrong with the expression."""


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _round(number: Number, digits: int = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > 300:
        raise ValueError("round takes a whole number of digits, at most 300")
    return round(number, digits)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log2": math.log2, "log10": math.log10, "floor": math.floor, "ceil": math.ceil, "sin": math.sin,
    "cos": math.cos, "tan": math.tan,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "^": "**"})
"""Multiplication and division sign, minus, dash and caret, as models write them."""


def make(settings: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The tool `calculator`; it has no settings."""
    assert not settings
    return calculate


def calculate(expression: str) -> dict[str, Any]:
    """`{"text", "value", "error"}`: the value is null and `error` says why when there is none."""
    if not isinstance(expression, str):
        raise TypeError(f"expression must be text, got {expression!r}")
    try:
        value = _simple(_value(_tree(expression)))
    except _Wrong as wrong:
        return {"text": f"error: {wrong}", "value": None, "error": str(wrong)}
    return {
        "text": str(value) if isinstance(value, int) else format(value, ".12g"),
        "value": value,
        "error": None,
    }


def _tree(expression: str) -> ast.expr:
    text = expression.translate(_SIGNS).strip()
    if len(text) > MAX_CHARS:
        raise _Wrong(f"longer than {MAX_CHARS} characters")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Wrong("not an arithmetic expression") from None


def _value(node: ast.expr) -> Number:
    try:
        return _bounded(_raw(node))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _Wrong(str(error) or type(error).__name__) from None
    except RecursionError:
        raise _Wrong("nested too deeply") from None


def _raw(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(a) for a in args))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    known = ", ".join(_FUNCTIONS)
    raise _Wrong(f"only numbers, + - * / // % **, and the functions {known} are known")


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        if abs(base) <= 1:
            return base ** (exponent % 2 + 2) if base else 0**exponent
        raise _Wrong("the number is too large")
    return base**exponent


def _bounded(value: Any) -> Number:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Wrong("the result isn't a real number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _Wrong("the result isn't finite")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise _Wrong("the number is too large")
    return value


def _simple(value: Number) -> Number:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value
