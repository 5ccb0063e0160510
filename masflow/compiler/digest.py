"""The plan's digest, and the plan as text.

The digest covers what is learned from what: graphs, prompts, hashes of functions and data, mapping,
algorithm. It leaves out where things stand and run: paths, lines, runtime, the root folder, and the number of
steps.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.spec.base import STORED

__all__ = ["dump_plan", "load_plan", "plan_data", "sealed"]

_PLACES = {"where", "prompt_file", "root_dir", "runtime", "digest", "groups", "path"}
_FILE_FUNCTION = re.compile(r".*\.py:(\w+)\Z")


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data."""
    return _adapter().dump_python(plan, mode="json", by_alias=True)


def dump_plan(plan: Plan) -> str:
    return json.dumps(plan_data(plan), indent=1, ensure_ascii=False)


def load_plan(text: str) -> Plan:
    """Read what `dump_plan` wrote.

    Raises:
        RunError: not a plan, or one of another version of masflow.
    """
    try:
        return _adapter().validate_json(text, context=STORED)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(
            f"not a plan: {place}: {first['msg']}", "use a plan.json of this version of masflow"
        ) from None


def sealed(plan: Plan) -> Plan:
    """The plan with its digest: 16 hexadecimal digits of SHA-256 over what the digest covers."""
    data = _covered(plan_data(plan))
    for model in data["models"]:
        model.pop("base")  # its hash says all
    for schedule in (data["train"], data.get("warm_start") or {}):
        for key in ("steps", "eval_every", "save_every", "keep", "data"):
            schedule.pop(key, None)
    for graph in data["workflows"].values():
        for tool in graph["tools"]:
            _without_files(tool)
    text = json.dumps(data, sort_keys=True, ensure_ascii=True)
    return replace(plan, digest=hashlib.sha256(text.encode()).hexdigest()[:16])


def _covered(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _covered(v) for k, v in value.items() if k not in _PLACES}
    if isinstance(value, list):
        return [_covered(v) for v in value]
    if isinstance(value, str) and (match := _FILE_FUNCTION.match(value)):
        return f".py:{match[1]}"  # where the file stands doesn't matter; its hash stands beside it
    return value


def _without_files(tool: dict[str, Any]) -> None:
    if tool["data_hash"]:
        tool["settings"] = {
            k: v for k, v in tool["settings"].items() if not (isinstance(v, str) and v.startswith("/"))
        }
