"""The filters, tests and functions of templates: lists in, lists out, bounded in size.

Chance comes only from the rng that is given. Knows nothing of workflows.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2 import filters as jinja
from jinja2.runtime import Context
from jinja2.tests import TESTS as JINJA_TESTS

MAX_TEXT = 10_000_000
"""Characters that one value or prompt may have."""
MAX_ITEMS = 100_000
"""Items of one list that a template makes."""
MAX_NODES = 200_000
"""Values inside one result, counted with repetition."""
MAX_BITS = 4096
"""Of an integer."""
SMALL = 1 << 63
HALF = re.compile("[\ud800-\udfff]")
"""A surrogate alone, which UTF-8 can't write."""


class TemplateProblem(Exception):
    """What is wrong with a template or with what it met; holds no place in a file."""


def is_null(value: object) -> bool:
    return value is None or isinstance(value, Undefined)


def bounded(value: Any) -> Any:
    """The same value, unless it is larger than a template may make."""
    kind = type(value)
    if value is None or kind is bool or (kind is int and -SMALL < value < SMALL):
        return value
    if kind is str and len(value) <= MAX_TEXT and value.isascii():
        return value
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise TemplateProblem(f"a text of {len(value)} characters; at most {MAX_TEXT} are allowed")
    if isinstance(value, str) and not value.isascii() and HALF.search(value):
        raise TemplateProblem("a text with half a character (a lone surrogate)")
    if isinstance(value, float) and not math.isfinite(value):
        raise TemplateProblem(f"a number that isn't finite ({value})")
    if isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
        raise TemplateProblem(f"a list of {len(value)} items; at most {MAX_ITEMS} are allowed")
    if type(value) is int and value.bit_length() > MAX_BITS:
        raise TemplateProblem(f"an integer of {value.bit_length()} bits; at most {MAX_BITS} are allowed")
    return value


def as_list(value: object, what: str = "a list") -> list[Any]:
    """Items of a list (or of a mapping: its keys); a problem for anything else."""
    if isinstance(value, list):
        return value
    if is_null(value):
        raise TemplateProblem(f"expected {what}, got null{_name(value)}")
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TemplateProblem(f"expected {what}, got {value!r} ({type(value).__name__})")
    items: list[Any] = []
    for item in value:
        items.append(item)
        if len(items) > MAX_ITEMS:
            raise TemplateProblem(f"a list of more than {MAX_ITEMS} items")
    return items


def _name(value: object) -> str:
    name = getattr(value, "_undefined_name", None) if isinstance(value, Undefined) else None
    return f" ('{name}')" if name else ""


def text_of(value: object) -> str:
    """How a value is printed; null, lists and mappings are not.

    Raises:
        TemplateProblem: the value has no one text.
    """
    if isinstance(value, str):
        return value
    if is_null(value):
        raise TemplateProblem(f"prints null{_name(value)}; guard it with 'if', 'or' or default(…)")
    if isinstance(value, (list, tuple)):
        raise TemplateProblem("prints a list; use join, bullets or json")
    if isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, Mapping):
        raise TemplateProblem("prints a mapping; name one of its fields, or use json")
    raise TemplateProblem(f"prints {type(value).__name__}, which has no text")


def plain(value: Any) -> Any:
    """The value as JSON has it: lists, dicts with text keys, scalars; undefined becomes null."""
    if isinstance(value, _SCALARS):
        return bounded(value)
    return _Plain().of(value)


_SCALARS = (str, bool, int, float)


class _Plain:
    def __init__(self) -> None:
        self.left = MAX_NODES

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, bool, int, float)):
            return bounded(value)
        if isinstance(value, Undefined):
            return None
        self.left -= 1
        if self.left < 0:
            raise TemplateProblem(f"a value of more than {MAX_NODES} parts")
        if isinstance(value, Mapping):
            wrong = next((key for key in value if not isinstance(key, str)), None)
            if wrong is not None:
                raise TemplateProblem(f"the key {wrong!r} of a mapping isn't text")
            return {key: self.of(item) for key, item in value.items()}
        if isinstance(value, Iterable):
            items = as_list(value)
            self.left -= len(items)
            return [self.of(item) for item in items]
        raise TemplateProblem(f"{type(value).__name__} isn't a value; call it, or name one of its fields")


def join_text(parts: Iterable[Any], separator: str = "") -> str:
    texts = [text_of(part) for part in parts]
    length = sum(map(len, texts)) + len(separator) * max(len(texts) - 1, 0)
    if length > MAX_TEXT:
        raise TemplateProblem(f"a text of {length} characters; at most {MAX_TEXT} are allowed")
    return separator.join(texts)


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | None = None) -> str:
    items = as_list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    return join_text(items, text_of(d))


def _bullets(value: Any, mark: str = "- ") -> str:
    return join_text((mark + text_of(item) for item in as_list(value)), "\n")


def _json(value: Any, indent: int | None = None) -> str:
    return bounded(json.dumps(plain(value), ensure_ascii=False, indent=min(indent, 8) if indent else None))


def _default(value: Any, default: Any = "", boolean: bool = False) -> Any:
    return default if is_null(value) or (boolean and not value) else value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, Mapping)) else len(as_list(value, "a list or text"))


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    text, old, new = text_of(value), text_of(old), text_of(new)
    times = text.count(old) if count is None else min(count, text.count(old))
    if len(text) + times * (len(new) - len(old)) > MAX_TEXT:
        raise TemplateProblem(f"a text of more than {MAX_TEXT} characters")
    return text.replace(old, new, -1 if count is None else count)


def safe_format(value: str, arguments: Any) -> str:
    """`value % arguments` with widths of at most three digits and scalars only."""
    if re.search(r"%[^a-zA-Z%]*(\*|\d{4})", value):
        raise TemplateProblem("a format's width has at most three digits")
    values = arguments.values() if isinstance(arguments, Mapping) else arguments
    for item in values if isinstance(values, (tuple, list)) or isinstance(arguments, Mapping) else (values,):
        text_of(item)
    return bounded(value % (tuple(arguments) if isinstance(arguments, list) else arguments))


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    return safe_format(text_of(value), kwargs or args)


def _string(value: Any) -> str:
    return text_of(value)


def _position(function: Callable[..., Any]) -> int:
    """Where a Jinja filter takes its value: after the context or environment, if it asks for one."""
    return 1 if getattr(function, "jinja_pass_arg", None) else 0


def _listing(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A Jinja filter over a list whose result is a list rather than a generator."""

    def listed(*args: Any, **kwargs: Any) -> list[Any]:
        at = _position(function)
        checked = (*args[:at], as_list(args[at]), *args[at + 1 :])
        return [list(x) if isinstance(x, tuple) else x for x in as_list(function(*checked, **kwargs))]

    listed.__dict__.update(function.__dict__)
    return listed


def _texting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Jinja filter over text that refuses null and lists."""

    def texted(*args: Any, **kwargs: Any) -> Any:
        at = _position(function)
        return bounded(function(*args[:at], text_of(args[at]), *args[at + 1 :], **kwargs))

    texted.__dict__.update(function.__dict__)
    return texted


def _small(function: Callable[..., Any], largest: int) -> Callable[..., Any]:
    """A filter with a number among its arguments, which stays within `largest`."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        numbers = [
            x for x in (*args[_position(function) + 1 :], *kwargs.values()) if isinstance(x, (int, float))
        ]
        if any(abs(number) > largest for number in numbers):
            raise TemplateProblem(f"a number larger than {largest} as a filter's argument")
        return function(*args, **kwargs)

    checked.__dict__.update(function.__dict__)
    return checked


def _reverse(value: Any) -> Any:
    return value[::-1] if isinstance(value, str) else as_list(value)[::-1]


def _items(value: Any) -> list[list[Any]]:
    if not isinstance(value, Mapping):
        raise TemplateProblem(f"items needs a mapping, got {type(value).__name__}")
    return [[key, item] for key, item in value.items()]


@pass_context
def _groupby(context: Context, value: Any, attribute: str) -> list[list[Any]]:
    """Pairs of a value of the attribute and the list of items that have it, in order of first appearance."""
    groups: dict[Any, list[Any]] = {}
    for item in as_list(value):
        groups.setdefault(context.environment.getitem(item, attribute), []).append(item)
    return [[plain(key), items] for key, items in groups.items()]


def _rng(context: Context) -> random.Random:
    rng = getattr(context, "rng", None)
    if rng is None:
        raise TemplateProblem("chance (shuffle, random, take) exists only where a node runs")
    return rng


@pass_context
def shuffle(context: Context, value: Any) -> list[Any]:
    """The items in an order drawn from the turn's seed."""
    items = list(as_list(value))
    _rng(context).shuffle(items)
    return items


@pass_context
def draw(context: Context, value: Any = None) -> Any:
    """One item drawn from the turn's seed (null of an empty list); without a list a number in [0, 1)."""
    if value is None:
        return _rng(context).random()
    items = as_list(value)
    return _rng(context).choice(items) if items else None


@pass_context
def take(context: Context, value: Any, count: int) -> list[Any]:
    """At most `count` items drawn without replacement from the turn's seed, in their own order."""
    items = as_list(value)
    if len(items) <= count:
        return list(items)
    return [items[i] for i in sorted(_rng(context).sample(range(len(items)), max(int(count), 0)))]


def safe_range(*args: int) -> list[int]:
    numbers = range(*args)
    if (numbers[-1] - numbers[0]) // numbers.step + 1 > MAX_ITEMS if numbers else False:
        raise TemplateProblem(f"a range of more than {MAX_ITEMS} numbers")
    return list(numbers)


def zip_lists(*lists: Any) -> list[list[Any]]:
    return [list(row) for row in zip(*map(as_list, lists), strict=False)]


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*args: Any) -> Any:
        return function(as_list(args[0]) if len(args) == 1 else args, default=None)

    return extreme


def _total(value: Any, start: Any = 0) -> Any:
    total = start
    for item in as_list(value):
        total = bounded(total + item)
    return total


@pass_context
def _sum_filter(context: Context, value: Any, attribute: str | None = None, start: Any = 0) -> Any:
    items = as_list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    return _total(items, start)


def _own(
    names: str, change: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f
) -> dict[str, Callable[..., Any]]:
    """Jinja's own filters, changed."""
    return {name: change(jinja.FILTERS[name]) for name in names.split()}


FILTERS: dict[str, Callable[..., Any]] = {
    **_own("abs dictsort first float int last max min sort"),
    **_own("capitalize lower title trim truncate upper wordcount", _texting),
    **_own("list map reject rejectattr select selectattr unique", _listing),
    "slice": _small(_listing(jinja.FILTERS["slice"]), MAX_ITEMS),
    "batch": _small(_listing(jinja.FILTERS["batch"]), MAX_ITEMS),
    "indent": _small(_texting(jinja.FILTERS["indent"]), 200),
    "round": _small(jinja.FILTERS["round"], 100),
    "wordwrap": _small(_texting(jinja.FILTERS["wordwrap"]), 10_000),
    "default": _default,
    "d": _default,
    "join": _join,
    "bullets": _bullets,
    "json": _json,
    "tojson": _json,
    "length": _length,
    "count": _length,
    "replace": _replace,
    "format": _format,
    "string": _string,
    "reverse": _reverse,
    "items": _items,
    "groupby": _groupby,
    "sum": _sum_filter,
    "zip": zip_lists,
    "shuffle": shuffle,
    "random": draw,
    "take": take,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "range": safe_range,
    "dict": dict,
    "len": _length,
    "min": _extreme(min),
    "max": _extreme(max),
    "sum": _total,
    "zip": zip_lists,
    "shuffle": shuffle,
    "random": draw,
    "take": take,
}

_HIDDEN_TESTS = ("escaped", "callable", "filter", "test")
TESTS: dict[str, Callable[..., Any]] = {
    **{name: test for name, test in JINJA_TESTS.items() if name not in _HIDDEN_TESTS},
    "defined": lambda value: not is_null(value),
    "undefined": is_null,
    "none": is_null,
    "null": is_null,
}
