"""What node-wise sampling, top-K selection and memory each do: JoyAgents-R1 (arXiv 2506.19846), taken apart.

    python tests/bench/joyagents.py run             # every arm of both teams, from one warm start a seed
    python tests/bench/joyagents.py table           # prints what has been measured
    python tests/bench/joyagents.py plot            # writes results/joyagents-TEAM.png
    python tests/bench/joyagents.py keep            # writes what was measured to results/joyagents.jsonl.gz

The teams are the iterative search of `examples/small/m_ask.yaml`, up to eleven turns an episode, over five
seeds, and the master with its three agents of `examples/small/master_team.yaml`, over two. Every arm draws
five episodes, or five actions a context, of the same tasks and differs in its passes alone; all begin with a
warm start that has memory in its prompts. Scores are greedy, on held-out rows. A run that is in the log of
`--out`, or in that file, isn't repeated.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.learning import masflow  # noqa: E402
from tests.bench.paired import difference, scores_of, shown  # noqa: E402

KEPT = Path(__file__).parent / "results" / "joyagents.jsonl.gz"
STEPS, EVERY, SAMPLES = 12, 3, 5
OWN = "use: grpo, temperature: 0.5, updates_per_step: 2"
ROLLOUT = f"node_sampling: {{samples: {SAMPLES}}}"


@dataclass(frozen=True)
class Team:
    """An experiment, its arms (name → passes) and how many seeds each has."""

    experiment: str
    memory: str
    """The pass, for arms that have it, and for the warm start of all."""
    arms: Mapping[str, tuple[str, ...]]
    num_seeds: int
    window: int
    """Tokens, with room for what is recalled."""


M_ASK_MEMORY = "memory_evolution: {rewards: [f1, form], recall: 1}"
MASTER_MEMORY = (
    "memory_evolution: {rewards: [accuracy, qa_right, math_right, function_right, form], recall: 1}"
)
TEAMS = {
    "m_ask": Team(
        "examples/small/m_ask.yaml",
        M_ASK_MEMORY,
        {
            "trajectories": (),
            **{
                f"nodes, {credit}": (f"node_sampling: {{samples: {SAMPLES}, credit: {credit}}}",)
                for credit in ("local", "fixed_suffix", "splice", "rollout")
            },
            **{f"nodes, top {k}": (ROLLOUT, f"top_k: {{k: {k}}}") for k in ("1", "2", "5", "all")},
            "memory": (M_ASK_MEMORY,),
            "all three": (ROLLOUT, "top_k: {k: 5}", M_ASK_MEMORY),
        },
        num_seeds=5,
        window=384,
    ),
    "master_team": Team(
        "examples/small/master_team.yaml",
        MASTER_MEMORY,
        {
            "trajectories": (),
            "nodes, rollout": (ROLLOUT,),
            "all three": (ROLLOUT, "top_k: {k: 5}", MASTER_MEMORY),
        },
        num_seeds=2,
        window=512,
    ),
}
"""With `top_k`, `continuations` is 2; the arm `nodes, top all` tells what that alone does."""


def settings(wanted: Mapping[str, Any]) -> list[str]:
    return [word for key, value in wanted.items() for word in ("--set", f"{key}={value}")]


def words(team: Team, arm: str) -> list[str]:
    """What an arm sets beside the experiment."""
    passes = team.arms[arm]
    samples = "" if any("node_sampling" in one for one in passes) else f", samples: {SAMPLES}"
    return settings(
        {
            "algorithm": f"{{{OWN}{samples}}}",
            "passes": f"[{', '.join('{' + one + '}' for one in passes)}]",
            "train.steps": STEPS,
            "train.eval_every": EVERY,
            "base.config.max_position_embeddings": team.window,
        }
    )


def run(name: str, arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one arm from the seed's warm start; its curve, and the rows before and after."""
    team = TEAMS[name]
    folder = out / f"{name}-{arm.replace(', ', '-').replace(' ', '-')}-{seed}"
    again = ("--resume",) if (folder / "checkpoints").is_dir() else ()
    start = settings({"train.seed": seed, "init": out / f"warm-{name}-{seed}"})
    found = masflow("train", team.experiment, *start, *words(team, arm), "--out", str(folder), *again)
    metric = found["eval_after"]["headline"]
    return {
        "team": name,
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


def warm_start(name: str, seed: int, out: Path) -> None:
    """The shared start of a team's arms under a seed, made once."""
    team, folder = TEAMS[name], out / f"warm-{name}-{seed}"
    if not (folder / "checkpoints").is_dir():
        own = settings(
            {
                "train.seed": seed,
                "passes": f"[{{{team.memory}}}]",
                "base.config.max_position_embeddings": team.window,
            }
        )
        masflow("sft", team.experiment, *own, "--out", str(folder))


def run_all(jobs: Sequence[tuple[str, str, int]], out: Path, workers: int) -> None:
    done = {key_of(r) for r in results(out)}
    left = [job for job in jobs if job not in done]
    failed = False

    def one(job: tuple[str, str, int]) -> str:
        shown = f"{job[0]}, {job[1]}, seed {job[2]}"
        try:
            result = run(*job, out)
        except RuntimeError as error:  # the others go on
            return f"{shown} FAILED: {error}"
        with (out / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        return f"{shown}: " + " ".join(f"{point['score']:.3f}" for point in result["curve"])

    with ThreadPoolExecutor(workers) as pool:
        list(
            pool.map(lambda start: warm_start(start[0], start[1], out), sorted({(j[0], j[2]) for j in left}))
        )
        for line in pool.map(one, left):
            failed |= "FAILED" in line
            print(line, flush=True)
    if failed:
        raise SystemExit("some runs failed; the same command tries them again")


def key_of(result: Mapping[str, Any]) -> tuple[str, str, int]:
    return result["team"], result["arm"], result["seed"]


def results(out: Path) -> list[dict[str, Any]]:
    """What was measured in `out`, and of the rest what the repository holds."""
    log = out / "results.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    own = set(map(key_of, found))
    earlier = gzip.decompress(KEPT.read_bytes()).decode().splitlines() if KEPT.exists() else []
    return found + [r for r in map(json.loads, earlier) if key_of(r) not in own]


def at_tokens(points: Sequence[Mapping[str, float]], tokens: float) -> float:
    """The score at so many generated tokens, between the evaluations on both sides."""
    for left, right in pairwise(points):
        if right["generated"] >= tokens:
            share = (tokens - left["generated"]) / (right["generated"] - left["generated"])
            return left["score"] + share * (right["score"] - left["score"])
    return points[-1]["score"]


def table(name: str, found: Sequence[dict[str, Any]]) -> str:
    """Markdown: before, after, the gain over rows, the score at equal generated tokens, and what it cost."""
    found = [r for r in found if r["team"] == name]
    by_arm = {arm: [r for r in found if r["arm"] == arm] for arm in TEAMS[name].arms}
    by_arm = {arm: sorted(runs, key=lambda r: r["seed"]) for arm, runs in by_arm.items() if runs}
    if not by_arm:
        return f"nothing of {name} has been measured"
    tokens = min(r["curve"][-1]["generated"] for r in found)
    head = (name, "seeds", "before", "after", "gain", f"at {tokens / 1000:.0f}k tokens")
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


def plot(name: str, found: Sequence[dict[str, Any]], to: Path) -> None:
    """Held-out score against generated tokens and against updates: the mean over seeds, one line an arm."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for arm in TEAMS[name].arms:
        curves = [r["curve"] for r in found if (r["team"], r["arm"]) == (name, arm)]
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
    parser.add_argument("--teams", nargs="*", choices=list(TEAMS), default=list(TEAMS))
    parser.add_argument("--only", nargs="*", help="some arms")
    parser.add_argument("--seeds", nargs="*", type=int, help="instead of the team's number")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "joyagents")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if given.kind == "run":
        chosen = [(name, TEAMS[name]) for name in given.teams]
        jobs = [
            (name, arm, seed)
            for name, team in chosen
            for seed in (range(team.num_seeds) if given.seeds is None else given.seeds)
            for arm in team.arms
            if not given.only or arm in given.only
        ]
        run_all(jobs, out, given.jobs)
    found = results(out)
    if given.kind == "keep":
        text = "".join(json.dumps(r, sort_keys=True) + "\n" for r in sorted(found, key=key_of))
        KEPT.write_bytes(gzip.compress(text.encode(), mtime=0))
    for name in given.teams:
        if given.kind == "plot" and any(r["team"] == name for r in found):
            plot(name, found, KEPT.parent / f"joyagents-{name}.png")
        print("\n" + table(name, found))


if __name__ == "__main__":
    main()
