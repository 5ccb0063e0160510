"""Reads `@workflow` decorators in the text of a Python file: which functions there are, where values stand.

Runs nothing of the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Lines", "decorated", "lines_of"]

Lines = dict[tuple[str | int, ...], int]
"""Path of a value → its line, from 1."""


def lines_of(file: Path, name: str) -> Lines:
    """Path of each value that stands literally in the decorator of a function → its line."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: Lines = {}
    tops = {t.id: n.value for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
            if isinstance(t, ast.Name)}  # fmt: skip
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for function in _functions(tree, name):
        found[()] = function.lineno
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and _is_ours(call.func):
                found[()] = call.lineno
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        found[(keyword.arg,)] = keyword.lineno
                        _walk(keyword.value, (keyword.arg,), found, tops, classes)
    return found


def decorated(file: Path) -> dict[str, str]:
    """Functions of a file that `@workflow` decorates → the first line of their docstring."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    made = [f for f in _functions(tree) for call in f.decorator_list
            if _is_ours(call.func if isinstance(call, ast.Call) else call)]  # fmt: skip
    return {function.name: (ast.get_docstring(function) or "").split("\n")[0] for function in made}


def _functions(tree: ast.Module, name: str | None = None) -> Iterator[ast.AsyncFunctionDef | ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, (ast.AsyncFunctionDef, ast.FunctionDef)) and name in (None, node.name):
            yield node


def _is_ours(decorator: ast.expr) -> bool:
    return getattr(decorator, "id", getattr(decorator, "attr", "")) == "workflow"


def _walk(
    node: ast.expr,
    path: tuple[str | int, ...],
    found: Lines,
    tops: dict[str, ast.expr],
    classes: dict[str, ast.ClassDef],
) -> None:
    if isinstance(node, ast.Name) and len(path) < 8:
        if node.id in tops:
            _walk(tops[node.id], path, found, {}, classes)
        for line in classes[node.id].body if node.id in classes else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                found[(*path, line.target.id)] = line.lineno
    inner: list[tuple[Any, int, ast.expr]] = []
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:  # **OTHERS
                _walk(value, path, found, tops, classes)
            elif isinstance(key, ast.Constant):
                inner.append((key.value, key.lineno, value))
    elif isinstance(node, (ast.List, ast.Tuple)):
        inner = [(i, value.lineno, value) for i, value in enumerate(node.elts)]
    elif isinstance(node, ast.Call):
        inner = [(k.arg, k.lineno, k.value) for k in node.keywords if k.arg is not None]
    for key, line, value in inner:
        found[(*path, key)] = line
        _walk(value, (*path, key), found, tops, classes)
