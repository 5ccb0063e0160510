"""Which paths are known not to be null where a test held, and where it failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import nodes


@dataclass(frozen=True)
class At:
    """A key that is a path itself, as in `answers[index]`."""

    path: tuple[Any, ...]


Path = tuple[str | int | At, ...]
"""A name with its fields: ("search", "query")."""
Facts = frozenset[Path]
"""Paths that are not null."""

_NONE: Facts = frozenset()
_NULL_TESTS = ("none", "null", "undefined")


def path_of(node: nodes.Node) -> Path | None:
    """The path that an expression is; None when it is anything else."""
    keys: list[str | int | At] = []
    while True:
        if isinstance(node, nodes.Getattr):
            keys.append(node.attr)
        elif isinstance(node, nodes.Getitem) and (key := _key(node.arg)) is not None:
            keys.append(key)
        elif isinstance(node, nodes.Name):
            return (node.name, *reversed(keys))
        else:
            return None
        node = node.node


def _key(node: nodes.Node) -> str | int | At | None:
    if isinstance(node, nodes.Const):
        return node.value if isinstance(node.value, (str, int)) and not isinstance(node.value, bool) else None
    if (
        isinstance(node, nodes.Neg)
        and isinstance(node.node, nodes.Const)
        and isinstance(node.node.value, int)
    ):
        return -node.node.value
    path = path_of(node)
    return None if path is None else At(path)


def guards(node: nodes.Node) -> tuple[Facts, Facts]:
    """(facts where the test held, facts where it failed)."""
    path = path_of(node)
    if path is not None:
        return _truthy(path), _NONE
    if isinstance(node, nodes.Not):
        holds, fails = guards(node.node)
        return fails, holds
    if isinstance(node, nodes.And):
        left, right = guards(node.left), guards(node.right)
        return left[0] | right[0], left[1] & right[1]
    if isinstance(node, nodes.Or):
        left, right = guards(node.left), guards(node.right)
        return left[0] & right[0], left[1] | right[1]
    if isinstance(node, nodes.Test):
        return _tested(node)
    if isinstance(node, nodes.Compare):
        return _compared(node)
    if (
        isinstance(node, nodes.Filter)
        and node.node is not None
        and node.name not in ("default", "d", "json", "tojson")
    ):
        inner = path_of(node.node)
        return (_known(inner), _NONE) if inner is not None else (_NONE, _NONE)
    return _NONE, _NONE


def canonical(path: Path) -> Path:
    """The path without `nodes.` or `task.` before it, so that both spellings are one fact."""
    return path[1:] if path[0] in ("nodes", "task") and len(path) > 1 else path


def _known(path: Path) -> Facts:
    """The path, and everything before its last field."""
    path = canonical(path)
    return frozenset(path[: i + 1] for i in range(len(path)) if path[0] not in COUNTED)


COUNTED = ("visits", "visit", "ok")
"""Names that say something about a node without being its value."""


def ran(node: object) -> Path:
    """The fact that a node has run."""
    return ("visits", str(node), ">0")


def went_well(node: object) -> Path:
    """The fact that a node's last visit was well-formed."""
    return ("ok", str(node), "true")


VISITED_BEFORE: Path = ("visit", ">1")
"""The fact that this is not the node's first visit."""


def _truthy(path: Path) -> Facts:
    if path[0] == "visits" and len(path) == 2:
        return frozenset((ran(path[1]),))
    if path[0] == "ok" and len(path) == 2:
        return frozenset((went_well(path[1]),))
    return _known(path)


def _tested(node: nodes.Test) -> tuple[Facts, Facts]:
    path = path_of(node.node)
    if path is None:
        return _NONE, _NONE
    if node.name in _NULL_TESTS:
        return _NONE, _known(path)
    return _known(path), _NONE


def _compared(node: nodes.Compare) -> tuple[Facts, Facts]:
    if len(node.ops) != 1:
        return _NONE, _NONE
    op, right = node.ops[0].op, node.ops[0].expr
    sides = [(path_of(node.expr), right, op), (path_of(right), node.expr, _FLIPPED.get(op, op))]
    holds, fails = _NONE, _NONE
    for path, other, way in sides:
        if path is None:
            continue
        if isinstance(other, nodes.Const) and other.value is None:
            holds, fails = (holds | _known(path), fails) if way == "ne" else (holds, fails | _known(path))
        elif (
            path[0] in ("visits", "visit") and isinstance(other, nodes.Const) and isinstance(other.value, int)
        ):
            if path == ("visit",) and _is_more(way, other.value, 1):
                holds |= {VISITED_BEFORE}
            elif len(path) == 2 and _is_more(way, other.value, 0):
                holds |= _truthy(path)
        elif path[0] == "ok" and isinstance(other, nodes.Const) and way == "eq" and other.value is True:
            holds |= _truthy(path)
        elif isinstance(other, nodes.Const) and way in ("eq", "lt", "lteq", "gt", "gteq"):
            holds |= _known(path)
        elif way == "ne" and isinstance(other, nodes.Const):
            fails |= _known(path)
        elif way == "in" and isinstance(other, (nodes.List, nodes.Tuple)):
            holds |= _known(path)
    return holds, fails


_FLIPPED = {"lt": "gt", "gt": "lt", "lteq": "gteq", "gteq": "lteq", "in": "", "notin": ""}


def _is_more(op: str, bound: int, least: int) -> bool:
    """Whether `n OP bound` says that n > least."""
    return (
        (op == "gt" and bound >= least)
        or (op in ("gteq", "eq") and bound > least)
        or (op == "ne" and bound == least)
    )
