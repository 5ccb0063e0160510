"""What a run remembers, and how it came to: for `masflow memory`. Reads the run's folder alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from masflow.errors import RunError, closest
from masflow.memory.evolve import score_at
from masflow.memory.records import Event
from masflow.memory.rules import Rules
from masflow.memory.store import MemoryDb
from masflow.runtime.memories import FILE
from masflow.runtime.recorded import printable

__all__ = ["memory_data", "memory_text"]

SHOWN = 300
"""Characters of a situation or a strategy that the text shows."""


def memory_data(run: Path, role: str | None = None) -> list[dict[str, Any]]:
    """Every store of a run: `store, roles, step, records`; of each record its fields, `is_there` and its
    `history`, the earliest first. Scores are those of the last step.

    Args:
        role: qualified; only the store that it has.
    Raises:
        RunError: no run there, one without memory, or a role that has none.
    """
    options = _options(run)
    stores: dict[str, list[str]] = options["stores"]
    known = [one for roles in stores.values() for one in roles]
    if role is not None and role not in known:
        near = closest(role, known)
        fix = f"write '{near}'" if near else "name a role that has a memory"
        raise RunError(f"role '{role}' has no memory in {run}; these have: {', '.join(known)}", fix)
    wanted = [name for name, roles in stores.items() if role is None or role in roles]
    with MemoryDb(run / FILE, read_only=True) as db:
        step = db.last_step()
        return [
            {"store": name, "roles": stores[name], "step": step, "records": _records(db, name, step, options)}
            for name in wanted
        ]


def _options(run: Path) -> dict[str, Any]:
    plan = run / "plan.json"
    try:
        stages = json.loads(plan.read_text(encoding="utf-8"))["stages"]
        found = [stage["options"] for stage in stages if (stage["name"], stage["op"]) == ("evolve", "memory")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"no run at {run}: {error}", "name a run's folder") from error
    if not found:
        fix = "add memory_evolution to the experiment's passes, and train"
        raise RunError(f"the run in {run} has no memory", fix)
    return found[0]


def _records(db: MemoryDb, name: str, step: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    rules, histories = Rules(**options["rules"]), dict[int, list[dict[str, Any]]]()
    for event in db.events(name):
        histories.setdefault(event.record, []).append(_told(event))
    return [
        {
            **record.__dict__,
            "score": score_at(record, step, rules),
            "is_there": is_there,
            "history": histories.get(record.id, []),
        }
        for record, is_there in db.latest(name)
    ]


def _told(event: Event) -> dict[str, Any]:
    own = {"step": event.step, "event": event.kind, "turn": event.turn or None}
    return {**own, "score": event.score, "detail": event.detail}


def memory_text(stores: list[dict[str, Any]]) -> str:
    """The same for people: each store's records, those that are gone last."""
    return "\n\n".join("\n".join(_store_lines(store)) for store in stores)


def _store_lines(store: dict[str, Any]) -> list[str]:
    there = Counter(one["is_there"] for one in store["records"])
    of = "" if store["roles"] == [store["store"]] else f" of {', '.join(store['roles'])}"
    gone = f", {there[False]} gone" if there[False] else ""
    lines = [f"{store['store']}{of}: {there[True]} records{gone}, after step {store['step']}"]
    for one in sorted(store["records"], key=lambda one: (not one["is_there"], -one["score"], one["id"])):
        state = f"score {one['score']:.3f}" if one["is_there"] else "gone"
        used = f"recalled {one['uses']} times, last used at step {one['last_used']}"
        lines += [f"  #{one['id']}  {state}, {used}, from turn {one['source']}"]
        lines += [f"    {name}: {_short(one[name])}" for name in ("situation", "strategy")]
        for event in one["history"]:
            by = f" by turn {event['turn']}" if event["turn"] else ""
            detail = f" ({event['detail']})" if event["detail"] else ""
            lines.append(
                f"    step {event['step']}: {event['event']}{by}, score {event['score']:.3f}{detail}"
            )
    return lines


def _short(text: str) -> str:
    text = printable(text, "")
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
