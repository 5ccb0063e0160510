"""Task fields and entries of the blackboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from masflow.errors import closest
from masflow.spec.base import Fault, Faults, JsonValue, Spec, unknown_word
from masflow.spec.names import FUNCTION
from masflow.spec.types import TypeField, mismatch, parse_type

MERGES = ("replace", "append", "extend", "add", "union", "update")


class TaskField(Spec):
    """One field of a data row."""

    type: TypeField
    hidden: bool = False
    """Rewards, tools and calls may read it; in a prompt or condition it is a compile error."""
    source: str | None = Field(default=None, alias="from")
    """The column's name in the data, where it differs."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return _typed(data, ("type", "hidden", "from"))


def _typed(data: Any, keys: tuple[str, ...]) -> Any:
    """A field in long form; a bare type, or a record that isn't the long form, is its type."""
    if isinstance(data, Spec):
        return data
    if not isinstance(data, dict):
        return {"type": data}
    others = [key for key in data if key not in keys]
    if "type" not in data:
        return data if len(others) < len(data) and len(data) > 0 and not _is_type(data) else {"type": data}
    odd = any(
        closest(str(key), keys) or isinstance(data[key], (bool, int, float, type(None))) for key in others
    )
    return {"type": data} if others and not odd else data


def _is_type(data: object) -> bool:
    try:
        parse_type(data)
    except (Fault, Faults):
        return False
    return True


class StateField(Spec):
    """One entry of the blackboard."""

    type: TypeField
    default: JsonValue | None = None
    merge: str = "replace"
    """How concurrent writes meet: replace, append, extend, add, union, update or `file.py:fn`."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return _typed(data, ("type", "default", "merge"))

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        merge, default = data.get("merge", "replace"), data.get("default")
        if isinstance(merge, str) and merge not in MERGES and not FUNCTION.match(merge):
            yield unknown_word("merge rule", merge, (*MERGES, "file.py:fn"), path=("merge",))
        if not _is_type(data.get("type")):
            return
        type_ = parse_type(data["type"])
        if default is not None and not (isinstance(default, str) and "{{" in default):
            why = mismatch(default, type_)
            if why:
                yield Fault(
                    f"the default doesn't fit: {why}",
                    code="wrong-type",
                    fix=f"write a {type_}",
                    path=("default",),
                )
        needs = {
            "append": ("list",),
            "extend": ("list",),
            "union": ("list",),
            "add": ("int", "float"),
            "update": ("record",),
        }
        if isinstance(merge, str) and merge in needs and type_.kind not in (*needs[merge], "any"):
            message = f"merge rule '{merge}' needs a {' or '.join(needs[merge])}; the type is {type_}"
            yield Fault(message, code="wrong-merge", fix="choose another merge rule or type", path=("merge",))
