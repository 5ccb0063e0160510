"""Demonstrations: their tasks are rows, with the columns' own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.plan import SourceIR
from masflow.errors import SpecError
from masflow.runtime.supervised import batch_of, demonstrations, lessons

Toy = Callable[..., Path]


def test_a_demonstrations_task_is_a_row_whose_columns_are_renamed(toy: Toy):
    experiment = toy(workflow=(("{word: str,", "{word: {type: str, from: term},"),))
    for name in ("tasks.jsonl", "held_out.jsonl", "demos.jsonl"):
        file = experiment.parent / name
        file.write_text(file.read_text().replace('"word"', '"term"'))
    found = demonstrations(compile_experiment(experiment))
    assert [one.turns[0].messages[0].content for one in found[:2]] == ["say red", "say green"]
    assert found[0].task == {"word": "red", "answer": "red"}


def test_a_mixture_of_demonstrations_is_drawn_by_its_weights(toy: Toy):
    mixture = "data: [{path: demos.jsonl, weight: 1}, {path: more.jsonl, weight: 3}]"
    experiment = toy(("warm_start: {data: demos.jsonl", f"warm_start: {{{mixture}"))
    lines = (experiment.parent / "demos.jsonl").read_text().splitlines()
    one = json.loads(lines[4])
    alone = {**one, "turns": [{**one["turns"][0], "train": False}, one["turns"][1]]}
    (experiment.parent / "more.jsonl").write_text(lines[4] + "\n" + json.dumps(alone) + "\n")
    plan = compile_experiment(experiment)
    found = demonstrations(plan)
    assert [one.task["word"] for one in found] == ["red", "green", "blue", "white", "black", "black", "black"]
    assert len({one.id for one in found}) == len(found)
    sourced = [(int(number > 4), turn) for number, one in enumerate(found) for turn in one.turns]
    [lesson] = lessons(plan, sourced)
    second = {turn.id for number, turn in sourced if number == 1}
    for step in range(5):
        picked = batch_of(lesson, step, 8, seed=0)
        assert [len(second & set(part)) > 0 for part in (picked[:8], picked[8:])] == [True, True]
        # of each role's 8 turns 6 come from the second file, which has one turn of the caller and two others
        assert [sum(turn in second for turn in part) for part in (picked[:8], picked[8:])] == [6, 6]


def test_demonstrations_of_a_hub_id_are_checked_when_they_are_replayed(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # datasets takes a folder of this name for the id, and asks nobody
    plan = compile_experiment(toy())
    lines = (tmp_path / "toy/demos.jsonl").read_text().splitlines()
    unfit = json.dumps({**json.loads(lines[0]), "task": {"wrd": "red", "answer": "red"}})
    for name, text in (("fit", lines), ("unfit", [unfit])):
        folder = tmp_path / "someone" / name
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("\n".join(text) + "\n")
    hub = {name: (SourceIR(f"someone/{name}", is_file=False),) for name in ("fit", "unfit")}
    found = demonstrations(replace(plan, data={**plan.data, "warm_start": hub["fit"]}))
    assert [one.turns[1].text for one in found[:2]] == ["red", "green"]
    with pytest.raises(SpecError, match="misses 'word'"):
        demonstrations(replace(plan, data={**plan.data, "warm_start": hub["unfit"]}))
