"""Teams in which a server plays a role: trained beside it, judged by it, stopped, resumed; no key leaks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.runtime import trial
from masflow.runtime.controller import train
from masflow.runtime.progress import Display
from masflow.runtime.rundir import Interrupted, read_metrics
from masflow.runtime.team import Team

KEY = "sk-very-secret-0123456789abcdef"
WARM = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}"
SHARED = "mapping: {models: {policy: {roles: rest}}}"


@pytest.fixture(autouse=True)
def the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("ECHO_KEY", KEY)


@pytest.fixture
def served(toy, chat_server, says):
    """`served(*changes, **endpoint)`: the toy team whose echoer a server plays; it repeats what it hears."""
    chat_server.reply = lambda body: says(body["messages"][-1]["content"].split()[-1])

    def make(*changes, workflow=(), **endpoint: Any):
        fields = {"url": chat_server.url, "key_env": "ECHO_KEY", **endpoint}
        shown = ", ".join(f"{k}: {'null' if v is None else v}" for k, v in fields.items())
        mapping = f"""mapping:
  models:
    own: {{roles: [caller]}}
    big: {{roles: rest, endpoint: {{{shown}}}, model: echo-1}}"""
        return toy((SHARED, mapping), *changes, workflow=workflow)

    return make


def test_a_role_learns_beside_one_that_a_server_plays_and_the_key_is_nowhere(
    served, chat_server, tmp_path: Path, capfd
):
    experiment = served()
    plan = compile_experiment(experiment)
    out = tmp_path / "run"
    with Display(4, 4) as display:
        result = train(plan, out, on_event=display, experiment_text=experiment.read_text())
    assert result["steps"] == 4
    records = [r for r in read_metrics(out / "metrics.jsonl") if r["kind"] == "train"]
    assert {"caller", "echoer"} == set(records[0]["roles"])
    assert set().union(*(r["policies"] for r in records)) == {"own"}
    assert records[0]["roles"]["echoer"]["reply_tokens"] == 1.0
    for used in (record["served"]["big"] for record in records):
        assert used.pop("prompt_tokens") >= 2 * 12  # 3 tasks x 4 samples of at least two words
        assert used == {"replies": 12, "errors": 0, "reply_tokens": 12, "tries": 12}
    assert set(chat_server.keys) == {f"Bearer {KEY}"}
    told = capfd.readouterr()
    assert "big: echo-1 at http://127.0.0.1" in told.err
    assert KEY not in told.out + told.err
    files = [f for f in out.rglob("*") if f.is_file()]
    assert any(f.name == "trace.sqlite" for f in files) and any(f.name == "plan.json" for f in files)
    assert not [f for f in files if KEY.encode() in f.read_bytes()]


def test_requests_go_to_the_server_as_they_come(served, chat_server, tmp_path: Path):
    """Without barriers; the server's replies come back in any order."""
    plan = compile_experiment(
        served(("algorithm:", "runtime: {deterministic: false, threads: 1}\nalgorithm:"))
    )
    assert train(plan, tmp_path / "run")["steps"] == 4
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["outcomes"] for r in records] == [{"ok": 12}] * 4
    assert [r["served"]["big"]["replies"] for r in records] == [12] * 4


def test_its_turns_are_in_the_trace_and_its_usage_is_counted(served, chat_server, tmp_path: Path):
    team = Team(compile_experiment(served()), tmp_path)
    try:
        assert team.repeats is False
        assert team.groups["big"].versions() == {"big": 0}
        assert team.groups["big"].describe() == {"endpoint": chat_server.url, "model": "echo-1"}
        with pytest.raises(RunError, match="behind an endpoint"):
            team.groups["big"].supervise("big", [], None, 0, 1)  # type: ignore[arg-type]
    finally:
        team.close()


def test_a_checkpoint_is_evaluated_and_a_run_resumed_with_the_server(served, chat_server, tmp_path: Path):
    plan = compile_experiment(served(("steps: 4, tasks", "steps: 2, tasks")))
    train(plan, tmp_path / "run")
    found = trial.evaluate_checkpoint(plan, str(tmp_path / "run"), "eval", None, 1)
    assert found["outcomes"] == {"ok": 3}
    longer = compile_experiment(served(("steps: 4, tasks", "steps: 3, tasks")))
    assert train(longer, tmp_path / "run", resume=True)["steps"] == 3


def test_a_later_run_starts_from_one_with_a_served_role(served, tmp_path: Path):
    train(compile_experiment(served(("steps: 4, tasks", "steps: 1, tasks"))), tmp_path / "first")
    started = (WARM, f"init: {tmp_path / 'first'}")
    again = served(("steps: 4, tasks", "steps: 1, tasks"), started)
    assert train(compile_experiment(again), tmp_path / "second")["steps"] == 1


def test_a_missing_key_is_told_before_anything_is_played(served, chat_server, tmp_path: Path, monkeypatch):
    monkeypatch.delenv("ECHO_KEY")
    with pytest.raises(RunError, match="ECHO_KEY"):
        train(compile_experiment(served()), tmp_path / "run")
    assert not chat_server.bodies


def test_a_refused_key_ends_the_run_without_showing_it(served, chat_server, says, tmp_path: Path):
    chat_server.reply = lambda body: says(status=401, error={"message": f"bad key {KEY}"})
    with pytest.raises(RunError, match=r"bad key \*\*\*") as told:
        train(compile_experiment(served()), tmp_path / "run")
    assert KEY not in str(told.value)


def test_a_filtered_reply_drops_its_episode_only(served, chat_server, says, tmp_path: Path):
    def reply(body):
        word = body["messages"][-1]["content"].split()[-1]
        return says(word, finish="content_filter" if len(chat_server.bodies) % 3 == 0 else "stop")

    chat_server.reply = reply
    train(compile_experiment(served(("steps: 4, tasks", "steps: 1, tasks"))), tmp_path / "run")
    [record] = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert record["outcomes"].keys() == {"ok", "engine_error"}


def test_a_signal_ends_a_run_that_waits_for_a_server_and_leaves_a_checkpoint(
    served, chat_server, says, tmp_path: Path
):
    waiting = threading.Event()

    def reply(body):
        if len(chat_server.bodies) > 20:  # the held-out episodes are over
            waiting.set()
            return says(after_s=60.0)
        return says("red")

    chat_server.reply = reply
    threading.Thread(target=lambda: waiting.wait(60) and os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(Interrupted):
        train(compile_experiment(served(timeout_s=50)), tmp_path / "run")
    assert waiting.is_set()
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_server_without_a_key_plays_and_judges(served, chat_server, says, tmp_path: Path):
    """The judge's number is the reward; it is asked as a role like any other."""
    chat_server.reply = lambda body: says("0.25" if "judge" in body["messages"][-1]["content"] else "red")
    workflow = (
        (
            "echoer: {prompt",
            'critic: {prompt: "judge {{ said }}", reply: {max_tokens: 4}}\n  echoer: {prompt',
        ),
        (
            "rewards:\n",
            "rewards:\n  - {name: liked, use: role:critic, args: {said: \"{{ call.text or '' }}\"}}\n",
        ),
    )
    plan = compile_experiment(served(("steps: 4, tasks", "steps: 1, tasks"), workflow=workflow, key_env=None))
    train(plan, tmp_path / "run")
    [record] = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert record["rewards"]["liked"] == 0.25
    assert set(chat_server.keys) == {None}


REACT = """
name: sums
task: {n: int, total: {type: int, hidden: true}}
roles:
  clerk: {prompt: "double {{ n }}", reply: {tag: sum, max_tokens: 32}, tools: [calc], max_calls: 3}
tools: {calc: {use: calculator}}
nodes: {add: {role: clerk}}
edges: [start -> add -> end]
output: {sum: "{{ add.sum }}"}
rewards: [{name: right, use: "right.py:right", args: {a: "{{ add.sum }}", b: "{{ total }}"}, otherwise: 0}]
"""


def test_a_served_role_uses_tools(chat_server, says, tmp_path: Path):
    """The tool's result stands in a user's message, which every server takes."""

    def reply(body):
        if len(body["messages"]) == 2:
            return says('<tool_call>{"name": "calc", "arguments": {"expression": "21 * 2"}}</tool_call>')
        return says(f"<sum>{body['messages'][-1]['content'].split()[0]}</sum>")

    chat_server.reply = reply
    (tmp_path / "workflows").mkdir()
    (tmp_path / "w.yaml").write_text(REACT)
    (tmp_path / "right.py").write_text("def right(a, b):\n    return float(str(a) == str(b))\n")
    (tmp_path / "rows.jsonl").write_text('{"n": 21, "total": 42}\n')
    mapping = f'mapping: {{models: {{big: {{roles: rest, endpoint: "{chat_server.url}", model: m}}}}}}'
    (tmp_path / "e.yaml").write_text(f"workflow: w.yaml\n{mapping}\ndata: {{eval: rows.jsonl}}\n")
    found = trial.evaluate_checkpoint(compile_experiment(tmp_path / "e.yaml"), None, "eval", None, 0)
    assert found["metrics"] == {"right": 1.0}
    assert [m["role"] for m in chat_server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
