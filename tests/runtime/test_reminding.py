"""Where a role's memory stands in what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from masflow.compiler.plan import Plan
from masflow.memory.recall import Snapshot
from masflow.memory.records import Memory, Record, task_key
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.runtime.reminding import MENTIONED
from masflow.trace import EpisodeKey, Trajectory

Compile = Callable[..., Plan]
TALK = """
    name: talk
    task: {word: str, answer: {type: str, hidden: true}}
    roles:
      speaker: {conversation: role, system: "Be brief.", prompt: "say {{ word }}"}
    nodes:
      first: {role: speaker}
      second: {role: speaker, next_prompt: "again: say {{ word }}"}
    edges: [start -> first -> second -> end]
    output: {said: "{{ second.text }}"}
"""
OUTER = """
    name: outer
    task: {word: str, answer: {type: str, hidden: true}}
    nodes: {ask: {workflow: inner.yaml, args: {query: "{{ word }}"}}}
    edges: [start -> ask -> end]
    output: {said: "{{ ask.said }}"}
"""
INNER = """
    name: inner
    task: {query: str}
    roles:
      worker:
        prompt: "{% for m in memory %}[{{ m.situation }}: {{ m.strategy }}] {% endfor %}{{ query }}"
    nodes: {work: {role: worker}}
    edges: [start -> work -> end]
    output: {said: "{{ work.text }}"}
"""


def record(number: int, situation: str, task: Mapping[str, Any]) -> Record:
    key = task_key(task, ["answer"])
    return Record(number, situation, f"reply {number}", 1.0, 1, 0, 1, 1, f"turn{number}", key)


def played(plan: Plan, memory: Snapshot, script: dict[str, Any], task: dict[str, Any]) -> Trajectory:
    player = Player(plan, memory=memory)
    state = player.start(task, EpisodeKey(7, "train", 3, 0, "a row's id", 0))
    [trajectory] = play(player, [state], ScriptedEngine(script).generate)
    return trajectory


def test_a_conversation_is_told_once_in_the_system_message_it_begins_with(compiled: Compile):
    memory = Memory("speaker", (record(1, "say no", {"word": "no"}), record(2, "say yes", {"word": "yes"})))
    view = Snapshot({"speaker": memory}, {"speaker": "speaker"}, 1)
    found = played(compiled(TALK), view, {"speaker": ["a", "b"]}, {"word": "no thanks", "answer": "x"})
    first, second = found.turns
    told = "Be brief.\n\nWhat worked in similar situations:\n\nsay no\n-> reply 1"
    assert [(m.role, m.content) for m in first.messages] == [("system", told), ("user", "say no thanks")]
    assert second.messages[:2] == first.messages and second.messages[-1].content == "again: say no thanks"
    recalled = [found.recalled[turn.id] for turn in found.turns]
    assert [(one.situation, one.records) for one in recalled] == [
        ("say no thanks", (1,)),
        ("again: say no thanks", ()),
    ]


def test_a_task_is_known_by_its_outermost_rows_visible_fields(compiled: Compile):
    own, other = {"word": "sum of 3", "answer": "7"}, {"word": "sum of 4", "answer": "7"}
    memory = Memory("ask/worker", (record(1, "sum of 3", own), record(2, "sum of 4", other)))
    view = Snapshot({"ask/worker": memory}, {"ask/worker": "ask/worker"}, 5)
    task = {"word": "Sum  of 3", "answer": "another"}  # the same task in other clothes
    found = played(compiled(OUTER, {"inner.yaml": INNER}), view, {"ask/worker": "seven"}, task)
    [turn] = found.turns
    assert turn.messages[-1].content == "[sum of 4: reply 2] Sum  of 3"
    assert found.recalled[turn.id].situation == "Sum  of 3" and found.recalled[turn.id].records == (2,)


def test_chance_in_a_prompt_is_the_same_with_and_without_memory(compiled: Compile):
    text = TALK.replace(
        "say {{ word }}", "{{ [1, 2, 3, 4, 5, 6, 7, 8] | shuffle | join(' ') }} {{ word }}", 1
    )
    plan, task = compiled(text), {"word": "no", "answer": "x"}
    view = Snapshot({}, {"speaker": "speaker"}, 1)
    with_memory = played(plan, view, {"speaker": ["a", "b"]}, task)
    without = played(plan, Snapshot({}, {}, 1), {"speaker": ["a", "b"]}, task)
    assert with_memory.turns == without.turns and not without.recalled
    first = with_memory.turns[0]
    assert with_memory.recalled[first.id].situation == first.messages[-1].content


@pytest.mark.parametrize(
    ("text", "is_mentioned"),
    [
        ("{{ memory }}", True),
        ("{% for m in memory %}{{ m.strategy }}{% endfor %}", True),
        ("a {{ x }} then {{ memory | length }}", True),
        ("{% if\nmemory %}yes{% endif %}", True),
        ("You have a good memory.", False),
        ("{{ x }} memory {{ y }}", False),
        ("{{ state.memory }}", False),
        ("{{ memory_of_x }}", False),
    ],
)
def test_a_prompt_uses_memory_only_by_name(text: str, is_mentioned: bool):
    assert bool(MENTIONED.search(text)) is is_mentioned
