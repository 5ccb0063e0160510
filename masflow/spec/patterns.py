"""Regular expressions with a time limit: a pattern that backtracks without end can't hang a run.

The syntax is Python's (`re`); the `regex` library reads it, because its search can be stopped.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

__all__ = ["LIMIT_S", "BadPattern", "compiled", "search"]

LIMIT_S = 1.0
"""Of one search, in seconds; an ordinary one takes microseconds."""


class BadPattern(ValueError):
    """The text isn't a regular expression."""


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """The pattern, ready to search. Raises BadPattern with the reason."""
    import regex

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
        raise BadPattern(str(error) or type(error).__name__) from None


def search(pattern: str, text: str) -> Any:
    """The first match, or None.

    Raises:
        TimeoutError: the search took longer than `LIMIT_S`.
        BadPattern: the text isn't a pattern.
    """
    return compiled(pattern).search(text, timeout=LIMIT_S)
