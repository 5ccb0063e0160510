"""What a role is reminded of before it speaks, and how its prompt tells it."""

from __future__ import annotations

import re
from typing import Any

from masflow.compiler.graph import RoleIR
from masflow.memory.records import Record, task_key
from masflow.runtime.live import Item, Live, Play, Templates

MENTIONED = re.compile(r"\{[{%](?:(?![%}]\}).)*?(?<![\w.])memory\b", re.DOTALL)
"""A template that uses the name `memory`."""
HEADER = "What worked in similar situations:"


def remind(
    live: Live, play: Play, item: Item, role: RoleIR, templates: Templates, user: str | None, *, is_new: bool
) -> str:
    """Put the records that are like the role's situation into `memory`, and note them on the item.

    The situation is the user's message as it reads without memory; where there is none, the system's. Records
    of the episode's own task are never among them.

    Args:
        user: the template of that message.
        is_new: False within a conversation, whose first message stands already.
    Returns:
        What is to be added to the system message: of records that no template mentions.
    """
    memory, name = live.memory, play.qualified(role.name)
    if memory is None or not memory.has(name):
        return ""
    texts = [text for text in (role.system if is_new else None, user) if text]
    situation = _without_memory(templates, texts[-1]) if texts else ""
    graph = live.plan.graph
    task = task_key(live.state.task, (f.name for f in graph.task if f.hidden))
    item.recalled, records = memory.recall(name, clean(situation), task)
    if any(MENTIONED.search(text) for text in texts):
        templates.names["memory"] = [told(record) for record in records]  # type: ignore[index]
        return ""
    if not is_new:  # nowhere to tell it
        item.recalled = type(item.recalled)(item.recalled.store, item.recalled.situation)
        return ""
    lines = (f"{record.situation}\n-> {record.strategy}" for record in records)
    return "\n\n".join((HEADER, *lines)) if records else ""


def told(record: Record) -> dict[str, Any]:
    """A record as prompts see it."""
    return {"situation": record.situation, "strategy": record.strategy, "score": record.score}


def clean(text: str) -> str:
    """The text without half characters, which UTF-8 has no bytes for."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _without_memory(templates: Templates, text: str) -> str:
    """The message with `memory` empty; chance is as it was before, for the prompt itself."""
    before = templates.rng.getstate() if templates.rng is not None else None
    try:
        return templates.render("prompt", text)
    finally:
        if templates.rng is not None and before is not None:
            templates.rng.setstate(before)
