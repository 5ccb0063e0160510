"""Rewards in whole runs: a frozen model judges, and slow rewards are computed while episodes still play."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.models.weights import checksum
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

Toy = Callable[..., Path]
SHARED = "mapping: {models: {policy: {roles: rest}}}"
WARM = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}"
LIKED, DISLIKED = ("red", "green", "blue"), ("white", "black")
JUDGED = (
    ("echoer: {prompt", 'critic: {prompt: "hear {{ said }}", reply: {max_tokens: 3}}\n  echoer: {prompt'),
    (
        "rewards:\n",
        'rewards:\n  - {name: liked, use: "role:critic", args: {said: "{{ call.text }}"}, weight: 2}\n',
    ),
)


def taught(toy: Toy, *changes: tuple[str, str], workflow: tuple[tuple[str, str], ...] = ()) -> Path:
    """The toy project, whose demonstrations answer yes to words that are liked and no to others."""
    experiment = toy(*changes, workflow=workflow)
    words = ["say hear yes no pink grey brown", *LIKED, *DISLIKED]
    rows = [
        {
            "task": {"word": word, "answer": word},
            "turns": [
                {"node": "call", "reply": word},
                {"node": "echo", "reply": "yes" if word in LIKED else "no"},
            ],
        }
        for word in (*LIKED, *DISLIKED)
    ]
    (experiment.parent / "words.jsonl").write_text(json.dumps({"text": " ".join(words)}) + "\n")
    (experiment.parent / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return experiment


def weights(run: Path, step: int, model: str) -> str:
    return checksum(load_file(run / f"checkpoints/step_{step:06d}/models/{model}/{model}.safetensors"))


def test_a_frozen_model_of_an_earlier_run_judges_and_stands_still(toy: Toy, tmp_path: Path) -> None:
    """It has learned what it likes; the number that it says is what the caller is paid."""
    more = WARM.replace("steps: 4", "steps: 80").replace("lr: 5.0e-3", "lr: 2.0e-2")
    one = ("steps: 4, tasks", "steps: 1, tasks")
    train(compile_experiment(taught(toy, (WARM, more), one)), tmp_path / "school")
    init = f'init: "{tmp_path}/school@0"'
    mapping = f"""mapping:
  models:
    own: {{roles: [caller], {init}}}
    judge: {{roles: [critic], train: frozen, {init}}}
    other: {{roles: rest}}"""
    experiment = taught(toy, (SHARED, mapping), (WARM, ""), workflow=JUDGED)
    out = tmp_path / "run"
    train(compile_experiment(experiment), out)
    with closing(sqlite3.connect(out / "trace.sqlite")) as db:
        said = db.execute(
            "SELECT turns.text, rewards.value FROM rewards JOIN turns USING (step, split, trajectory)"
            " WHERE rewards.name = 'liked' AND turns.role = 'caller'"
        ).fetchall()
    told = [(text, value) for text, value in said if text in (*LIKED, *DISLIKED)]
    assert len(told) > 30 and {value for _, value in told} == {0.0, 1.0}
    assert all(value == float(text in LIKED) for text, value in told)
    school = weights(tmp_path / "school", 0, "policy")
    assert weights(out, 4, "judge") == school and weights(out, 0, "own") == school
    assert weights(out, 4, "own") != school
    records = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    assert all("judge" not in record["policies"] for record in records)


BEGINS = '''
import os

def echoed(said, answer):
    """Says where it is asked that it has begun."""
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "begun")
    open(place, "a").close()
    return 0.1 * (len(said) % 2)
'''


def test_rewards_begin_while_other_episodes_still_play(
    toy: Toy, chat_server: Any, says: Any, tmp_path: Path
) -> None:
    """The server answers one episode of twelve, and the others when that one's reward has begun."""
    mapping = f"""mapping:
  models:
    own: {{roles: [caller]}}
    big: {{roles: rest, endpoint: "{chat_server.url}", model: echo-1}}"""
    runtime = "runtime: {deterministic: false, threads: 1}\nalgorithm:"
    short = ("steps: 4, tasks", "steps: 1, tasks")
    experiment = toy(
        (SHARED, mapping),
        ("algorithm:", runtime),
        short,
        ("data: {train: tasks.jsonl, eval: held_out.jsonl}", "data: {train: tasks.jsonl}"),
        ("eval: {samples: 1}\n", ""),
    )
    (experiment.parent / "echo.py").write_text(BEGINS)
    begun = experiment.parent / "begun"
    held: list[int] = []

    def reply(_: Any) -> Any:
        return says("red", after_s=0.0 if len(chat_server.bodies) == 12 else 60.0)

    def look() -> None:
        while not begun.exists():
            if over.wait(0.02):
                return
        held.append(chat_server._now)
        chat_server.released.set()

    over = threading.Event()
    chat_server.reply = reply
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        train(compile_experiment(experiment), tmp_path / "run")
    finally:
        over.set()
        watcher.join()
    assert held == [11]
