"""A team with items, copies, a family, a conversation, a loop, a tool and a sub-workflow trains whole."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics

Toy = Callable[..., Path]
TEAM = """
name: everything
task: {word: str, answer: {type: str, hidden: true}}
state: {heard: {type: [str], default: [], merge: append}}
tools: {twice: {use: "echo.py:twice"}}
roles:
  caller: {prompt: "say {{ word }}", conversation: role, reply: REPLY}
  reader: {prompt: "hear {{ part }}", reply: REPLY}
  voter: {prompt: "hear {{ word }}", copies: 2, reply: REPLY}
  guest: {prompt: "say {{ me }}", names: [red, blue], reply: REPLY}
  user: {prompt: "say {{ word }}", tools: [twice], max_calls: 1, reply: REPLY}
nodes:
  call: {role: caller}
  read: {role: reader, foreach: "[word, 'red']", as: part, write: {heard: "{{ result.text or '' }}"}}
  vote: {role: voter}
  visit_guest: {role: guest, speaker: "'red' if visits.call == 1 else 'blue'"}
  use: {role: user}
  ask: {workflow: inner.yaml, args: {word: "{{ word }}"}}
  gather: {set: {}}
edges:
  - start -> call -> read & vote -> gather
  - gather -> visit_guest
  - visit_guest -> call when visits.call < 2
  - visit_guest -> use -> ask -> end
output: {said: "{{ ask.said or '' }}"}
rewards:
  - {name: letters, use: "echo.py:letters", level: turn, args: {said: "{{ result.text or '' }}"}}
"""
INNER = """
name: inner
task: {word: str}
roles: {worker: {prompt: "hear {{ word }}", reply: REPLY}}
nodes: {work: {role: worker}}
edges: [start -> work -> end]
output: {said: "{{ work.text }}"}
"""
REPLY = "{max_tokens: 2, on_malformed: continue, default: {text: red}}"
CODE = '''
def letters(said: str) -> float:
    """Any reply has some worth, so that random replies differ."""
    return (len(said) * 7 % 5) / 5


def twice(word: str) -> str:
    """The word, two times."""
    return word + word
'''
MEMBERS = {"caller", "reader", "voter_0", "voter_1", "red", "blue", "user", "ask/worker"}
GROUPS = "adapters: {a: [voter, 'ask/*'], b: rest}"
MAPPINGS = {
    "{models: {policy: {roles: rest}}}": {"policy"},
    "{models: {own: {roles: rest, per: role}}}": {f"own.{name.replace('/', '.')}" for name in MEMBERS},
    f"{{models: {{policy: {{roles: rest, train: lora, lora: {{rank: 2}}, {GROUPS}}}}}}}": {
        "policy/a",
        "policy/b",
    },
}


def project(toy: Toy, mapping: str) -> Path:
    warm = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n"
    experiment = toy(
        (warm, ""),
        ("{models: {policy: {roles: rest}}}", mapping),
        ("steps: 4, tasks", "steps: 2, tasks"),
        ("eval: {samples: 1}", "eval: {limit: 2}"),
        ("max_position_embeddings: 64", "max_position_embeddings: 384"),  # tools are described at length
    )
    for name, text in (("echo_workflow.yaml", TEAM), ("inner.yaml", INNER)):
        (experiment.parent / name).write_text(text.replace("REPLY", REPLY))
    (experiment.parent / "echo.py").write_text(CODE)
    return experiment


def records(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k != "time"} for one in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=["shared", "separate", "adapters"])
def test_a_team_of_every_shape_trains_resumes_and_compares_like_with_like(
    toy: Toy, tmp_path: Path, mapping: str
):
    plan = compile_experiment(project(toy, mapping))
    out = tmp_path / "run"
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 1)

    with pytest.raises(Interrupted):
        train(plan, out, on_event=ask_to_stop, stop=stop)
    train(plan, out, resume=True)
    train(plan, tmp_path / "whole")
    assert records(out) == records(tmp_path / "whole")
    updated = {name for record in records(out) for name in record.get("policies", {})}
    assert updated == MAPPINGS[mapping]
    with closing(sqlite3.connect(out / "trace.sqlite")) as db:
        found = db.execute(
            "SELECT trajectory, member, policy, path, parent FROM turns WHERE step = 2 AND split = 'train'"
        ).fetchall()
    of_one = Counter(member for trajectory, member, *_ in found if trajectory == found[0][0])
    assert set(of_one) == MEMBERS
    # Two rounds: the caller twice, two items and two copies each time; a guest a round; the rest once.
    assert of_one == {
        "caller": 2, "reader": 4, "voter_0": 2, "voter_1": 2, "red": 1, "blue": 1, "user": 1, "ask/worker": 1
    }  # fmt: skip
    assert all(plan.policy_of[member] == policy for _, member, policy, _, _ in found)
    assert sum(parent is not None for *_, parent in found) == 12  # the second call goes on with the first
    batch = next(r["batch"] for r in records(out) if r["kind"] == "train")
    # 14 paths a task, 3 tasks; each compared over the 4 samples of its task.
    assert (batch["groups"], batch["singletons"], batch["trainable_turns"]) == (42, 0, 168)
