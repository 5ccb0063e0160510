"""On Ray a served role is asked from the hub, which alone holds the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics

KEY = "sk-very-secret-0123456789abcdef"


def test_a_role_learns_on_ray_beside_one_that_a_server_plays(
    ray_up: None, toy, chat_server, says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ECHO_KEY", KEY)
    chat_server.reply = lambda body: says(body["messages"][-1]["content"].split()[-1])
    served = f"big: {{roles: rest, endpoint: {{url: '{chat_server.url}', key_env: ECHO_KEY}}, model: echo-1}}"
    plan = compile_experiment(
        toy(
            (
                "mapping: {models: {policy: {roles: rest}}}",
                f"mapping: {{models: {{own: {{roles: [caller]}}, {served}}}}}",
            ),
            ("steps: 4, tasks", "steps: 2, tasks"),
            ("algorithm:", "runtime: {backend: ray, deterministic: false, threads: 1}\nalgorithm:"),
        )
    )
    assert train(plan, tmp_path / "run")["steps"] == 2
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["served"]["big"]["replies"] for r in records] == [12, 12]
    assert set(chat_server.keys) == {f"Bearer {KEY}"}
    files = [f for f in (tmp_path / "run").rglob("*") if f.is_file()]
    assert not [f for f in files if KEY.encode() in f.read_bytes()]
