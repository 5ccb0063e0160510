"""Function calls: are they the ones that were asked for, by name and arguments, however these are written?

The rules are those of the Berkeley Function-Calling Leaderboard's AST check (gorilla.cs.berkeley.edu,
Apache-2.0), whose gold gives each argument's right values as a list, in which "" means that it may be left
out. One departure: 5.0 is an integer, as JSON Schema has it.
"""

import re
from typing import Any

import jsonschema


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


def made_match(trajectory: Any, node: str, gold: list[dict[str, Any]] | None) -> float:
    """`calls_match` of the calls that an agent made at a node, with `name` and `arguments`."""
    effects = (effect for effect in trajectory.effects if effect.path[-1].node == node)
    return calls_match([effect.args for effect in effects if effect.kind == "tool"], gold)


def recorded(
    name: str, arguments: dict[str, Any], functions: list[dict[str, Any]], returns: list[dict[str, Any]]
) -> dict[str, Any]:
    """Call one of the functions that the task shows, by its name, with an object of arguments.

    A tool: what the call returned when the task was recorded, or an `error` that says what is wrong with it.

    Args:
        functions: `{name, description, parameters}` each, the parameters a JSON Schema; the leaderboard's
            types `dict`, `float` and `tuple` are read as `object`, `number` and `array`.
        returns: `{call: {name: {argument: [right values]}}, value}` each.
    """
    known, name = {function["name"]: function for function in functions}, name.strip()
    if name not in known:
        return {"error": f"no function {name!r}; known: {', '.join(known) or 'none'}"}
    schema = _schema(known[name].get("parameters") or {})
    for wrong in jsonschema.Draft202012Validator(schema).iter_errors(arguments):
        return {"error": f"{'.'.join(['arguments', *map(str, wrong.path)])}: {wrong.message}"}
    for one in returns:
        if _right({"name": name, "arguments": arguments}, one["call"]):
            return {"value": one["value"]}
    return {"error": "nothing is recorded for these arguments"}


TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """With the types of JSON Schema; a type that it doesn't know allows anything."""
    own = {key: value for key, value in schema.items() if key not in ("type", "optional", "required")}
    kind = TYPES.get(schema.get("type", ""), schema.get("type"))
    if kind in ("object", "array", "string", "number", "integer", "boolean", "null"):
        own["type"] = kind
    if isinstance(schema.get("required"), list):
        own["required"] = schema["required"]
    if isinstance(schema.get("properties"), dict):
        own["properties"] = {key: _schema(each) for key, each in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        own["items"] = _schema(schema["items"])
    return own


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
    return f"{call.get('name')}".strip() == name and isinstance(given, dict) and _members(given, values)


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
