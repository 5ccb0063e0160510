"""A run whose team searches at servers: it repeats bit for bit whichever server answers, however late."""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics
from tests.tools.search_server import Says, Server, passages

Toy = Callable[..., Path]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Two that give the same passages, late by chance; the second one fails now and then."""
    chance = random.Random(5)

    def answer(asked: dict[str, Any]) -> Says:
        time.sleep(chance.random() * 0.01)
        return passages(asked["body"]["query"].split(" ")[0] or "red")

    def fails(asked: dict[str, Any]) -> Says:
        return Says({"error": "busy"}, status=503) if chance.random() < 0.2 else answer(asked)

    found = [Server(answer), Server(fails)]
    yield found
    for server in found:
        server.shutdown()
        server.server_close()


def searching(toy: Toy, servers: list[Server], at_once: int) -> Path:
    """The toy team, with a search between its two roles."""
    urls = ", ".join(f'"{server.url}"' for server in servers)
    tool = f"tools: {{search: {{use: http, urls: [{urls}], rest_s: 0.01, at_once: {at_once}}}}}\n"
    return toy(
        workflow=(
            ("nodes: {call: {role: caller}, ", tool + "nodes: {call: {role: caller}, "
             'find: {tool: search, args: {query: "{{ call.text }}"}}, '),
            ("call -> echo", "call -> find -> echo"),
            ("hear {{ call.text }}", "hear {{ find.text }}"),
        )
    )  # fmt: skip


def run(experiment: Path, out: Path) -> tuple[list[dict[str, Any]], list[Any], dict[str, Any]]:
    """Metrics without the clock, turns, weights: what a run leaves."""
    train(compile_experiment(experiment), out)
    records = read_metrics(out / "metrics.jsonl")
    with closing(sqlite3.connect(out / "trace.sqlite")) as db:
        turns = db.execute("SELECT * FROM turns ORDER BY 1").fetchall()
    (saved,) = out.glob("checkpoints/step_000004/models/policy/policy.safetensors")
    return [{k: v for k, v in r.items() if k != "time"} for r in records], turns, load_file(saved)


def test_a_run_repeats_bit_for_bit_whichever_server_answers(toy: Toy, tmp_path: Path, servers: list[Server]):
    first = run(searching(toy, servers, 8), tmp_path / "first")
    asked = [len(server.asked) for server in servers]
    assert min(asked) > 10 and max(server.most for server in servers) > 1  # several at once, at both
    again = run(searching(toy, servers, 1), tmp_path / "again")  # one after another
    assert first[:2] == again[:2]
    assert all((first[2][name] == again[2][name]).all() for name in first[2])
    assert threading.active_count() < 100
