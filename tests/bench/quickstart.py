"""The quickstart over seeds: shared, separate and adapters, each role alone, and supervised training on clean
demonstrations of equal budget beside them. Writes one JSON line a run and prints the README's table.

    python tests/bench/quickstart.py --seeds 5 --out runs/bench

A run that is already in `results.jsonl` isn't repeated, so that a stopped benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from masflow.project import load
from masflow.spec.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = "examples/quickstart.yaml"
CLEAN = "examples/quickstart/demos_clean.jsonl"

ALONE = "models:\n  {learner}: {{roles: [{learner}]}}\n  {other}: {{roles: [{other}], train: frozen}}\n"
"""One role learns, the other keeps its warm start. Both start from the separate arm's warm start."""

ARMS = ("shared", "separate", "lora_per_role", "planner_alone", "answerer_alone", "clean_supervised")
LABELS = {
    "shared": "one model plays both roles",
    "separate": "one model a role",
    "lora_per_role": "one backbone, one adapter a role",
    "planner_alone": "separate, only the planner learns",
    "answerer_alone": "separate, only the answerer learns",
    "clean_supervised": "supervised on clean demonstrations, equal budget",
}


def masflow(*words: str) -> dict[str, Any]:
    """Run one command with one thread; its last line of JSON."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).with_name("masflow")), *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def clean_steps(experiment: Experiment) -> int:
    """Supervised updates that train on as many turns as the warm start and the RL steps together."""
    warm, train = experiment.warm_start, experiment.train
    assert warm is not None
    rollouts = train.steps * train.tasks_per_step * (experiment.algorithm.samples or 8)
    return warm.steps + rollouts // warm.batch


def run_arm(arm: str, seed: int, out: Path) -> dict[str, Any]:
    folder, seeded = out / f"{arm}-{seed}", ("--set", f"train.seed={seed}")
    if arm in ("shared", "lora_per_role"):
        return masflow(
            "train", EXPERIMENT, "--mapping", f"mappings/{arm}.yaml", *seeded, "--out", str(folder)
        )
    if arm == "clean_supervised":
        steps = clean_steps(load(ROOT / EXPERIMENT).spec)
        budget = ("--set", f"warm_start.data={CLEAN}", "--set", f"warm_start.steps={steps}")
        return masflow("sft", EXPERIMENT, *seeded, *budget, "--out", str(folder))
    warm = out / f"separate_warm-{seed}"
    mapping = out / f"{arm}.yaml"
    if arm == "separate":
        mapping = ROOT / "mappings" / "separate.yaml"
    else:
        learner = arm.removesuffix("_alone")
        mapping.write_text(
            ALONE.format(learner=learner, other="answerer" if learner == "planner" else "planner")
        )
    start = ("--set", f"init={warm}")
    return masflow("train", EXPERIMENT, "--mapping", str(mapping), *seeded, *start, "--out", str(folder))


def one_seed(seed: int, arms: list[str], out: Path, done: set[tuple[str, int]]) -> list[dict[str, Any]]:
    found = []
    wanted = [arm for arm in arms if (arm, seed) not in done]
    if (
        set(wanted) & {"separate", "planner_alone", "answerer_alone"}
        and not (out / f"separate_warm-{seed}").exists()
    ):
        masflow(
            "sft", EXPERIMENT, "--mapping", "mappings/separate.yaml", "--set", f"train.seed={seed}",
            "--out", str(out / f"separate_warm-{seed}"),
        )  # fmt: skip
    for arm in wanted:
        began = time.perf_counter()
        result = {"arm": arm, "seed": seed, **run_arm(arm, seed, out)}
        result["seconds"] = round(time.perf_counter() - began, 1)
        with (out / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        print(arm, seed, headline(result["eval_before"]), "->", headline(result["eval_after"]), flush=True)
        found.append(result)
    return found


def headline(score: dict[str, Any] | None) -> float | None:
    return None if score is None else round(score["metrics"][score["headline"]], 3)


def spread(values: list[float]) -> str:
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: greedy before and after, sampled after, each role's own correctness before and after."""
    lines = [
        "| who learns | before | after | sampled | planner finds | answerer reads | smallest gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in ARMS:
        rows = [r for r in results if r["arm"] == arm]
        if not rows:
            continue
        after = [r["eval_after"] or r["eval_before"] for r in rows]
        before = [] if arm == "clean_supervised" else [r["eval_before"] for r in rows]
        gains = [(headline(a) or 0) - (headline(b) or 0) for a, b in zip(after, before, strict=False)]
        cells = [
            LABELS[arm],
            spread([headline(s) or 0.0 for s in before]) if before else "-",
            spread([headline(s) or 0.0 for s in after]),
            spread([s["sampled"]["mean"] for s in after]),
            *(own(name, before, after) for name in ("found", "read")),
            f"{min(gains):+.2f}" if gains else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def own(metric: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """A role's own correctness, `before → after`, means over seeds."""
    last = f"{fmean(s['metrics'][metric] for s in after):.2f}"
    return f"{fmean(s['metrics'][metric] for s in before):.2f} → {last}" if before else last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench")
    words = parser.parse_args()
    out = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "results.jsonl"
    old = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(r["arm"], r["seed"]) for r in old}
    seeds = range(words.first_seed, words.first_seed + words.seeds)
    with ThreadPoolExecutor(words.jobs) as pool:
        new = [r for rows in pool.map(lambda s: one_seed(s, words.arms, out, done), seeds) for r in rows]
    print("\n" + table([*old, *new]))


if __name__ == "__main__":
    main()
