"""A workflow that is a function, its neighbours with it, runs on Ray as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from masflow.compiler import compile_experiment
from masflow.runtime import hub
from masflow.runtime.rundir import read_metrics

TEAM = '''
from masflow import gather, workflow

from .says_of_ray_test import SAY


@workflow(
    task={"word": str, "answer": {"type": str, "hidden": True}},
    roles={"call": {"prompt": SAY, "reply": {"max_tokens": 3}}},
    rewards=[{"name": "echoed", "use": "echo.py:echoed", "otherwise": 0,
              "args": {"said": "{{ output.said }}", "answer": "{{ answer }}"}}],
    output={"said": "{{ result }}"},
    outcomes={"truncated": "train"},
)
async def team(task, agents, ctx):
    """Two call side by side; one may break."""
    from late_of_ray_test import broken

    async def one(i):
        said = await agents.call(key=i)
        if broken(said.text):
            raise ValueError(said.text)
        return said.text

    try:
        return "".join(await gather(*[one(i) for i in range(2)]))
    except ValueError as error:
        return f"{error} {ctx.rng.random()}"
'''


def test_a_function_and_what_it_imports_give_the_same_run_on_ray(
    toy: Callable[..., Path], ray_up: None, tmp_path: Path
) -> None:
    warm = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n"
    experiment = toy(
        ("workflow: echo_workflow.yaml", "workflow: flows/team.py"), (warm, ""), ("steps: 4,", "steps: 2,")
    )
    root = experiment.parent
    (root / "flows").mkdir()
    (root / "flows" / "team.py").write_text(TEAM)
    (root / "flows" / "says_of_ray_test.py").write_text('SAY = "say {{ word }}"\n')
    (root / "late_of_ray_test.py").write_text("def broken(text):\n    return len(text) % 2 == 1\n")
    told = []
    for backend in ("local", "ray"):
        runtime = root / f"{backend}.yaml"
        runtime.write_text(f"{{backend: {backend}, deterministic: true, threads: 1}}")
        hub.train(compile_experiment(experiment, runtime=runtime), tmp_path / backend)
        records = read_metrics(tmp_path / backend / "metrics.jsonl")
        told.append([json.dumps({k: v for k, v in r.items() if k != "time"}) for r in records])
    assert told[0] == told[1] and sum('"train"' in record for record in told[0]) >= 2
