"""A warm start with memory in its prompts: demonstrations are the memory's first experience."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.plan import Plan
from masflow.memory.records import Memory, Record, task_key
from masflow.memory.store import MemoryDb
from masflow.models.scripted import ScriptedEngine
from masflow.rl.score import score
from masflow.runtime.controller import train
from masflow.runtime.episodes import play
from masflow.runtime.memories import Memories, experiences, snapshot_of
from masflow.runtime.player import Player
from masflow.runtime.rundir import Interrupted, StopFlag
from masflow.runtime.supervised import _demonstrated, demonstrations, is_reminded
from masflow.trace import EpisodeKey

Toy = Callable[..., Path]
ROLES = ["caller", "echoer"]
WORDS = ("red", "green", "blue", "white", "black")
SHORT = (
    ("steps: 4, tasks", "steps: 1, tasks"),
    ("eval: {samples: 1}", "eval: {limit: 1}"),
    ("steps: 4, batch: 4", "steps: 6, batch: 4"),
)
USES = (
    ('"say {{ word }}"', '"{% for m in memory %}hear {{ m.strategy }} {% endfor %}say {{ word }}"'),
    ('"hear {{ call.text }}"', '"{{ memory | length }} hear {{ call.text }}"'),
)


def experiment(toy: Toy, settings: str = "", said: dict[str, str] | None = None) -> Path:
    """The toy with a memory, and a demonstration of each word, where the echoer says `said` or the word."""
    file = toy(*SHORT, workflow=USES)
    reward = file.parent / "echo.py"
    reward.write_text(reward.read_text().replace(" + 0.1 * (len(said) % 2)", ""))
    lines = []
    for word in WORDS:
        turns = [{"node": "call", "reply": word}, {"node": "echo", "reply": (said or {}).get(word, word)}]
        lines.append(json.dumps({"task": {"word": word, "answer": word}, "turns": turns}))
    (file.parent / "demos.jsonl").write_text("\n".join(lines) + "\n")
    own = f"memory_evolution: {{rewards: [echoed], merge: 1.0{settings}}}"
    file.write_text(file.read_text() + f"passes: [{own}]\n")
    return file


def begun(plan: Plan, folder: Path) -> Memories:
    """The memories of a run that has played its demonstrations, and nothing else."""
    found = Memories.of(plan, folder)
    assert found is not None
    found.begin(0)
    found.begin_with(lambda view: score(plan, demonstrations(plan, memory=view)))
    return found


def records(memories: Memories) -> dict[str, list[Record]]:
    return {name: list(memory.records) for name, memory in memories.now.items()}


def test_what_demonstrations_were_paid_for_is_remembered_before_the_first_step(toy: Toy, tmp_path: Path):
    plan = compile_experiment(experiment(toy, said={"green": "red", "blue": "red"}))
    memories = begun(plan, tmp_path)
    kept = records(memories)
    right = {"red", "white", "black"}  # the others' echo is wrong, and pays both roles nothing
    assert all({r.strategy for r in kept[name]} == right and len(kept[name]) == 3 for name in ROLES)
    assert {(r.situation, r.strategy) for r in kept["caller"]} == {(f"say {word}", word) for word in right}
    assert {(r.created, r.scored, r.uses) for rs in kept.values() for r in rs} == {(0, 0, 0)}
    # rewards 1, 0, 0, 1, 1: mean 0.6, so that each that is right has 1 - 0.6
    assert [r.score for r in kept["caller"]] == pytest.approx([0.4] * 3)
    memories.close()


def test_every_second_demonstration_is_taught_with_what_others_did(toy: Toy, tmp_path: Path):
    plan = compile_experiment(experiment(toy, ", recall: 2", said={"green": "red"}))
    memories = begun(plan, tmp_path)
    taught = [is_reminded(plan.train.seed, number) for number in range(5)]
    assert sorted(set(taught)) == [False, True]
    found = _demonstrated(plan, None, memories.view(), lambda number: taught[number])
    for number, (_, one) in enumerate(found):
        prompt, word = one.turns[0].messages[-1].content, WORDS[number]
        assert prompt.endswith(f"say {word}")
        others = prompt.removesuffix(f"say {word}").split()
        if not taught[number]:
            assert others == []
            continue
        assert others[::2] == ["hear"] * 2 and word not in others[1::2] and "green" not in others[1::2]
        assert one.turns[1].messages[-1].content == f"2 hear {word}"
    memories.close()


def test_a_demonstrations_prompt_is_the_episodes_with_the_same_memory(toy: Toy, tmp_path: Path):
    plan = compile_experiment(experiment(toy))
    memories = begun(plan, tmp_path)
    view = memories.view()
    for one in demonstrations(plan, memory=view):
        player = Player(plan, memory=view)
        state = player.start(one.task, EpisodeKey(0, "train", 1, 0, "task", 0))
        script = ScriptedEngine({turn.node: [turn.text] for turn in one.turns})
        [played] = play(player, [state], script.generate)
        assert [t.messages for t in played.turns] != [] and all(
            [(m.role, m.content) for m in a.messages] == [(m.role, m.content) for m in b.messages]
            for a, b in zip(played.turns, one.turns, strict=True)
        )
    memories.close()


def test_a_demonstration_of_a_held_out_task_is_forgotten(toy: Toy, tmp_path: Path):
    file = experiment(toy)
    with (file.parent / "held_out.jsonl").open("a") as held_out:
        held_out.write(json.dumps({"word": "RED", "answer": "x"}) + "\n")
    plan = compile_experiment(file)
    memories = begun(plan, tmp_path)
    kept = records(memories)
    assert kept["caller"] and task_key({"word": "red"}) not in {r.task for rs in kept.values() for r in rs}
    assert all("red" not in r.strategy for rs in kept.values() for r in rs)
    memories.close()


def test_a_run_begins_with_it_resumes_with_it_and_its_checkpoints_know_it(toy: Toy, tmp_path: Path):
    file = experiment(toy)
    plan = compile_experiment(file)
    train(plan, tmp_path / "whole")
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or kind == "warm_start"

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "run", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "run", resume=True)
    stores = []
    for out in ("whole", "run"):
        with MemoryDb(tmp_path / out / "memory.sqlite", read_only=True) as db:
            assert all(len(memory.records) == 5 for memory in db.at(0, ROLES).values())
            stores.append([db.at(0, ROLES), db.at(1, ROLES), db.events()])
    assert stores[0] == stores[1]
    weights = [
        sorted((tmp_path / out / "checkpoints").rglob("*.safetensors"))[-1] for out in ("whole", "run")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


REACT = """
    name: react
    task: {n: int}
    tools: {double: {use: "fns.py:double"}}
    roles: {a: {prompt: "twice {{ n }}", tools: [double]}}
    nodes: {ask: {role: a}}
    edges: [start -> ask -> end]
    rewards: [{name: form, use: well_formed, level: turn}]
"""


def test_what_a_role_with_tools_did_is_remembered_with_its_calls(compiled: Callable[..., Plan]):
    plan = compiled(REACT, {"fns.py": "def double(n: int):\n    return 2 * n\n"})
    call = '<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>'
    lines = {False: call, True: "eight"}
    view = snapshot_of({"stores": {"a": ["a"]}, "recall": 1}, {"a": Memory("a")}, frozenset())
    player = Player(plan, memory=view)
    state = player.start({"n": 4}, EpisodeKey(0, "train", 1, 0, "task", 0))
    script = ScriptedEngine({"a": lambda request: lines[request.messages[-1].role == "tool"]})
    played = score(plan, play(player, [state], script.generate))
    [(store, one)] = experiences(plan, ["form"], played)
    assert (store, one.situation, one.strategy) == ("a", "twice 4", f"{call}\neight")
    view.close()


def test_without_demonstrations_the_warm_start_is_what_it_was(toy: Toy, tmp_path: Path):
    file = experiment(toy, ", demonstrations: false")
    plan = compile_experiment(file)
    plain = replace(plan, stages=tuple(s for s in plan.stages if s.name != "evolve"))
    for name, one in (("off", plan), ("none", plain)):
        train(one, tmp_path / name, only_warm_start=True)
    off, none = (sorted((tmp_path / n).rglob("*.safetensors"))[-1].read_bytes() for n in ("off", "none"))
    assert off == none
    with MemoryDb(tmp_path / "off" / "memory.sqlite", read_only=True) as db:
        assert not any(memory.records for memory in db.at(0, ROLES).values())
    assert "begins with the demonstrations" not in str(explain(plan))
    assert "begins with the demonstrations" in str(explain(compile_experiment(experiment(toy))))
