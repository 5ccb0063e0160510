"""Trackers show the numbers of metrics.jsonl, once each, and never end a run."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.runtime import tracking
from masflow.runtime.checkpoints import RunState
from masflow.runtime.controller import train
from masflow.runtime.rundir import RunDir, read_metrics
from masflow.runtime.tracking import first_steps, scalars

Toy = Callable[..., Path]
Events = dict[str, dict[str, list[tuple[int, float]]]]
FEW_SAVES = ("save_every: 1, keep: 8", "save_every: 2, eval_every: 1, keep: 8")


def tracked(toy: Toy, tracker: str, *changes: tuple[str, str]) -> Path:
    return toy(("base:\n", f"runtime: {{tracking: {{{tracker}}}}}\nbase:\n"), *changes)


def events(out: Path) -> Events:
    """Kind → tag → (step, value) as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Events = {}
    for folder in sorted((out / "tensorboard").iterdir()):
        read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        read.Reload()
        tags = read.Tags()["scalars"]
        found[folder.name] = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags}
    return found


def recorded(out: Path) -> Events:
    """The same out of metrics.jsonl."""
    found: Events = {}
    for record in read_metrics(out / "metrics.jsonl"):
        for tag, value in scalars(record).items():
            found.setdefault(record["kind"], {}).setdefault(tag, []).append((record["step"], value))
    return found


def assert_same(shown: Events, kept: Events) -> None:
    assert shown.keys() == kept.keys()
    for kind, tags in kept.items():
        assert shown[kind].keys() == tags.keys()
        for tag, points in tags.items():
            assert [step for step, _ in shown[kind][tag]] == [step for step, _ in points], tag
            assert [v for _, v in shown[kind][tag]] == pytest.approx([v for _, v in points], rel=1e-6), tag


class Killed(Exception):
    pass


def kill_at(kind: str, step: int) -> Callable[[str, dict[str, Any]], None]:
    def on_event(happened: str, facts: dict[str, Any]) -> None:
        if happened == kind and facts["step"] == step:
            raise Killed

    return on_event


def test_tensorboard_shows_what_the_metrics_hold_under_their_names(toy: Toy, tmp_path: Path):
    train(compile_experiment(tracked(toy, "tensorboard: true", FEW_SAVES)), tmp_path / "run")
    shown = events(tmp_path / "run")
    assert_same(shown, recorded(tmp_path / "run"))
    assert [step for step, _ in shown["train"]["train/rewards/echoed"]] == [1, 2, 3, 4]
    assert [step for step, _ in shown["eval"]["eval/metrics/echoed"]] == [0, 1, 2, 3, 4]
    assert {"warm_start/policies/policy/loss"} <= shown["warm_start"].keys()
    assert {"train/roles/caller/malformed_frac", "train/time/tokens_per_s"} <= shown["train"].keys()


@pytest.mark.parametrize(("kind", "step"), [("train", 3), ("eval", 3), ("eval", 0), ("warm_start", 2)])
def test_a_resumed_run_shows_every_step_once(toy: Toy, tmp_path: Path, kind: str, step: int):
    plan = compile_experiment(tracked(toy, "tensorboard: true", FEW_SAVES))
    with pytest.raises(Killed):  # after a record that no checkpoint knows of
        train(plan, tmp_path / "run", on_event=kill_at(kind, step))
    time.sleep(1.0 - time.time() % 1.0)  # event files are read in order of the seconds in their names
    train(plan, tmp_path / "run", resume=True)
    assert_same(events(tmp_path / "run"), recorded(tmp_path / "run"))


def test_a_resumed_run_takes_back_what_it_will_record_again():
    state = RunState(warm_step=5, warmed=True, step=3, evals={"0": {}, "3": {}})
    assert first_steps(state) == {"warm_start": 6, "train": 4, "eval": 4}
    assert first_steps(RunState(warmed=True, step=3))["eval"] == 3
    assert first_steps(RunState()) == {"warm_start": 1, "train": 1, "eval": 0}


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_said_before_anything_begins(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
):
    monkeypatch.setitem(sys.modules, package, None)
    plan = compile_experiment(tracked(toy, f"{package}: true"))
    with pytest.raises(
        RunError, match=rf"tracking.{package} needs .*\n  fix: pip install 'masflow\[{package}\]'"
    ):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on(toy: Toy, tmp_path: Path):
    plan = compile_experiment(tracked(toy, "tensorboard: true"))
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    (tmp_path / "run/tensorboard/train").write_text("a file where a folder should be")
    warnings: list[str] = []

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        if kind == "warning":
            warnings.append(facts["message"])

    assert train(plan, tmp_path / "run", on_event=on_event)["steps"] == 4
    told = [text for text in warnings if "TensorBoard" in text]
    assert len(told) == 1 and "the run goes on without it" in told[0]
    assert set(recorded(tmp_path / "run")) == {"warm_start", "train", "eval"}


def test_a_tracker_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    from threading import Event

    class Stuck:
        name = "Stuck"
        ended = Event()

        def log(self, kind: str, step: int, values: dict[str, float]) -> None: ...

        def close(self) -> None:
            self.ended.wait(30)

    monkeypatch.setattr(tracking, "CLOSE_TIMEOUT_S", 0.05)
    trackers = object.__new__(tracking.Trackers)
    trackers._running = [Stuck()]
    [warning] = trackers.close()
    Stuck.ended.set()
    assert "Stuck: TimeoutError: its last records are not sent" in warning
    assert trackers.close() == []


def test_where_a_run_is_tracked_is_not_in_its_digest(toy: Toy):
    plain = compile_experiment(toy())
    followed = compile_experiment(tracked(toy, "tensorboard: true, wandb: echoes"))
    assert plain.digest == followed.digest
    assert followed.runtime.tracking.wandb is not None
    assert followed.runtime.tracking.wandb.project == "echoes"


def test_scalars_are_numbers_alone():
    record = {
        "kind": "train",
        "step": 3,
        "a": {"b": 1, "c": None, "d": "x"},
        "e": [1],
        "f": float("nan"),
        "g": True,
    }
    assert scalars(record) == {"train/a/b": 1.0, "train/g": 1.0}


@pytest.mark.filterwarnings("default")  # the package's own
def test_weights_and_biases_keeps_one_run_over_resumes(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("wandb", reason="its extra isn't in the development environment")
    monkeypatch.setenv("WANDB_MODE", "offline")
    plan = compile_experiment(tracked(toy, "wandb: {project: echoes, tags: [toy]}", FEW_SAVES))
    with pytest.raises(Killed):
        train(plan, tmp_path / "run", on_event=kill_at("train", 3))
    first = json.loads((tmp_path / "run/wandb.json").read_text())
    assert first["sent"] == {"warm_start": 4, "train": 3, "eval": 2}
    train(plan, tmp_path / "run", resume=True)
    last = json.loads((tmp_path / "run/wandb.json").read_text())
    assert last == {"id": first["id"], "sent": {"warm_start": 4, "train": 4, "eval": 4}}
    files = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(first["id"] in file.name for file in files)
    history = [row for file in files for row in wandb_history(file)]
    for kind, records in recorded(RunDir(tmp_path / "run").path).items():
        for tag, points in records.items():
            shown = [(int(row[f"{kind}/step"]), row[tag]) for row in history if tag in row]
            assert shown == points or "/time/" in tag, tag  # a step done again takes another time


def wandb_history(file: Path) -> list[dict[str, float]]:
    """The rows of an offline run's file: records in LevelDB's log format behind 7 bytes of header."""
    pb: Any = import_module("wandb.proto.wandb_internal_pb2")
    data, at, parts, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's end is padded
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or a last part
            record = pb.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows
