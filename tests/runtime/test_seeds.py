"""Seeds together: intervals against published tables, a seed that fails, a set that was interrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.errors import RunError
from masflow.runtime import launch as launching
from masflow.runtime.launch import launch
from masflow.runtime.rundir import Interrupted, StopFlag
from masflow.runtime.seeds import SeedResult, summary, summary_text, t_interval, t_quantile

Toy = Callable[..., Path]
ONE_STEP = (("steps: 4, tasks", "steps: 1, tasks"), ("steps: 4, batch: 4", "steps: 1, batch: 4"))


def result(before: float | None, after: float | None, steps: int = 3) -> dict[str, Any]:
    def found(score: float | None) -> dict[str, Any] | None:
        return None if score is None else {"headline": "f1", "metrics": {"f1": score}}

    return {"steps": steps, "eval_before": found(before), "eval_after": found(after), "out": "x"}


@pytest.mark.parametrize(
    ("freedom", "published"),
    # Two-sided 95 % points of Student's t, from the tables of any textbook of statistics.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (29, 2.045), (120, 1.980)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom: int, published: float):
    assert t_quantile(freedom) == pytest.approx(published, abs=6e-4)


def test_an_interval_by_hand():
    # mean 2, sd 1, standard error 1/√3, t with 2 degrees of freedom 4.3027
    low, high = t_interval([1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert (low, high) == (
        pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-4),
        pytest.approx(4.4842, abs=1e-4),
    )
    assert t_interval([0.7]) is None
    assert t_interval([0.5, 0.5]) == (0.5, 0.5)


def test_a_summary_pairs_before_and_after_and_leaves_failed_seeds_out_of_its_means(tmp_path: Path):
    seeds = [
        SeedResult(3, tmp_path / "seed_3", result(0.1, 0.5)),
        SeedResult(4, tmp_path / "seed_4", error="a non-finite loss"),
        SeedResult(5, tmp_path / "seed_5", result(0.3, 0.9)),
    ]
    found = summary(seeds, tmp_path)
    assert found["eval_after"]["seeds"] == [0.5, 0.9] and found["eval_after"]["mean"] == pytest.approx(0.7)
    assert found["gain"]["seeds"] == [pytest.approx(0.4), pytest.approx(0.6)]
    assert [(one["seed"], one["after"], one["error"]) for one in found["seeds"]] == [
        (3, 0.5, None),
        (4, None, "a non-finite loss"),
        (5, 0.9, None),
    ]
    text = summary_text(found)
    assert "held out after:  0.700 ± 0.283 sd, 95 % interval -1.841 to 3.241   (0.500 0.900)" in text
    assert text.endswith("seed 4 failed: a non-finite loss")
    alone = summary_text(summary(seeds[:1], tmp_path))
    assert "held out after:  0.500   (0.500)" in alone and "interval" not in alone


def test_a_failing_seed_stops_no_other_and_resume_does_it_alone(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    experiment, out = toy(*ONE_STEP), tmp_path / "set"
    (out / "seed_1").mkdir(parents=True)
    (out / "seed_1/trace.sqlite").mkdir()  # the second seed can't write its trace
    with pytest.raises(RunError, match=r"1 of 3 seeds failed: 1; the others are done") as caught:
        launch(experiment, None, None, {}, out, False, seeds=3)
    assert f"--resume --out {out}" in caught.value.fix
    said = capsys.readouterr()
    assert "seed 1 failed: " in said.err and "trace.sqlite" in said.err and "seed 1 failed: " in said.out
    kept = json.loads((out / "seeds.json").read_text())
    assert [one["error"] is None for one in kept["seeds"]] == [True, False, True]
    assert len(kept["eval_after"]["seeds"]) == 2 and (out / "curves.svg").exists()
    with pytest.raises(RunError, match="seed_0 holds a run already"):
        launch(experiment, None, None, {}, out, False, seeds=3)
    (out / "seed_1/trace.sqlite").rmdir()
    before = (out / "seed_2/metrics.jsonl").stat().st_mtime_ns
    assert len(launch(experiment, None, None, {}, out, True, seeds=3)) == 3
    assert (out / "seed_2/metrics.jsonl").stat().st_mtime_ns == before
    again = json.loads((out / "seeds.json").read_text())
    assert again["seeds"][0] == kept["seeds"][0] and len(again["eval_after"]["seeds"]) == 3


def test_a_set_that_is_interrupted_goes_on_with_its_folder(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    experiment, out, train = toy(*ONE_STEP), tmp_path / "set", launching.train

    def stopping(plan: Any, place: Path, *words: Any, **options: Any) -> dict[str, Any]:
        stop = StopFlag()
        stop.requested = plan.train.seed == 1
        return train(plan, place, *words, **options, stop=stop)

    monkeypatch.setattr(launching, "train", stopping)
    with pytest.raises(
        Interrupted, match=rf"in seed 1; continue with the same words and --resume --out {out}"
    ):
        launch(experiment, None, None, {}, out, False, seeds=2)
    assert len(json.loads((out / "seeds.json").read_text())["seeds"]) == 1
    monkeypatch.setattr(launching, "train", train)
    assert len(launch(experiment, None, None, {}, out, True, seeds=2)) == 2
