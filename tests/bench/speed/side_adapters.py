"""Four adapters on one backbone, eight rows each, decoding: in one batch, or one adapter after another.

    python -m tests.bench.speed.side_adapters (together|apart|modules) FOLDER

`apart` asks masflow's engine four times; `modules` does so with PEFT's own modules, where one adapter is
switched on.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from masflow.compiler import compile_experiment
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.speaking import ModuleSpeaker
from masflow.models.transformers_engine import TransformersEngine
from masflow.runtime.team import Team
from masflow.trace import Message
from tests.bench.speed.meter import Meter, pin
from tests.bench.speed.workloads import Workload, prompts

ROLES, ROWS, TIMES = ("a", "b", "c", "d"), 8, 6
WORK = Workload("adapters", "1M", prompt_tokens=64)
WORKFLOW = """
name: four
task: {text: str}
roles:
  a: &role {prompt: "{{ text }}", reply: {max_tokens: 32}}
  b: *role
  c: *role
  d: *role
nodes: {a1: {role: a}, b1: {role: b}, c1: {role: c}, d1: {role: d}}
edges: [start -> a1 -> b1 -> c1 -> d1 -> end]
output: {said: "{{ d1.text }}"}
rewards: [{name: form, use: well_formed, level: turn}]
"""
EXPERIMENT = """
workflow: workflow.yaml
mapping: {{models: {{policy: {{roles: rest, train: lora, lora: {{rank: 16}}, adapters: per_role}}}}}}
runtime: {{threads: 1}}
base: {base}
data: {{train: tasks.jsonl}}
"""


def made_team(base: Path, place: Path) -> Team:
    """Four adapters whose weights say something."""
    (place / "workflow.yaml").write_text(WORKFLOW)
    (place / "tasks.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (place / "experiment.yaml").write_text(EXPERIMENT.format(base=base.resolve()))
    team = Team(compile_experiment(place / "experiment.yaml"), place / "run")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in worker_of(team).base.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.02)
    return team


def worker_of(team: Team) -> Any:
    (group,) = team.groups.values()
    speakers: Any = group.speakers  # pyright: ignore[reportAttributeAccessIssue]
    return speakers[0].instance


def by_modules(worker: Any) -> TransformersEngine:
    """An engine in which one adapter is switched on at a time."""
    return TransformersEngine(
        worker.backbone,
        worker.tokens,
        worker.experience,
        context=worker.base.context,
        max_batch_tokens=16384,
        switch=worker.policies.switch,
        speaker=lambda: ModuleSpeaker(worker.backbone),
    )


def requests(texts: list[str], policies: list[str], time: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=WORK.reply_tokens)
    return [
        Request(f"{time}-{policy}-{i}", policy, (Message("user", text),), sampling, seed=1000 * time + i)
        for policy in policies
        for i, text in enumerate(texts)
    ]


def main() -> None:
    pin()
    way, base = sys.argv[1], Path(sys.argv[2])
    texts = prompts(WORK, base, ROWS)
    meter = Meter(len(ROLES) * ROWS, TIMES)
    said: list[Reply] = []
    with tempfile.TemporaryDirectory(prefix="masflow-") as name:
        team = made_team(base, Path(name))
        engine = by_modules(worker_of(team)) if way == "modules" else team
        policies = [policy.name for policy in team.policies]
        meter.loaded()
        for time in range(TIMES + 1):
            asked = requests(texts, policies, time)
            parts = [asked] if way == "together" else [[r for r in asked if r.policy == p] for p in policies]
            said += [reply for part in parts for reply in engine.generate(part)]
            meter.step()
        team.close()
    assert len(policies) == len(ROLES) and {reply.reply_tokens for reply in said} == {WORK.reply_tokens}
    digest = hashlib.sha256("\n".join(reply.text for reply in said).encode()).hexdigest()[:16]
    meter.tell(
        digest=digest,
        logprob=round(sum(reply.logprob for reply in said), 2),
        different=len({r.text for r in said}),
    )


if __name__ == "__main__":
    main()
