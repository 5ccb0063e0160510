"""A checkpoint is whole or absent, found by name, kept by rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from masflow.errors import RunError
from masflow.runtime.checkpoints import (
    RunState,
    clean,
    find,
    latest,
    listed,
    prune,
    put_text,
    read_state,
    restore,
    save,
    writing,
)


class Weights:
    """A model group that holds one text."""

    def __init__(self, text: str = "", fails: bool = False):
        self.text, self.fails = text, fails

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text(self.text)
        if self.fails:
            raise OSError(28, "No space left on device")

    def load(self, folder: Path) -> None:
        self.text = (folder / "weights").read_text()


def state(step: int) -> RunState:
    return RunState(warm_step=9, warmed=True, step=step, position=3 * step, digest="d")


def test_what_is_saved_is_restored(tmp_path: Path):
    save(tmp_path, state(7), {"policy": Weights("seven")})
    model = Weights()
    assert restore(tmp_path / "step_000007", {"policy": model}) == state(7)
    assert model.text == "seven"


def test_a_writer_that_fails_leaves_the_earlier_checkpoint_and_no_half_one(tmp_path: Path):
    save(tmp_path, state(7), {"policy": Weights("whole")})
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, state(7), {"policy": Weights("half", fails=True)})
    clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000007"]
    assert (tmp_path / "step_000007/models/policy/weights").read_text() == "whole"


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path: Path):
    save(tmp_path, state(7), {"policy": Weights("old")})
    (tmp_path / "step_000007").rename(tmp_path / ".partial-old-step_000007")
    clean(tmp_path)
    assert [p.name for p in listed(tmp_path)] == ["step_000007"]


def test_the_latest_is_the_furthest_step_and_any_step_is_after_the_warm_start(tmp_path: Path):
    for one in (RunState(warm_step=120), state(2), state(10)):
        save(tmp_path, one, {})
    assert [p.name for p in listed(tmp_path)] == ["warm_000120", "step_000002", "step_000010"]
    assert latest(tmp_path) == tmp_path / "step_000010"


def test_pruning_keeps_the_last_ones_the_best_and_the_first(tmp_path: Path):
    for one in (RunState(warm_step=120), *map(state, range(8))):
        save(tmp_path, one, {})
    prune(tmp_path, keep=2, best=3)
    kept = [p.name for p in listed(tmp_path)]
    assert kept == [f"step_00000{n}" for n in (0, 3, 5, 6, 7)]


def test_inside_the_warm_start_only_the_last_is_kept(tmp_path: Path):
    for steps in (100, 200):
        save(tmp_path, RunState(warm_step=steps), {})
    prune(tmp_path, keep=2, best=None)
    assert [p.name for p in listed(tmp_path)] == ["warm_000200"]


def test_a_run_a_step_of_it_and_a_folder_are_found_by_name(tmp_path: Path):
    root = tmp_path / "runs/day1/checkpoints"
    for step in (1, 2):
        save(root, state(step), {})
    roots = (tmp_path,)
    assert find("runs/day1", roots).name == "step_000002"
    assert find("runs/day1@1", roots).name == "step_000001"
    assert find(str(root / "step_000001"), roots).name == "step_000001"
    with pytest.raises(RunError, match="step_000001, step_000002"):
        find("runs/day1@9", roots)
    with pytest.raises(RunError, match="runs/day1'"):
        find("runs/dya1", roots)
    (tmp_path / "runs/set/seed_3").mkdir(parents=True)
    with pytest.raises(RunError, match=r"set holds no checkpoint\n  fix: name a seed's run, as .*/seed_3"):
        find("runs/set", roots)


def test_a_checkpoint_without_a_model_of_the_plan_is_refused_with_what_it_holds(tmp_path: Path):
    place = save(tmp_path, state(1), {"policy": Weights("x")})
    with pytest.raises(RunError, match="no model 'own'; it holds: policy"):
        restore(place, {"own": Weights()})


def test_an_unreadable_state_is_a_clear_error(tmp_path: Path):
    place = save(tmp_path, state(1), {})
    sound = json.loads((place / "state.json").read_text())
    without = {key: value for key, value in sound.items() if key != "warmed"}
    for odd in (
        "",
        "{}",
        "[]",
        {**sound, "later": 2},
        {**sound, "step": "two"},
        {**sound, "evals": [1]},
        without,
    ):
        (place / "state.json").write_text(odd if isinstance(odd, str) else json.dumps(odd))
        with pytest.raises(RunError, match=r"(?s)(state|can be read).*fix: remove that folder"):
            read_state(place)


def test_a_failing_disk_says_what_stands_on_it(tmp_path: Path):
    save(tmp_path / "checkpoints", state(4), {})
    with pytest.raises(RunError, match=r"No space.*step_000004"), writing("metrics.jsonl", tmp_path):
        raise OSError(28, "No space left on device")


def test_a_text_is_replaced_at_once_or_not_at_all(tmp_path: Path):
    put_text(tmp_path / "plan.json", "first")
    with pytest.raises(UnicodeEncodeError):
        put_text(tmp_path / "plan.json", "second\ud800")
    assert (tmp_path / "plan.json").read_text() == "first"
