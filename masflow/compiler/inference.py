"""What is known of a value before anything runs: types, their fields, results of filters and functions.

Uses the workflow's `Type`; `any` that isn't nullable means that nothing is known and nothing complained of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from masflow.compiler.guards import At
from masflow.spec.types import Type

UNKNOWN = Type("any")
"""Nothing is known of it, not even whether it is null."""
NULL = Type("null", nullable=True)
STR, INT, FLOAT, BOOL = (Type(kind) for kind in ("str", "int", "float", "bool"))
NUMBER = Type("float")
UNKNOWN_LIST = Type("list", item=UNKNOWN)
NUMBERS = ("int", "float")
SCALARS = ("str", "choice", "int", "float", "bool")


def declared(type_: Type) -> Type:
    """A type as written → what may be assumed of its values: `any`, at any depth, is unknown."""
    if type_.kind == "any":
        return UNKNOWN
    if type_.item is not None:
        return replace(type_, item=declared(type_.item))
    if type_.fields:
        return replace(type_, fields=tuple((name, declared(t)) for name, t in type_.fields))
    return type_


def non_null(type_: Type) -> Type:
    if type_.kind == "null":
        return UNKNOWN
    return replace(type_, nullable=False) if type_.nullable else type_


def nullable(type_: Type) -> Type:
    return type_ if type_.nullable else replace(type_, nullable=True)


def list_of(item: Type) -> Type:
    return Type("list", item=item)


def record(**fields: Type) -> Type:
    return Type("record", fields=tuple(fields.items()))


def join(a: Type, b: Type) -> Type:
    """The narrowest type that holds the values of both."""
    if a == b:
        return a
    is_nullable = a.nullable or b.nullable
    if a.kind == "null" or b.kind == "null":
        return nullable(b if a.kind == "null" else a)
    return replace(_join(non_null(a), non_null(b)), nullable=is_nullable)


def _join(a: Type, b: Type) -> Type:
    if a == b:
        return a
    kinds = {a.kind, b.kind}
    if kinds == {"choice"}:
        return Type("choice", choices=tuple(dict.fromkeys((*a.choices, *b.choices))))
    if kinds <= {"choice", "str"}:
        return STR
    if kinds <= {"int", "float"}:
        return FLOAT
    if kinds == {"list"}:
        return list_of(join(a.item or UNKNOWN, b.item or UNKNOWN))
    if kinds == {"record"} and [n for n, _ in a.fields] == [n for n, _ in b.fields]:
        return Type("record", fields=tuple((n, join(t, b.field(n) or UNKNOWN)) for n, t in a.fields))
    return UNKNOWN


def type_of(value: Any) -> Type:
    """The type of a JSON value, e.g. of a parameter."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, (str, int, float)):
        return Type(type(value).__name__)
    if isinstance(value, (list, tuple)):
        item = UNKNOWN if not value else type_of(value[0])
        for other in value[1:]:
            item = join(item, type_of(other))
        return list_of(item)
    if isinstance(value, dict):
        return Type("record", fields=tuple((str(key), type_of(item)) for key, item in value.items()))
    return UNKNOWN


def field_of(type_: Type, key: str | int | At) -> Type | None:
    """Type of `x.key`, for an x that isn't null; None when it has no such field."""
    if type_.kind in ("any", "null"):
        return UNKNOWN
    if isinstance(key, At):
        return type_.item or UNKNOWN if type_.kind == "list" else UNKNOWN
    if type_.kind == "record":
        return type_.field(key) if isinstance(key, str) else None
    if type_.kind == "list":
        item = type_.item or UNKNOWN
        if isinstance(key, int):
            return item
        found = field_of(non_null(item), key)
        return (
            None
            if found is None
            else list_of(nullable(found) if item.nullable and found != UNKNOWN else found)
        )
    if type_.kind in ("str", "choice") and isinstance(key, int):
        return STR
    return None


def fits(value: Type, target: Type) -> bool:
    """False only when a value of the one type can't be of the other (null aside)."""
    a, b = value.kind, target.kind
    if "any" in (a, b) or "null" in (a, b):
        return True
    if b == "choice":
        return a == "str" or (a == "choice" and bool(set(value.choices) & set(target.choices)))
    if a == b == "list":
        return fits(value.item or UNKNOWN, target.item or UNKNOWN)
    if a == b == "record":
        known = {name for name, _ in target.fields}
        return all(name in known for name, _ in value.fields) and all(
            fits(t, target.field(name) or UNKNOWN) for name, t in value.fields
        )
    return a == b or (a, b) in (("choice", "str"), ("int", "float"))


def _item(type_: Type) -> Type:
    if type_.kind in ("str", "choice"):
        return STR
    return type_.item or UNKNOWN if type_.kind == "list" else UNKNOWN


def _same_list(type_: Type) -> Type:
    return non_null(type_) if type_.kind == "list" else UNKNOWN_LIST


def _same(type_: Type) -> Type:
    return non_null(type_)


def _always(result: Type) -> Callable[[Type], Type]:
    return lambda type_: result


def _lists_of_lists(type_: Type) -> Type:
    return list_of(_same_list(type_))


_TEXT = """bullets capitalize format indent join json lower replace string title tojson trim truncate upper
    wordwrap"""
_RESULTS: dict[str, Callable[[Type], Type]] = {
    **{name: _always(STR) for name in _TEXT.split()},
    **{name: _always(INT) for name in ("count", "int", "length", "wordcount")},
    **{name: _always(FLOAT) for name in ("float", "round")},
    **dict.fromkeys(("first", "last", "max", "min", "random"), _item),
    **dict.fromkeys(("reject", "rejectattr", "selectattr", "shuffle", "sort", "take", "unique"), _same_list),
    **dict.fromkeys(("batch", "slice"), _lists_of_lists),
    **{name: _always(list_of(UNKNOWN_LIST)) for name in ("dictsort", "groupby", "items", "zip")},
    "abs": _same,
    "reverse": _same,
    "select": lambda t: list_of(non_null(_item(t))),
    "list": lambda t: list_of(_item(t)),
    "sum": lambda t: UNKNOWN,
    "map": lambda t: UNKNOWN_LIST,
}
NULL_FRIENDLY = frozenset(("default", "d", "json", "tojson"))
"""Filters that may be handed null."""
LIST_FILTERS = frozenset(
    (
        "batch",
        "bullets",
        "join",
        "map",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "shuffle",
        "slice",
        "sum",
        "take",
        "zip",
    )
)
"""Filters that take a list and nothing else."""
TEXT_FILTERS = frozenset(
    (
        "capitalize",
        "indent",
        "lower",
        "replace",
        "title",
        "trim",
        "truncate",
        "upper",
        "wordcount",
        "wordwrap",
    )
)
"""Filters that take what can be printed."""


def filtered(name: str, type_: Type) -> Type:
    """Result of a filter on a value of that type (`default` and `map(attribute=…)` aside)."""
    return _RESULTS.get(name, _always(UNKNOWN))(type_)


_FUNCTION_RESULTS: dict[str, Callable[[list[Type]], Type]] = {
    "range": lambda args: list_of(INT),
    "len": lambda args: INT,
    "min": lambda args: _smallest(args),
    "max": lambda args: _smallest(args),
    "zip": lambda args: list_of(UNKNOWN_LIST),
    "shuffle": lambda args: _same_list(args[0]) if args else UNKNOWN_LIST,
    "take": lambda args: _same_list(args[0]) if args else UNKNOWN_LIST,
    "random": lambda args: _item(args[0]) if args else FLOAT,
}


def _smallest(args: list[Type]) -> Type:
    if len(args) == 1:
        return _item(args[0])
    found = args[0] if args else UNKNOWN
    for other in args[1:]:
        found = join(found, other)
    return found


def called(name: str, args: list[Type]) -> Type:
    """Result of one of the functions that every expression may call."""
    return _FUNCTION_RESULTS.get(name, lambda args: UNKNOWN)(args)


_METHODS = {
    **{name: list_of(STR) for name in ("split", "rsplit", "splitlines", "partition", "rpartition")},
    **dict.fromkeys(("count", "find", "rfind", "index"), INT),
    **dict.fromkeys(
        ("startswith", "endswith", "isdigit", "isalpha", "isalnum", "isspace", "islower", "isupper"), BOOL
    ),
}


def method_of_text(name: str) -> Type:
    """Result of a method of text."""
    return _METHODS.get(name, STR)
