"""Whole runs of a toy team: they learn, repeat, stop, resume bit for bit, and refuse to do nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.runtime import checkpoints
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, RunDir, StopFlag, read_metrics

Toy = Callable[..., Path]
WARM_START = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, optimizer states too."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found |= {f"{name}:{key}": value for key, value in load_file(file).items()}
        elif file.suffix == ".pt":
            found |= {f"{name}:{k}": v for k, v in _tensors(torch.load(file, weights_only=True))}
    assert found
    return found


def _tensors(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [pair for key, inner in items for pair in _tensors(inner, f"{path}/{key}")]


def same(a: Path, b: Path) -> bool:
    mine, theirs = weights(a), weights(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def metrics(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, without what depends on the clock."""
    return [
        {k: v for k, v in record.items() if k != "time"} for record in read_metrics(out / "metrics.jsonl")
    ]


def trace_rows(out: Path) -> list[tuple[Any, ...]]:
    """The trace's turns: what was said, and what it was paid."""
    with closing(sqlite3.connect(out / "trace.sqlite")) as db:
        return db.execute("SELECT * FROM turns ORDER BY 1").fetchall()


def last(out: Path) -> Path:
    found = checkpoints.latest(out / "checkpoints")
    assert found is not None
    return found


def stop_at(kind: str, number: int) -> tuple[StopFlag, Callable[[str, dict[str, Any]], None]]:
    """A stop that is asked for when the n-th event of a kind is told."""
    stop, seen = StopFlag(), [0]

    def on_event(event: str, facts: dict[str, Any]) -> None:
        seen[0] += event == kind
        stop.requested = stop.requested or (event == kind and seen[0] == number)

    return stop, on_event


def test_a_run_leaves_what_machines_rely_on(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy())
    out = tmp_path / "run"
    result = train(plan, out)
    assert result["steps"] == 4
    assert result["eval_before"]["headline"] == "echoed"
    assert set(result["eval_after"]["roles"]) == {"caller", "echoer"}
    assert "called" in result["eval_after"]["roles"]["caller"]
    for name in ("plan.json", "metrics.jsonl", "trace.sqlite", "base", "tokens"):
        assert (out / name).exists(), name
    kinds = [record["kind"] for record in metrics(out)]
    assert kinds == ["warm_start"] * 4 + ["eval"] + ["train"] * 4 + ["eval"]


def test_equal_seeds_give_equal_metrics_and_weights_and_another_seed_does_not(toy: Toy, tmp_path: Path):
    experiment = toy()
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        train(compile_experiment(experiment, overrides={"train.seed": seed}), tmp_path / name)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert same(last(tmp_path / "a"), last(tmp_path / "b"))
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


# Where a run can be stopped: inside the warm start, in the evaluation after it, while sampling (stage 1 of
# 8), between the update of a step (stage 7) and its end, where the weights have moved already, at a step
# whose rows reach over an epoch's end (5 rows, 3 a step: steps 2 and 4), and after the last step.
STOPS = [
    ("warm_start", 2),
    ("warm_start", 4),
    ("eval_progress", 1),
    ("train", 1),
    ("stage", 7),
    ("stage", 8),
    ("stage", 9),
    ("stage", 15),
    ("train", 2),
    ("train", 4),
]


@pytest.fixture(scope="module")
def whole(toy_at: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that was never stopped."""
    root = tmp_path_factory.mktemp("whole")
    train(compile_experiment(toy_at(root / "toy")), root / "run")
    return root / "run"


@pytest.mark.parametrize(("kind", "number"), STOPS)
def test_a_stopped_run_resumes_to_the_weights_of_one_that_never_stopped(
    toy: Toy, whole: Path, tmp_path: Path, kind: str, number: int
):
    """Row of FIELD_PROBLEMS, Runtime: resume is tested at every boundary."""
    rarely = {"train.save_every": "3"}  # so that the stop itself has to write the checkpoint
    plan = compile_experiment(toy(), overrides=rarely if kind == "stage" else {})
    stop, on_event = stop_at(kind, number)
    with pytest.raises(Interrupted):
        train(plan, tmp_path / "parts", on_event=on_event, stop=stop)
    train(plan, tmp_path / "parts", resume=True)
    assert metrics(tmp_path / "parts") == metrics(whole)
    assert same(last(tmp_path / "parts"), last(whole))
    assert trace_rows(tmp_path / "parts") == trace_rows(whole)


def test_a_run_that_died_before_its_first_checkpoint_begins_again_in_its_folder(
    toy: Toy, whole: Path, tmp_path: Path
):
    plan = compile_experiment(toy())

    def die(kind: str, facts: dict[str, Any]) -> None:
        if kind == "warm_start" and facts["step"] == 2:
            raise MemoryError

    with pytest.raises(MemoryError):
        train(plan, tmp_path / "run", on_event=die)
    train(plan, tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(whole)
    assert same(last(tmp_path / "run"), last(whole))


def test_adapters_on_a_made_base_resume_bit_for_bit_from_inside_the_warm_start(toy: Toy, tmp_path: Path):
    lora = "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 2}, adapters: per_role}}}"
    plan = compile_experiment(toy(("mapping: {models: {policy: {roles: rest}}}", lora)))
    train(plan, tmp_path / "whole")
    for kind, number in (("warm_start", 2), ("train", 2)):
        stop, on_event = stop_at(kind, number)
        with pytest.raises(Interrupted):
            train(plan, tmp_path / kind, on_event=on_event, stop=stop)
        train(plan, tmp_path / kind, resume=True)
        assert metrics(tmp_path / kind) == metrics(tmp_path / "whole")
        assert same(last(tmp_path / kind), last(tmp_path / "whole"))


def test_a_finished_run_that_is_resumed_does_nothing_and_says_so(toy: Toy, tmp_path: Path):
    """Row of FIELD_PROBLEMS, Runtime: resume at an epoch boundary exits 0 having trained nothing."""
    plan = compile_experiment(toy())
    train(plan, tmp_path / "run")
    with pytest.raises(RunError, match="4 of 4 steps"):
        train(plan, tmp_path / "run", resume=True)
    longer = compile_experiment(toy(), overrides={"train.steps": "5"})
    assert train(longer, tmp_path / "run", resume=True)["steps"] == 5


def test_a_run_of_zero_steps_is_an_error(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy(), overrides={"train.steps": "0"})
    with pytest.raises(RunError, match="would do nothing"):
        train(plan, tmp_path / "run")


def test_a_used_folder_is_refused_without_resume_and_an_empty_one_with_it(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy(), overrides={"train.steps": "1"})
    with pytest.raises(RunError, match="no run to resume"):
        train(plan, tmp_path / "run", resume=True)
    train(plan, tmp_path / "run")
    with pytest.raises(RunError, match="holds a run already"):
        train(plan, tmp_path / "run")


def test_two_runs_never_share_a_folder(tmp_path: Path):
    with RunDir(tmp_path / "run").held(), pytest.raises(RunError, match=f"process {os.getpid()}"):
        RunDir(tmp_path / "run").held().__enter__()
    with RunDir(tmp_path / "run").held():
        pass


def test_a_checkpoint_of_another_plan_is_refused_with_the_difference(toy: Toy, tmp_path: Path):
    train(compile_experiment(toy(), overrides={"train.steps": "1"}), tmp_path / "run")
    other = compile_experiment(toy(), overrides={"train.steps": "2", "train.optimizer.lr": "0.5"})
    with pytest.raises(RunError, match=r"optimizer\.lr of policy 'policy': 0\.01 -> 0\.5"):
        train(other, tmp_path / "run", resume=True)


def test_patience_ends_a_run_in_which_no_group_can_be_learned_from(toy: Toy, tmp_path: Path):
    """Row of FIELD_PROBLEMS, Silent failures: "my loss is 0"; a trainable agent yields no samples."""
    constant = (('use: "echo.py:echoed", otherwise: 0', 'use: "flat.py:flat", otherwise: 1'),)
    experiment = toy(("steps: 4, tasks", "steps: 9, patience: 3, tasks"), workflow=constant)
    (experiment.parent / "flat.py").write_text("def flat(said: str, answer: str) -> float:\n    return 1.0\n")
    with pytest.raises(
        RunError, match=r"3 steps in a row no group was learnable: every turn got the same reward, 1"
    ):
        train(compile_experiment(experiment), tmp_path / "run")
    assert checkpoints.read_state(last(tmp_path / "run")).step == 3


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "say {{",
            f"say {'red ' * 70}{{{{",
            r"no turn has a reward; episodes: 12 prompt_too_long \(node call: prompt of 7\d tokens",
        ),
        (
            "rewards:",
            "outcomes: {truncated: drop_episode}\nrewards:",
            r"no turn can be trained on; episodes: 12 ok; turns: 24 truncated",
        ),
    ],
)
def test_patience_says_how_the_episodes_ended_when_none_of_their_turns_train(
    toy: Toy, tmp_path: Path, old: str, new: str, reason: str
):
    plan = compile_experiment(
        toy((WARM_START, ""), workflow=((old, new),)), overrides={"train.patience": "1", "train.seed": "1"}
    )
    with pytest.raises(RunError, match=f"1 steps in a row no group was learnable: {reason}"):
        train(plan, tmp_path / "run")


def test_a_run_of_frozen_models_is_an_error(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy((WARM_START, ""), ("{roles: rest}", "{roles: rest, train: frozen}")))
    with pytest.raises(RunError, match=r"(?s)every model is frozen.*masflow eval"):
        train(plan, tmp_path / "run")
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_trainable_role_that_never_speaks_ends_the_run(toy: Toy, tmp_path: Path):
    """Row of FIELD_PROBLEMS, Silent failures: a trainable agent yields no samples, only a warning."""
    silent = (
        ("echo: {role: echoer}", "echo: {role: echoer, when: \"word == 'nothing'\"}"),
        ('args: {said: "{{ echo.text }}"', 'args: {said: "{{ call.text }}"'),
        ('output: {said: "{{ echo.text }}"}', 'output: {said: "{{ call.text }}"}'),
    )
    experiment = toy(("steps: 4, tasks", "steps: 9, patience: 2, tasks"), (WARM_START, ""), workflow=silent)
    with pytest.raises(RunError, match="'echoer' had no trainable turn: it never speaks"):
        train(compile_experiment(experiment), tmp_path / "run")


def test_the_first_non_finite_value_ends_the_run_and_names_the_turns(toy: Toy, tmp_path: Path):
    """Row of FIELD_PROBLEMS, Silent failures: NaN, then "!!!!" for ever."""
    plan = compile_experiment(
        toy(), overrides={"train.optimizer.lr": "1e30", "train.optimizer.max_grad_norm": "1e30"}
    )
    with pytest.raises(RunError, match=r"(?i)non-finite"):
        train(plan, tmp_path / "run")


def test_replies_that_are_nearly_all_cut_are_warned_of_before_the_first_update(toy: Toy, tmp_path: Path):
    """Row of FIELD_PROBLEMS, Silent failures: the default generation limit truncates nearly all replies."""
    plan = compile_experiment(toy((WARM_START, "")), overrides={"train.steps": "1"})
    told: list[tuple[str, str]] = []
    train(plan, tmp_path / "run", on_event=lambda kind, facts: told.append((kind, str(facts.get("message")))))
    probes = [i for i, (kind, text) in enumerate(told) if kind == "warning" and "length probe" in text]
    assert probes and probes[0] < next(i for i, (kind, _) in enumerate(told) if kind == "train")


def test_init_starts_from_an_earlier_runs_weights_instead_of_a_warm_start(toy: Toy, tmp_path: Path):
    train(compile_experiment(toy()), tmp_path / "first")
    started = compile_experiment(
        toy(("eval: {samples: 1}", f"init: {tmp_path}/first@2\neval: {{samples: 1}}"))
    )
    train(started, tmp_path / "second")
    kinds = [record["kind"] for record in metrics(tmp_path / "second")]
    assert kinds == ["eval"] + ["train"] * 4 + ["eval"]
    wanted = load_file(next((tmp_path / "first/checkpoints/step_000002").rglob("*.safetensors")))
    given = load_file(next((tmp_path / "second/checkpoints/step_000000").rglob("*.safetensors")))
    assert all(torch.equal(wanted[name], given[name]) for name in wanted)


def test_checkpoints_are_retained_by_rule(toy: Toy, tmp_path: Path):
    plan = compile_experiment(toy(("keep: 8", "keep: 1")), overrides={"train.steps": "4"})
    train(plan, tmp_path / "run")
    names = [p.name for p in checkpoints.listed(tmp_path / "run" / "checkpoints")]
    assert names == ["step_000000", "step_000003", "step_000004"]


def test_a_torn_file_of_a_checkpoint_is_told_and_the_one_before_it_still_serves(
    toy: Toy, whole: Path, tmp_path: Path
):
    plan, shorter = (compile_experiment(toy(), overrides={"train.steps": n}) for n in ("4", "3"))
    out = tmp_path / "run"
    train(shorter, out)
    for pattern in ("*.safetensors", "*.optimizer.pt", "random.pt"):
        torn = next(last(out).rglob(pattern))
        sound = torn.read_bytes()
        torn.write_bytes(sound[: len(sound) // 2])
        with pytest.raises(
            RunError, match=r"(?s)can't be read: .*step_000003/.*remove that checkpoint's folder"
        ):
            train(plan, out, resume=True)
        torn.write_bytes(sound)
    shutil.rmtree(last(out))
    train(plan, out, resume=True)
    assert same(last(out), last(whole))


def test_metrics_that_were_lost_or_spoilt_are_told_before_a_run_goes_on(
    toy: Toy, whole: Path, tmp_path: Path
):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    plan = compile_experiment(toy(), overrides={"train.steps": "5"})
    sound = (out / "metrics.jsonl").read_bytes()
    for spoilt in (
        b"",
        sound[:300],
        b"xx" + sound[2:],
        b"\xff" + sound[1:],
        b"[]" + sound[sound.index(b"\n") :],
    ):
        (out / "metrics.jsonl").write_bytes(spoilt)
        with pytest.raises(RunError, match=r"metrics\.jsonl(:1 isn't a record| has \d+ bytes, and had)"):
            train(plan, out, resume=True)
    (out / "metrics.jsonl").write_bytes(sound + b'{"kind": "tr')
    train(plan, out, resume=True)
    assert [r["step"] for r in metrics(out) if r["kind"] == "train"] == [1, 2, 3, 4, 5]


def test_a_plan_or_token_trace_that_is_spoilt_is_told(toy: Toy, whole: Path, tmp_path: Path):
    plan = compile_experiment(toy(), overrides={"train.steps": "5"})
    for name, text in (("plan.json", "[]"), ("plan.json", "{"), ("tokens/policy.sqlite", "spoilt" * 999)):
        out = tmp_path / f"{len(text)}"
        shutil.copytree(whole, out)
        (out / name).write_text(text)
        with pytest.raises(RunError, match=rf"{name}.*(can't be read|not a database)"):
            train(plan, out, resume=True)


def test_a_full_disk_ends_the_run_with_what_is_saved(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = compile_experiment(toy())
    real = RunDir.append

    def append(self: RunDir, record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 3:
            with checkpoints.writing("metrics.jsonl", self.path):
                raise OSError(28, "No space left on device")
        real(self, record)

    monkeypatch.setattr(RunDir, "append", append)
    with pytest.raises(RunError, match=r"No space left on device; saved so far: .*step_000002"):
        train(plan, tmp_path / "run")


COMMAND = "import sys; from masflow.cli import main; sys.argv[0] = 'masflow'; main()"


def start(experiment: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", COMMAND, "train", str(experiment), "--out", str(out), *more]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=experiment.parent
    )


def wait_for_step(out: Path, process: subprocess.Popen[str], step: int) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        records = read_metrics(out / "metrics.jsonl")
        if any(record["kind"] == "train" and record["step"] >= step for record in records):
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate(timeout=10))


def test_a_killed_process_and_an_interrupted_one_resume_to_the_same_weights(toy: Toy, tmp_path: Path):
    """kill -9 leaves no lock behind; Ctrl-C ends with a checkpoint and exit code 130."""
    experiment = toy(("train: {steps: 4", "train: {steps: 40"), ("save_every: 1", "save_every: 3"))
    train(compile_experiment(experiment), tmp_path / "whole")
    out = tmp_path / "run"
    killed = start(experiment, out)
    wait_for_step(out, killed, 5)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    interrupted = start(experiment, out, "--resume")
    wait_for_step(out, interrupted, 10)
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130, errors
    assert "Traceback" not in errors
    train(compile_experiment(experiment), out, resume=True)
    assert metrics(out) == metrics(tmp_path / "whole")
    assert same(last(out), last(tmp_path / "whole"))
