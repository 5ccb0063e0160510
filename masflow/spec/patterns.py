"""Regular expressions with a time limit: a pattern that backtracks without end can't hang a run.

The syntax is Python's (`re`); the `regex` library reads it, because its search can be stopped.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

__all__ = ["LIMIT_S", "BadPattern", "compiled", "search"]

LIMIT_S = 1.0
"""Of one search, in seconds; an ordinary one takes microseconds."""


MAX_SIZE = 100_000
"""Parts of a pattern with its repetitions written out."""


class BadPattern(ValueError):
    """The text isn't a regular expression."""


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """The pattern, ready to search. Raises BadPattern with the reason."""
    import regex

    try:
        re.compile(pattern)
        if _size(_parser.parse(pattern)) > MAX_SIZE:  # `regex` writes repetitions out, and memory ends
            raise BadPattern(f"with its repetitions written out it has more than {MAX_SIZE:,} parts")
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise BadPattern(str(error) or type(error).__name__) from None


def _size(node: Any) -> int:
    """Parts of a parsed pattern, those inside a repetition counted as often as it asks for at least."""
    if isinstance(node, _parser.SubPattern):
        return sum(_size(item) for item in node.data)
    if isinstance(node, tuple) and len(node) == 2 and str(node[0]).endswith("_REPEAT"):
        low, _, inside = node[1]
        return max(low, 1) * _size(inside)
    if isinstance(node, (tuple, list)):
        return max(1, sum(_size(item) for item in node))
    return 0


def search(pattern: str, text: str) -> Any:
    """The first match, or None.

    Raises:
        TimeoutError: the search took longer than `LIMIT_S`.
        BadPattern: the text isn't a pattern.
    """
    return compiled(pattern).search(text, timeout=LIMIT_S)


def groups(pattern: str) -> dict[str, bool]:
    """Named groups of a pattern, and whether every match fills them. Raises BadPattern."""
    numbers = compiled(pattern).groupindex
    sure = _sure(_parser.parse(pattern))
    return {name: number in sure for name, number in numbers.items()}


def _sure(node: Any) -> frozenset[int]:
    """Groups that are filled whenever this part of a parsed pattern matches."""
    if isinstance(node, _parser.SubPattern):
        return frozenset().union(*map(_sure, node.data))
    kind, inside = str(node[0]), node[1]
    if kind == "SUBPATTERN":
        return _sure(inside[-1]) | ({inside[0]} if inside[0] is not None else set())
    if kind.endswith("_REPEAT"):
        return _sure(inside[2]) if inside[0] > 0 else frozenset()
    if kind == "BRANCH":
        return frozenset.intersection(*map(_sure, inside[1]))
    if kind in ("ATOMIC_GROUP", "ASSERT"):
        return _sure(inside if kind == "ATOMIC_GROUP" else inside[1])
    return frozenset()
