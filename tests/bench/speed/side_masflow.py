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
NODEWISE = """
name: nodewise
task: {{text: str}}
roles:
  a: {{prompt: "{{{{ text }}}}", reply: {{max_tokens: {reply}}}}}
nodes:
{nodes}
edges: [start -> {chain} -> end]
output: {{said: "{{{{ n{last}.text }}}}"}}
rewards:
  - {{name: liked, use: "rewards.py:liked", level: turn, otherwise: 0,
     args: {{said: "{{{{ result.text }}}}"}}}}
"""
REWARDS = """
from pathlib import Path

from tests.bench.speed.workloads import known_words, reward

BASE, EVIDENCE = {base!r}, {evidence}
KNOWN = known_words(Path(BASE))


def found(said: str) -> str:
    \"\"\"Evidence that hangs on what was said: so many words that the prompt has its length.\"\"\"
    start = sum(map(ord, said))
    return " ".join(KNOWN[(start + 7 * i) % len(KNOWN)] for i in range(EVIDENCE))


def liked(said: str) -> float:
    return reward(said)
"""
EXPERIMENT = """
workflow: workflow.yaml
mapping: {{models: {{own: {{roles: rest, per: role}}}}}}
runtime: {{backend: local, deterministic: {deterministic}, threads: 1}}
{passes}
base: {base}
data: {{train: tasks.jsonl}}
algorithm: {{use: grpo{samples}}}
train: {{steps: {steps}, tasks_per_step: {tasks}, shuffle: false, seed: 0, optimizer: {{lr: {lr}}}}}
"""


PASSES = "passes: [{{node_sampling: {{samples: {work.group}, credit: {work.credit}}}}}]"


def workflow_of(work: Workload) -> str:
    if work.nodes == 1:
        return (TALK if work.roles > 1 else ONE).format(reply=work.reply_tokens, turns=work.turns)
    nodes, order = [], []
    for i in range(work.nodes):
        said = f"n{i - 1}.text"
        if i:
            nodes.append(f'  find{i}: {{call: "rewards.py:found", args: {{said: "{{{{ {said} }}}}"}}}}')
            order.append(f"find{i}")
        prompt = f', prompt: "{{{{ find{i} }}}} {{{{ {said} }}}}"' if i else ""
        nodes.append(f"  n{i}: {{role: a{prompt}}}")
        order.append(f"n{i}")
    return NODEWISE.format(
        reply=work.reply_tokens, nodes="\n".join(nodes), chain=" -> ".join(order), last=work.nodes - 1
    )


def write(work: Workload, base: Path, place: Path) -> Path:
    """The experiment's files in `place`; gives the experiment's."""
    (place / "workflow.yaml").write_text(workflow_of(work))
    evidence = work.prompt_tokens - 2 - work.reply_tokens
    (place / "rewards.py").write_text(REWARDS.format(base=str(base.resolve()), evidence=evidence))
    rows = prompts(work, base, work.tasks * (work.steps + 1))
    (place / "tasks.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    file = place / "experiment.yaml"
    file.write_text(
        EXPERIMENT.format(
            base=base.resolve(),
            samples="" if work.credit else f", samples: {work.group}",
            passes=PASSES.format(work=work) if work.credit else "",
            steps=work.steps + 1,
            tasks=work.tasks,
            lr=LR,
            deterministic=os.environ.get("BENCH_DETERMINISTIC", "true"),
        )
    )
    return file


def run(work: Workload, base: Path, meter: Meter, overrides: dict[str, str]) -> list[dict[str, Any]]:
    """Train; the records of its steps."""
    records: list[dict[str, Any]] = []
    profile = Profile(os.environ["BENCH_PROFILE"]) if "BENCH_PROFILE" in os.environ else None
    with tempfile.TemporaryDirectory(prefix="masflow-") as name, Display(work.steps + 1, 0) as display:
        place = Path(name)
        file = write(work, base, place)

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
    return records


def main() -> None:
    pin()
    work, base = Workload.read(sys.argv[1]), Path(sys.argv[2])
    meter = Meter(work.samples, work.steps)
    records = run(work, base, meter, dict(word.split("=", 1) for word in sys.argv[3:]))
    times = [record["time"] for record in records[1:]]
    split = {key: round(sum(one[key] for one in times), 4) for key in ("sample_s", "update_s", "total_s")}
    meter.tell(**split, grad_norm=norms(records[-1]))


def norms(record: dict[str, Any]) -> float:
    return min(policy["grad_norm"] for policy in record["policies"].values())


def check(work: Workload, records: list[dict[str, Any]]) -> None:
    """The work was done: all replies have their length, all policies learnt in every step."""
    for record in records:
        assert record["tokens"] == tokens_of(work), (record["tokens"], tokens_of(work), record)
        assert len(record["policies"]) == work.roles and norms(record) > 0, record["policies"]


def tokens_of(work: Workload) -> int:
    """Prompt and reply tokens of all turns of a step."""
    one, nodes = work.prompt_tokens + work.reply_tokens, work.nodes
    if work.credit:
        suffixes = (work.group - 1) * nodes * (nodes - 1) // 2 if work.credit == "rollout" else 0
        return work.tasks * (work.group * nodes + suffixes) * one
    grown = (2 * work.reply_tokens + 2) * work.turns * (work.turns - 1) // 2
    return work.episodes * work.roles * (work.turns * nodes * one + grown)


if __name__ == "__main__":
    main()
