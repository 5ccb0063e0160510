"""masflow on a workload: an experiment in YAML, compiled and trained by the code behind `masflow train`.

    python -m tests.bench.speed.side_masflow WORKLOAD FOLDER [KEY=VALUE ...]

Further words change the experiment as `--set` does.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from masflow.compiler import compile_experiment
from masflow.runtime.hub import train
from masflow.runtime.progress import Display
from tests.bench.speed.meter import Meter, pin
from tests.bench.speed.profiled import Profile
from tests.bench.speed.workloads import LR, Workload, prompts

ONE = """
name: asked
task: {{text: str}}
roles: {{a: {{prompt: "{{{{ text }}}}", reply: {{max_tokens: {reply}}}}}}}
nodes: {{say: {{role: a}}}}
edges: [start -> say -> end]
output: {{said: "{{{{ say.text }}}}"}}
rewards: [{{name: liked, use: "rewards.py:liked", otherwise: 0, args: {{said: "{{{{ say.text }}}}"}}}}]
"""
TALK = """
name: talk
task: {{text: str}}
roles:
  a: {{prompt: "{{{{ text }}}}", next_prompt: "{{{{ hear.text or '' }}}}", conversation: role,
    reply: {{max_tokens: {reply}}}}}
  b: {{prompt: "{{{{ text }}}}", next_prompt: "{{{{ say.text }}}}", conversation: role,
    reply: {{max_tokens: {reply}}}}}
nodes: {{say: {{role: a}}, hear: {{role: b}}}}
edges: [start -> say -> hear, hear -> say when visits.hear < {turns}, hear -> end]
output: {{said: "{{{{ hear.text }}}}"}}
rewards:
  - {{name: liked, use: "rewards.py:liked", level: turn, otherwise: 0,
     args: {{said: "{{{{ result.text }}}}"}}}}
"""
REWARDS = """
from tests.bench.speed.workloads import reward


def liked(said: str) -> float:
    return reward(said)
"""
EXPERIMENT = """
workflow: workflow.yaml
mapping: {{models: {{own: {{roles: rest, per: role}}}}}}
runtime: {{backend: local, deterministic: {deterministic}, threads: 1}}
base: {base}
data: {{train: tasks.jsonl}}
algorithm: {{use: grpo, samples: {group}}}
train: {{steps: {steps}, tasks_per_step: {tasks}, shuffle: false, seed: 0, optimizer: {{lr: {lr}}}}}
"""


def write(work: Workload, base: Path, place: Path) -> Path:
    """The experiment's files in `place`; gives the experiment's."""
    workflow = TALK if work.turns > 1 else ONE
    (place / "workflow.yaml").write_text(workflow.format(reply=work.reply_tokens, turns=work.turns))
    (place / "rewards.py").write_text(REWARDS)
    rows = prompts(work, base, work.tasks * (work.steps + 1))
    (place / "tasks.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    file = place / "experiment.yaml"
    file.write_text(
        EXPERIMENT.format(
            base=base.resolve(),
            group=work.group,
            steps=work.steps + 1,
            tasks=work.tasks,
            lr=LR,
            deterministic=os.environ.get("BENCH_DETERMINISTIC", "true"),
        )
    )
    return file


def main() -> None:
    pin()
    work, base = Workload.read(sys.argv[1]), Path(sys.argv[2])
    overrides = dict(word.split("=", 1) for word in sys.argv[3:])
    meter = Meter(work.samples, work.steps)
    records: list[dict[str, Any]] = []
    profile = Profile(os.environ["BENCH_PROFILE"]) if "BENCH_PROFILE" in os.environ else None
    with tempfile.TemporaryDirectory(prefix="masflow-") as name:
        place = Path(name)
        file = write(work, base, place)
        with Display(work.steps + 1, 0) as display:

            def on_event(kind: str, facts: dict[str, Any]) -> None:
                display(kind, facts)
                if kind == "start":
                    meter.loaded()
                if kind == "train":
                    records.append(facts)
                    meter.step()
                    if profile and meter.done == 1:
                        profile.start()
                    if profile and meter.done == work.steps + 1:
                        profile.stop()

            plan = compile_experiment(file, overrides=overrides)
            train(plan, place / "run", on_event=on_event, experiment_text=file.read_text())
    check(work, records)
    times = [record["time"] for record in records[1:]]
    split = {key: round(sum(one[key] for one in times), 4) for key in ("sample_s", "update_s", "total_s")}
    meter.tell(**split, grad_norm=norms(records[-1]))


def norms(record: dict[str, Any]) -> float:
    return min(policy["grad_norm"] for policy in record["policies"].values())


def check(work: Workload, records: list[dict[str, Any]]) -> None:
    """The work was done: all replies have their length, all policies learnt in every step."""
    talk = work.turns * (work.prompt_tokens + work.reply_tokens)
    talk += (2 * work.reply_tokens + 2) * work.turns * (work.turns - 1) // 2
    for record in records:
        assert record["tokens"] == work.episodes * work.roles * talk, (record["tokens"], work)
        assert len(record["policies"]) == work.roles and norms(record) > 0, record["policies"]


if __name__ == "__main__":
    main()
