"""Runs the comparisons of the suite: A B A B, each in a process of its own, one thread on one CPU.

    python -m tests.bench.speed.pairs --pairs 5 --only retrieval,short --out tests/bench/results

A comparison's result is written when it is done, and isn't measured again while it stands there, unless with
`--again`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.speed.make_models import SMOLLM2, made
from tests.bench.speed.suite import COMPARISONS, Comparison, Side

ROOT = Path(__file__).resolve().parents[3]
PEERS = os.environ.get("PEERS_PYTHON", str(ROOT / ".venv-peers" / "bin" / "python"))
OURS, THEIRS = ("torch", "transformers", "peft"), ("torch", "transformers", "trl", "comlrl", "langgraph")
LONGEST_S = 900.0


def run_side(side: Side, comparison: Comparison) -> dict[str, Any]:
    """The facts that a side tells in its last line.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    words = list(side.words)
    if comparison.work is not None:
        words.append(comparison.work.text())
    if comparison.model is not None:
        words.append(str(made(comparison.model)))
    command = [PEERS if side.is_peer else sys.executable, "-m", f"tests.bench.speed.{side.script}", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **side.env}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{side.label}: longer than {LONGEST_S:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{side.label} failed: {done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(comparison: Comparison, pairs: int) -> dict[str, Any]:
    """All pairs of one comparison, and what they come to."""
    rows: list[list[dict[str, Any]]] = []
    for _ in range(min(pairs, comparison.most_pairs)):
        rows.append([run_side(side, comparison) for side in comparison.sides])
        print(f"  {comparison.name}: {ratios(rows, 'samples_per_s')[-1]:.2f}", flush=True)
    if comparison.equal and len({side[comparison.equal] for row in rows for side in row}) > 1:
        raise RuntimeError(f"{comparison.name}: the sides' results differ")
    found = {
        "name": comparison.name,
        "sides": [side.label for side in comparison.sides],
        "unit": comparison.unit,
        "work": None if comparison.work is None else json.loads(comparison.work.text()),
        "model": comparison.model,
        "bar": comparison.bar,
        "memory_bar": comparison.memory,
        "ratio": summed(ratios(rows, "samples_per_s")),
        "cpu_ratio": summed(ratios(rows, "samples_per_cpu_s")),
        "rates": [median(row[i]["samples_per_s"] for row in rows) for i in (0, 1)],
        "extra_mb": [median(row[i].get("extra_mb", 0.0) for row in rows) for i in (0, 1)],
        "peak_mb": [median(row[i].get("peak_mb", 0.0) for row in rows) for i in (0, 1)],
        "pairs": rows,
    }
    found["passed"] = passed(found)
    return found


def ratios(rows: list[list[dict[str, Any]]], key: str) -> list[float]:
    return [first[key] / second[key] for first, second in rows]


def summed(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def passed(found: dict[str, Any]) -> bool | None:
    """Whether the medians reach the bars; None without a bar."""
    if found["bar"] is None and found["memory_bar"] is None:
        return None
    enough = found["bar"] is None or found["ratio"]["median"] >= found["bar"]
    ours, theirs = found["extra_mb"]
    return enough and (found["memory_bar"] is None or ours <= found["memory_bar"] * theirs)


def machine() -> dict[str, Any]:
    """Where this was measured, and with what."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    ask = f"from importlib.metadata import version as v; print(*[v(n) for n in {THEIRS}])"
    told = subprocess.run([PEERS, "-c", ask], capture_output=True, text=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in OURS},
        "peers": dict(zip(THEIRS, told.stdout.split(), strict=False)),
        "commit": commit.stdout.strip(),
        "load": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def wanted(comparison: Comparison, only: list[str]) -> bool:
    if comparison.model == "SmolLM2-135M" and not (SMOLLM2 / "config.json").is_file():
        print(f"  {comparison.name}: left out; `make smollm2` installs the model")
        return False
    return not only or any(comparison.name.startswith(name) for name in only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="", help="comma-separated beginnings of names")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "bench" / "results")
    parser.add_argument("--again", action="store_true", help="measure what has a result already, too")
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)))
    said = parser.parse_args()
    os.sched_setaffinity(0, {said.cpu})
    said.out.mkdir(parents=True, exist_ok=True)
    only = [name for name in said.only.split(",") if name]
    failed = []
    for comparison in COMPARISONS:
        file = said.out / f"{comparison.name}.json"
        if not wanted(comparison, only) or (file.is_file() and not said.again):
            continue
        began = time.perf_counter()
        try:
            found = measure(comparison, said.pairs)
        except RuntimeError as error:
            failed.append(comparison.name)
            print(f"  {comparison.name}: {error}", file=sys.stderr, flush=True)
            continue
        found |= {"machine": machine(), "command": f"make bench PAIRS={said.pairs} BENCH={comparison.name}"}
        file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{comparison.name}: {found['ratio']} ({time.perf_counter() - began:.0f} s)", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
