"""The plan's digest, and the plan as text.

The digest covers what is learned from what: graphs, prompts, hashes of functions and data, mapping,
algorithm. It leaves out where things stand and run: paths, lines, runtime, the root folder, and the number of
steps.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.spec.base import STORED
from masflow.spec.tools import BUILTINS

__all__ = ["dump_plan", "load_plan", "plan_data", "sealed"]

WITHOUT_EFFECT = ("prefix_sharing",)
"""Passes that change how fast is learned, and nothing of what."""
WITHOUT_NAME: dict[str, Any] = {
    "group": "task_role_path",
    "ratio": "token",
    "clip": "ppo",
    "epochs": 1,
    "step_weight": 1.0,
    **dict.fromkeys(("dual_clip", "importance", "overlong", "dynamic", "critic", "gae")),
}
"""Fields of the algorithm with the values that every plan had before they could be chosen."""


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
    data = plan_data(plan)
    for key in ("root_dir", "runtime", "digest", "groups", "sharing"):
        data.pop(key)
    data["passes"] = [entry for entry in data["passes"] if entry["name"] not in WITHOUT_EFFECT]
    data["init"] = data.pop("init_hash") or None
    _strip_algorithm(data["algorithm"])
    if not data["critics"]:
        data.pop("critics")
    for critic in data.get("critics", ()):
        critic.pop("base")  # its hash says all
    for graph in data["workflows"].values():
        _strip_graph(graph)
    for model in data["models"]:
        for key in ("where", "place", "gradient_checkpointing", "template_file"):
            model.pop(key)
        if model["dialect"] == "text":  # as before there were others
            model.pop("dialect")
        model.pop("base")  # its hash says all
        for policy in model["policies"]:
            if policy["lora"] is None:
                policy.pop("lora")
            policy["init"] = policy.pop("init_hash") or None  # whose weights, not where they are
        if model["endpoint"] is not None:  # where the server is and how often it is asked changes nothing
            model["endpoint"] = {"options": model["endpoint"]["options"]}
    for source in (source for sources in data["data"].values() for source in sources):
        if source["is_file"]:
            source.pop("path")
        source.pop("name")
        source["weight"] = 1.0 if source["weight"] is None else f"share {source['weight']}"
    for schedule in (data["train"], data["warm_start"] or {}):
        for key in ("steps", "eval_every", "save_every", "keep", "keep_every", "data"):
            schedule.pop(key, None)
    text = json.dumps(data, sort_keys=True, ensure_ascii=True)
    return replace(plan, digest=hashlib.sha256(text.encode()).hexdigest()[:16])


def _strip_algorithm(algorithm: dict[str, Any]) -> None:
    """Takes out, in place, what was there before it had a name."""
    for key, usual in WITHOUT_NAME.items():
        if algorithm[key] == usual:
            algorithm.pop(key)
    if algorithm["kl"]["place"] == "loss":
        algorithm["kl"].pop("place")


def _strip_graph(graph: dict[str, Any]) -> None:
    """Takes out where things stand, in place; a function is known by its name and its file's hash."""
    arrows = [*graph["start"], *(arrow for node in graph["nodes"] for arrow in node["arrows"])]
    graph.pop("summary")
    program = graph.pop("program")
    if program is not None:
        graph["program"] = program
    for part in (graph, *graph["roles"], *graph["tools"], *graph["nodes"], *graph["rewards"], *arrows):
        part.pop("where")
    for reward in graph["rewards"]:
        for key in ("isolate", "memory_gb"):  # the same numbers, wherever they are worked out
            reward.pop(key)
        if not reward["batch"]:
            reward.pop("batch")
    functions = [*graph["functions"], *(tool["function"] for tool in graph["tools"])]
    functions += [reward["function"] for reward in graph["rewards"] if reward["function"]]
    functions += [program["function"]] if program is not None else []
    functions += [entry["merge_function"] for entry in graph["state"] if entry["merge_function"]]
    for function in functions:
        function["ref"] = _function_name(function["ref"])
    for entry in graph["state"]:
        entry["merge"] = _function_name(entry["merge"])
    for node in graph["nodes"]:
        node.pop("prompt_file")
        node["call"] = _function_name(node["call"]) if node["call"] else None
        answer = node["human"]["in_training"] if node["human"] else None
        if isinstance(answer, dict) and "call" in answer:
            answer["call"] = _function_name(answer["call"])
    for tool in graph["tools"]:
        tool.pop("at_once")  # how fast it answers, not what
        if not tool["bind"]:
            tool.pop("bind")
        placing = BUILTINS[tool["function"]["ref"]].placing if tool["function"]["ref"] in BUILTINS else ()
        tool["settings"] = {k: v for k, v in tool["settings"].items() if k not in placing}
        if tool["data_hash"]:
            tool["settings"] = {k: v for k, v in tool["settings"].items() if not _is_place(v)}


def _function_name(ref: str) -> str:
    """Where its file stands doesn't matter."""
    return ref.rpartition(":")[2] if ".py:" in ref else ref


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/")
