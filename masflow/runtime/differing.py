"""What keeps a run from going on with another plan, in the words of the documents.

Reads two plans as JSON data; knows neither files nor models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from masflow.compiler.digest import WITHOUT_EFFECT

__all__ = ["told"]

FREE = ("digest", "root_dir", "runtime", "groups", "path", "where", "prompt_file", "template_file", "init")
"""What may differ between two parts of one run: where things stand and run."""
FREE_OF_MODELS = ("place", "gradient_checkpointing")
FREE_SCHEDULE = ("steps", "eval_every", "save_every", "keep", "keep_every", "data")
DERIVED = ("sampler", "stages", "sharing")
"""Told by what they come from: the algorithm and the passes; or free to differ."""
KINDS = {
    "workflows": "workflow",
    "nodes": "node",
    "roles": "role",
    "rewards": "reward",
    "tools": "tool",
    "models": "model",
    "policies": "policy",
    "task": "task field",
    "state": "state field",
    "functions": "function",
}
"""Lists of things with names: key → what one of them is called."""
Path = tuple[str, ...]


def told(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Where two plans of different digests differ, a line each, as `what: the run's -> this one's`.

    Args:
        ours, theirs: plans as JSON data, of now and of the run.
    """
    now, before = _content(ours), _content(theirs)
    found: dict[str, None] = {}
    lines = [(path, _line(path, old, new)) for path, old, new in _differences(before, now, ())]
    rehashed = {path[:2] for path, _ in lines if path[2:] == ("base_hash",)}
    rebased = {path[:2] for path, _ in lines if path[2:3] == ("base",)}
    for path, line in lines:
        is_place = path[2:3] == ("base",) and path[:2] not in rehashed
        if not is_place and not (path[2:] == ("base_hash",) and path[:2] in rebased):
            found.setdefault(line)
    return list(found)


def _content(plan: dict[str, Any]) -> dict[str, Any]:
    """What a digest covers: lists of named things by their names, the root's parts at the top."""
    passes = [entry for entry in plan.get("passes") or () if entry.get("name") not in WITHOUT_EFFECT]
    found = _named({**plan, "passes": passes})
    for schedule in (found.get("train"), found.get("warm_start")):
        for key in FREE_SCHEDULE:
            (schedule or {}).pop(key, None)
    for model in (found.get("models") or {}).values():
        for key in FREE_OF_MODELS:
            model.pop(key, None)
    for graph in (found.get("workflows") or {}).values():
        _without_copies(graph)
    (found.get("train") or {}).pop("optimizer", None)  # each policy has its own
    for key in DERIVED:
        found.pop(key, None)
    return found


def _without_copies(graph: dict[str, Any]) -> None:
    """A prompt that its role has too is told once, and functions by what uses them."""
    roles = graph.get("roles") or {}
    for node in (graph.get("nodes") or {}).values():
        for key in ("prompt", "next_prompt"):
            if node.get(key) == (roles.get(node.get("role")) or {}).get(key):
                node.pop(key, None)


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        found = {k: _named(v) for k, v in value.items() if k not in FREE}
        return {k: _by_name(k, v) for k, v in found.items()}
    if isinstance(value, str):
        return _without_place(value)
    return [_named(v) for v in value] if isinstance(value, list) else value


def _without_place(text: str) -> str:
    """A file, or a function in one, without the folders before it: they may have moved."""
    is_place = text.startswith("/") and "\n" not in text
    return text.rpartition("/")[2] if is_place or ".py:" in text.rpartition("/")[2] else text


def _by_name(key: str, value: Any) -> Any:
    """A list of named things as a mapping; functions are known by their references."""
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        return {} if value == [] and key in KINDS else value
    label = "ref" if key == "functions" else "name"
    names = [v.get(label) for v in value]
    if None in names or len(set(names)) < len(names):
        return value
    return {str(v[label]): {k: part for k, part in v.items() if k != label} for v in value}


def _differences(old: Any, new: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif old != new and not (old in (ABSENT, None) and new in (ABSENT, None)):
        yield path, old, new


ABSENT = "\0absent"


def _line(path: Path, old: Any, new: Any) -> str:
    """One difference in words."""
    rest, owner = _owner(path)
    whole = owner or "the plan"
    if path[:1] == ("policy_of",):
        return f"role '{path[1]}' is played by: {_short(old)} -> {_short(new)}"
    if path[:1] == ("data",) and len(path) > 1:
        return _data_line(path, old, new)
    if not rest:
        return f"{whole}: only {'in this plan' if old == ABSENT else 'in the run'}"
    last = rest[-1]
    if last == "init_hash":
        return (
            f"the weights that {_bare(path)} starts from; RUN@step names them while the earlier run goes on"
        )
    if last == "arrows":
        return f"edges out of {whole}: {_targets(old)} -> {_targets(new)}"
    if last == "base_hash":
        return f"the base of {whole}: its files or settings changed"
    if last in ("hash", "data_hash"):
        what = "files" if last == "data_hash" else "code"
        if "program" in rest:
            return f"the code of the workflow '{''.join(path[1:2])}' changed: its file, or what that imports"
        return f"the {what} of {whole} changed"
    of = f" of {owner}" if owner else ""
    return f"{'.'.join(rest)}{of}: {_short(old, new)} -> {_short(new, old)}"


def _owner(path: Path) -> tuple[Path, str]:
    """(the keys below the innermost named thing, that thing; "" where there is none)."""
    owner, at = "", 0
    while at + 1 < len(path) and path[at] in KINDS:
        owner = f"{KINDS[path[at]]} '{path[at + 1]}'" if path[at] != "workflows" else owner
        at += 2
    return path[at:], owner


def _targets(arrows: Any) -> str:
    """Where edges lead, with their conditions."""
    shown = []
    for arrow in arrows if isinstance(arrows, list) else []:
        condition = arrow.get("when") or arrow.get("case")
        shown.append(" & ".join(arrow["targets"]) + (f" when {condition}" if condition else ""))
    return ", ".join(shown) or "nothing"


def _bare(path: Path) -> str:
    """The name of the policy, or the run."""
    return f"'{path[path.index('policies') + 1]}'" if "policies" in path else "the run"


def _data_line(path: Path, old: Any, new: Any) -> str:
    where = f"data.{path[1]}" if path[1] != "warm_start" else "warm_start.data"
    if len(path) > 2 and path[-1] == "hash":
        return f"the rows of '{path[2]}' in {where} changed"
    if len(path) == 3 and ABSENT in (old, new):
        return f"'{path[2]}' in {where}: only {'in this plan' if old == ABSENT else 'in the run'}"
    return f"{'.'.join(path[2:]) or 'rows'} in {where}: {_short(old)} -> {_short(new)}"


def _short(value: Any, other: Any = None) -> str:
    """A value in at most 60 characters; of two long texts the part from where they differ."""
    if value == ABSENT:
        return "nothing"
    text, against = (json.dumps(v, default=str, ensure_ascii=False) for v in (value, other))
    if len(text) <= 60:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, against, strict=False)) if a != b), 0)
    start = max(0, same - 20) if same + 40 < len(text) else max(0, len(text) - 58)
    return ("…" if start else "") + text[start : start + 58] + ("…" if start + 58 < len(text) else "")
