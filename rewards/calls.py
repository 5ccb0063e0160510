"""Function calls: are they the ones that were asked for, by name and arguments, however these are written?

The rules are those of the Berkeley Function-Calling Leaderboard's AST check (gorilla.cs.berkeley.edu,
Apache-2.0), whose gold gives each argument's right values as a list, in which "" means that it may be left
out. One departure: 5.0 is an integer, as JSON Schema has it.
"""

import re
from typing import Any


def calls_match(calls: list[dict[str, Any]], gold: list[dict[str, Any]] | None) -> float:
    """1 when the calls are the gold ones, in any order and none besides, else 0.

    Args:
        calls: `{"name": …, "arguments": {…}}` each, as a model writes them.
        gold: `{name: {argument: [right values]}}` each; null or empty where no call is right.
    """
    return float(len(calls) == len(gold or []) == _paired(calls, gold or []))


def calls_f1(calls: list[dict[str, Any]], gold: list[dict[str, Any]] | None) -> float:
    """Harmonic mean of the right calls' share of what was called and of what was asked for; 1 where nothing
    was asked for and nothing called."""
    if not calls and not gold:
        return 1.0
    return 2 * _paired(calls, gold or []) / (len(calls) + len(gold or []))


def _paired(calls: list[dict[str, Any]], gold: list[dict[str, Any]]) -> int:
    """The most calls that have a gold one of their own (augmenting paths: gold ones may overlap)."""
    fits = [[j for j, want in enumerate(gold) if _right(call, want)] for call in calls]
    owner: dict[int, int] = {}

    def placed(call: int, seen: set[int]) -> bool:
        for j in fits[call]:
            if j not in seen:
                seen.add(j)
                if j not in owner or placed(owner[j], seen):
                    owner[j] = call
                    return True
        return False

    return sum(placed(i, set()) for i in range(len(calls)))


def _right(call: dict[str, Any], want: dict[str, Any]) -> bool:
    ((name, values),) = want.items()
    given = call.get("arguments")
    return call.get("name") == name and isinstance(given, dict) and _members(given, values)


def _members(given: dict[str, Any], values: dict[str, list[Any]]) -> bool:
    """Every argument has a right value, and those that are missing may be."""
    missing = (values[key] for key in values.keys() - given.keys())
    return (
        given.keys() <= values.keys()
        and all("" in allowed for allowed in missing)
        and all(any(_same(given[key], right) for right in values[key]) for key in given)
    )


def _same(value: Any, right: Any) -> bool:
    if isinstance(right, dict):  # its members have lists of right values of their own
        lists = {key: each if isinstance(each, list) else [each] for key, each in right.items()}
        return isinstance(value, dict) and _members(value, lists)
    if isinstance(right, list):
        same_length = isinstance(value, list) and len(value) == len(right)
        return same_length and all(map(_same, value, right))
    if isinstance(right, bool) or isinstance(value, bool) or right is None:
        return value is right
    if isinstance(right, str):
        return isinstance(value, str) and _plain(value) == _plain(right)
    return isinstance(value, int | float) and value == right


def _plain(text: str) -> str:
    """Without case, blanks and the marks that the leaderboard overlooks; quotes as one kind."""
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
