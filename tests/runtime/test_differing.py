"""A checkpoint of another plan is refused in words of the documents, one thing a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment, dump_plan
from masflow.errors import RunError
from masflow.runtime.controller import train
from masflow.runtime.differing import told
from masflow.runtime.resuming import refuse_other_plan
from masflow.runtime.rundir import RunDir

Toy = Callable[..., Path]
SHARED = "{models: {policy: {roles: rest}}}"
ONE_STEP = ("steps: 4, tasks", "steps: 1, tasks")


def edited(experiment: Path, name: str, old: str, new: str) -> None:
    file = experiment.parent / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.fixture(scope="module")
def run(toy_at: Toy, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    root = tmp_path_factory.mktemp("differing")
    train(compile_experiment(toy_at(root / "toy", ONE_STEP)), root / "run")
    return RunDir(root / "run")


@pytest.mark.parametrize(
    ("changes", "workflow", "edit", "lines"),
    [
        (
            (),
            (("say {{ word }}", "please say {{ word }}"),),
            None,
            ['prompt of role \'caller\': "say {{ word }}" -> "please say {{ word }}"'],
        ),
        (
            (),
            (),
            ("echo.py", "0.1 *", "0.2 *"),
            ["the code of reward 'echoed' changed", "the code of reward 'called' changed"],
        ),
        ((("lr: 1.0e-2", "lr: 2.0e-2"),), (), None, ["optimizer.lr of policy 'policy': 0.01 -> 0.02"]),
        ((), (), ("tasks.jsonl", "red", "pink"), ["the rows of 'tasks' in data.train changed"]),
        ((), (), ("demos.jsonl", "red", "pink"), ["the rows of 'demos' in warm_start.data changed"]),
        (
            (("train: tasks.jsonl", "train: [tasks.jsonl, held_out.jsonl]"),),
            (),
            None,
            ["'held_out' in data.train: only in this plan"],
        ),
        (
            ((SHARED, "{models: {own: {roles: rest, per: role}}}"),),
            (),
            None,
            [
                "model 'policy': only in the run",
                "model 'own.caller': only in this plan",
                "model 'own.echoer': only in this plan",
                'role \'caller\' is played by: "policy" -> "own.caller"',
                'role \'echoer\' is played by: "policy" -> "own.echoer"',
            ],
        ),
        (
            (("hidden_size: 16", "hidden_size: 32"),),
            (),
            None,
            ["base.config.hidden_size of model 'policy': 16 -> 32"],
        ),
        (
            (),
            (),
            ("words.jsonl", "say", "shout"),
            ["the base of model 'policy': its files or settings changed"],
        ),
        ((("seed: 0", "seed: 3"),), (), None, ["train.seed: 0 -> 3"]),
        ((), (("weight: 0,", "weight: 0.5,"),), None, ["weight of reward 'called': 0.0 -> 0.5"]),
        (
            (),
            (
                ("echo: {role: echoer}}", "echo: {role: echoer}, again: {role: echoer}}"),
                ("-> echo -> end]", "-> echo -> again -> end]"),
            ),
            None,
            ["edges out of node 'echo': end -> again", "node 'again': only in this plan"],
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_what_differs_is_named(
    toy_at: Toy,
    tmp_path: Path,
    run: RunDir,
    changes: tuple[tuple[str, str], ...],
    workflow: tuple[tuple[str, str], ...],
    edit: tuple[str, str, str] | None,
    lines: list[str],
):
    experiment = toy_at(tmp_path / "toy", ONE_STEP, *changes, workflow=workflow)
    if edit is not None:
        edited(experiment, *edit)
    plan = compile_experiment(experiment)
    with pytest.raises(RunError) as caught:
        refuse_other_plan(plan, run)
    assert [line.strip() for line in caught.value.message.splitlines()[1:]] == lines
    assert str(run.path) in caught.value.message and "init:" in caught.value.fix


def test_more_steps_another_place_and_another_runtime_are_the_same_plan(
    toy_at: Toy, tmp_path: Path, run: RunDir
):
    moved = toy_at(tmp_path / "moved", ("train: {steps: 4,", "train: {steps: 9, keep_every: 3,"))
    edited(moved, "toy.yaml", "base:", "runtime: {tracking: {tensorboard: true}}\nbase:")
    plan = compile_experiment(moved)
    refuse_other_plan(plan, run)
    assert told(json.loads(dump_plan(plan)), json.loads(run.plan.read_text())) == []


def test_long_texts_are_shown_where_they_differ(toy_at: Toy, tmp_path: Path, run: RunDir):
    long = "x" * 200
    first, second = (
        compile_experiment(
            toy_at(tmp_path / end, workflow=(("say {{ word }}", f"{long}{end} {{{{ word }}}}"),))
        )
        for end in ("one", "two")
    )
    [line] = told(*(json.loads(dump_plan(plan)) for plan in (second, first)))
    assert line.startswith("prompt of role 'caller': ") and len(line) < 160
    assert "xone" in line and "xtwo" in line
