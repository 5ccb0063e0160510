"""What node-wise sampling and top-K selection each do: the ablation of JoyAgents-R1 (arXiv 2506.19846).

    python tests/bench/joyagents.py run             # every arm, 5 seeds, from one warm start a seed
    python tests/bench/joyagents.py table           # prints what has been measured
    python tests/bench/joyagents.py plot            # writes results/joyagents.png
    python tests/bench/joyagents.py keep            # writes what was measured to results/joyagents.jsonl.gz

The team is the iterative search of `examples/small/m_ask.yaml`, up to nine turns an episode. Every arm draws
five episodes, or five actions a context, of the same tasks and differs in its passes alone. Scores are
greedy, on held-out rows. A run that is in the log of `--out`, or in that file, isn't repeated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.learning import masflow  # noqa: E402
from tests.bench.paired import difference, scores_of, shown  # noqa: E402

KEPT = Path(__file__).parent / "results" / "joyagents.jsonl.gz"
EXPERIMENT = "examples/small/m_ask.yaml"
STEPS, EVERY, SAMPLES = 12, 3, 5
OWN = "use: grpo, temperature: 0.5, updates_per_step: 2"
ROLLOUT = f"node_sampling: {{samples: {SAMPLES}}}"
ARMS = {
    "trajectories": (),
    **{
        f"nodes, {credit}": (f"node_sampling: {{samples: {SAMPLES}, credit: {credit}}}",)
        for credit in ("local", "fixed_suffix", "splice", "rollout")
    },
    **{f"nodes, top {k}": (ROLLOUT, f"top_k: {{k: {k}}}") for k in ("1", "2", "5", "all")},
}
"""Name → its passes. With `top_k`, `continuations` is 2; the arm `all` tells what that alone does."""


def words(arm: str) -> list[str]:
    """What an arm sets beside the experiment."""
    passes = ARMS[arm]
    samples = "" if any("node_sampling" in one for one in passes) else f", samples: {SAMPLES}"
    wanted = {
        "algorithm": f"{{{OWN}{samples}}}",
        "passes": f"[{', '.join('{' + one + '}' for one in passes)}]",
        "train.steps": STEPS,
        "train.eval_every": EVERY,
    }
    return [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]


def run(arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one arm from the seed's warm start; its curve, and the rows before and after."""
    folder, seeded = out / f"{arm.replace(', ', '-').replace(' ', '-')}-{seed}", f"train.seed={seed}"
    again = ("--resume",) if (folder / "checkpoints").is_dir() else ()
    init = ("--set", f"init={out / f'warm-{seed}'}")
    found = masflow("train", EXPERIMENT, "--set", seeded, *init, *words(arm), "--out", str(folder), *again)
    metric = found["eval_after"]["headline"]
    return {
        "arm": arm,
        "seed": seed,
        "metric": metric,
        "before": scores_of(folder, 0, metric),
        "after": scores_of(folder, STEPS, metric),
        "curve": curve(folder, metric),
    }


def curve(folder: Path, metric: str) -> list[dict[str, float]]:
    """At every evaluation: `step`, `score`, and so far `generated` tokens, `trained` tokens, `updates`."""
    with closing(sqlite3.connect(f"{(folder / 'trace.sqlite').absolute().as_uri()}?mode=ro", uri=True)) as db:
        spoken = dict(
            db.execute("SELECT step, SUM(reply_tokens) FROM turns WHERE split='train' GROUP BY step")
        )
    points, sums = [], {"generated": 0.0, "trained": 0.0, "updates": 0.0}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "train":
            sums["generated"] += spoken.get(record["step"], 0)
            sums["trained"] += sum(p["tokens"] for p in record["policies"].values())
            sums["updates"] += sum(p["optimizer_steps"] for p in record["policies"].values())
        elif record["kind"] == "eval":
            points.append({"step": record["step"], "score": record["metrics"][metric], **sums})
    return points


def run_all(arms: Sequence[str], seeds: Sequence[int], out: Path, workers: int) -> None:
    done = {(r["arm"], r["seed"]) for r in results(out)}
    left = [(arm, seed) for seed in seeds for arm in arms if (arm, seed) not in done]
    for seed in sorted({seed for _, seed in left}):
        if not (out / f"warm-{seed}").exists():
            masflow("sft", EXPERIMENT, "--set", f"train.seed={seed}", "--out", str(out / f"warm-{seed}"))
    failed = False

    def one(job: tuple[str, int]) -> str:
        try:
            result = run(*job, out)
        except RuntimeError as error:  # the others go on
            return f"{job[0]}, seed {job[1]} FAILED: {error}"
        with (out / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        scores = " ".join(f"{point['score']:.3f}" for point in result["curve"])
        return f"{job[0]}, seed {job[1]}: {scores}"

    with ThreadPoolExecutor(workers) as pool:
        for line in pool.map(one, left):
            failed |= "FAILED" in line
            print(line, flush=True)
    if failed:
        raise SystemExit("some runs failed; the same command tries them again")


def results(out: Path) -> list[dict[str, Any]]:
    """What was measured in `out`, and of the rest what the repository holds."""
    log = out / "results.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    own = {(r["arm"], r["seed"]) for r in found}
    earlier = gzip.decompress(KEPT.read_bytes()).decode().splitlines() if KEPT.exists() else []
    return found + [r for r in map(json.loads, earlier) if (r["arm"], r["seed"]) not in own]


def at_tokens(points: Sequence[Mapping[str, float]], tokens: float) -> float:
    """The score at so many generated tokens, between the evaluations on both sides."""
    for left, right in pairwise(points):
        if right["generated"] >= tokens:
            share = (tokens - left["generated"]) / (right["generated"] - left["generated"])
            return left["score"] + share * (right["score"] - left["score"])
    return points[-1]["score"]


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: before, after, the gain over rows, the score at equal generated tokens, and what it cost."""
    by_arm = {arm: [r for r in found if r["arm"] == arm] for arm in ARMS}
    by_arm = {arm: sorted(runs, key=lambda r: r["seed"]) for arm, runs in by_arm.items() if runs}
    if not by_arm:
        return "nothing has been measured"
    tokens = min(r["curve"][-1]["generated"] for r in found)
    head = ("arm", "seeds", "before", "after", "gain", f"at {tokens / 1000:.0f}k tokens")
    head = (*head, "generated", "trained", "updates")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm, runs in by_arm.items():
        last = [r["curve"][-1] for r in runs]
        cells = [
            arm,
            str(len(runs)),
            spread([r["curve"][0]["score"] for r in runs]),
            spread([point["score"] for point in last]),
            shown(difference([r["after"] for r in runs], [r["before"] for r in runs])),
            spread([at_tokens(r["curve"], tokens) for r in runs]),
            *(f"{fmean(p[key] for p in last) / 1000:.0f}k" for key in ("generated", "trained")),
            f"{fmean(p['updates'] for p in last):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def plot(found: Sequence[dict[str, Any]], to: Path) -> None:
    """Held-out score against generated tokens and against updates: the mean over seeds, one line an arm."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for arm in ARMS:
        curves = [r["curve"] for r in found if r["arm"] == arm]
        for axis, key in zip(axes, ("generated", "updates"), strict=True):
            points = list(zip(*curves, strict=True))
            x = [fmean(p[key] for p in each) for each in points]
            y = [fmean(p["score"] for p in each) for each in points]
            if points:
                axis.plot(x, y, marker="o", markersize=3, label=f"{arm} ({len(curves)})")
            axis.set_xlabel("generated tokens" if key == "generated" else "optimizer steps")
    axes[0].set_ylabel("held-out score (greedy)")
    axes[1].legend(fontsize=7, title="arm (seeds)")
    figure.tight_layout()
    figure.savefig(to, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["run", "table", "plot", "keep"])
    parser.add_argument("--only", nargs="*", choices=list(ARMS), help="some arms")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "joyagents")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.kind == "run":
        run_all(given.only or list(ARMS), given.seeds, out, given.jobs)
    found = results(out)
    if given.kind == "plot":
        plot(found, KEPT.parent / "joyagents.png")
    elif given.kind == "keep":
        ordered = sorted(found, key=lambda r: (r["arm"], r["seed"]))
        text = "".join(json.dumps(r, sort_keys=True) + "\n" for r in ordered)
        KEPT.write_bytes(gzip.compress(text.encode(), mtime=0))
    print("\n" + table(found))


if __name__ == "__main__":
    main()
