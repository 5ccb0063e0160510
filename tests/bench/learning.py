"""What is learned: teams under three sharings, six algorithms from one warm start, and a real model.

    python tests/bench/learning.py teams          # generated tasks: shared, separate, a single role; 3 seeds
    python tests/bench/learning.py algorithms     # the quickstart from one warm start a seed; 3 seeds
    python tests/bench/learning.py smollm2        # SmolLM2-135M on Natural Questions; 2 seeds
    python tests/bench/learning.py table          # prints what has been measured
    python tests/bench/learning.py keep           # writes it to results/learning.jsonl.gz

Scores are greedy, on held-out rows; differences are paired by row. A run that is in the log of `--out`, or in
that file, isn't repeated (`--again` repeats those), so that a stopped benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.paired import difference, scores_of, shown  # noqa: E402

KEPT = Path(__file__).parent / "results" / "learning.jsonl.gz"
SMALL = ("math_team", "qd_answer", "qd_evidence", "m_ask", "reflective_code")
SHARINGS = ("shared", "separate", "single")
FAMILIES = ("grpo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo")
OWN_WORDS = {"ppo": ("--set", "algorithm.critic.optimizer.lr=1.0e-3")}
"""What a small model needs beyond the preset: the critic's rate there is one for large models."""
LABELS = {
    "shared": "one model plays all roles",
    "separate": "one model a role",
    "single": "a single role does all",
}


@dataclass(frozen=True)
class Job:
    """One run: `arm` of `group` under a seed."""

    group: str
    arm: str
    seed: int
    experiment: str
    words: tuple[str, ...] = ()
    warm: str = ""
    """Experiment whose warm start, made once a seed, this run and its siblings start from."""
    threads: int = 1

    @property
    def name(self) -> str:
        return f"{self.group}-{self.arm}-{self.seed}"


def teams(seeds: Sequence[int], only: Sequence[str]) -> list[Job]:
    jobs = []
    for team in only or SMALL:
        own = f"examples/small/{team}.yaml"
        for seed in seeds:
            for arm in SHARINGS:
                experiment = f"examples/small/single_{team}.yaml" if arm == "single" else own
                words = ("--mapping", f"mappings/{arm}.yaml") if arm != "single" else ()
                jobs.append(Job(team, arm, seed, experiment, words))
    return jobs


def algorithms(seeds: Sequence[int], only: Sequence[str]) -> list[Job]:
    experiment = "examples/quickstart.yaml"
    return [
        Job(
            "quickstart",
            name,
            seed,
            experiment,
            ("--set", f"algorithm.use={name}", *OWN_WORDS.get(name, ())),
            warm=experiment,
        )
        for seed in seeds
        for name in only or FAMILIES
    ]


def smollm2(seeds: Sequence[int], only: Sequence[str]) -> list[Job]:
    """Ten of the example's 80 steps, in float32 on a CPU; not measured yet: a seed may take most of an hour
    of two cores."""
    words = (
        "--set",
        "train.steps=10",
        "--set",
        "eval.limit=200",
        "--set",
        "mapping.models.policy.dtype=auto",
    )
    return [Job("smollm2", "shared", seed, "examples/nq_rag.yaml", words, threads=2) for seed in seeds]


KINDS = {"teams": (teams, 3), "algorithms": (algorithms, 3), "smollm2": (smollm2, 2)}


def masflow(*words: str, threads: int = 1) -> dict[str, Any]:
    """Run one command; its last line of JSON."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [str(Path(sys.executable).with_name("masflow")), *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(job: Job, out: Path) -> dict[str, Any]:
    """Train, and what a table needs: both scores with every row's, both headlines, the steps."""
    words = ("--set", f"train.seed={job.seed}", *job.words)
    began = time.perf_counter()
    if job.warm:
        words = (*words, "--set", f"init={out / f'warm-{job.group}-{job.seed}'}")
    folder = out / job.name
    again = ("--resume",) if (folder / "checkpoints").is_dir() else ()
    found = masflow("train", job.experiment, *words, "--out", str(folder), *again, threads=job.threads)
    metric = found["eval_after"]["headline"]
    return {
        **asdict(job),
        "metric": metric,
        "steps": found["steps"],
        "before": scores_of(folder, 0, metric),
        "after": scores_of(folder, found["steps"], metric),
        "roles": {"before": found["eval_before"]["roles"], "after": found["eval_after"]["roles"]},
        "seconds": round(time.perf_counter() - began, 1),
    }


def warm_starts(jobs: Iterable[Job], out: Path) -> None:
    """The shared start of jobs that ask for one, once a seed."""
    for name, job in {f"warm-{job.group}-{job.seed}": job for job in jobs if job.warm}.items():
        if not (out / name).exists():
            masflow("sft", job.warm, "--set", f"train.seed={job.seed}", "--out", str(out / name))


def run_all(jobs: Sequence[Job], out: Path, workers: int, again: bool = False) -> None:
    done = {(r["group"], r["arm"], r["seed"]) for r in results(out, kept=not again)}
    left = [job for job in jobs if (job.group, job.arm, job.seed) not in done]
    warm_starts(left, out)

    def one(job: Job) -> str:
        try:
            result = run(job, out)
        except RuntimeError as error:  # the others go on
            return f"{job.name} FAILED: {error}"
        with (out / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        means = [fmean(result[when].values()) for when in ("before", "after")]
        return f"{job.name}: {means[0]:.3f} -> {means[1]:.3f} in {result['seconds']} s"

    failed = False
    with ThreadPoolExecutor(workers) as pool:
        for line in pool.map(one, left):
            failed |= "FAILED" in line
            print(line, flush=True)
    if failed:
        raise SystemExit("some runs failed; the same command tries them again")


def results(out: Path, kept: bool = True) -> list[dict[str, Any]]:
    """What was measured in `out`, and of the rest what the repository holds."""
    log = out / "results.jsonl"
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if kept and KEPT.exists():
        own = {(r["group"], r["arm"], r["seed"]) for r in found}
        earlier = map(json.loads, gzip.decompress(KEPT.read_bytes()).decode().splitlines())
        found += [r for r in earlier if (r["group"], r["arm"], r["seed"]) not in own]
    return found


def keep(found: Iterable[Mapping[str, Any]]) -> None:
    """Write the results into the repository, in a settled order."""
    ordered = sorted(found, key=lambda r: (r["group"], r["arm"], r["seed"]))
    text = "".join(json.dumps(r, sort_keys=True) + "\n" for r in ordered)
    KEPT.write_bytes(gzip.compress(text.encode(), mtime=0))


def spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def row(label: str, runs: Sequence[Mapping[str, Any]], against: Sequence[Mapping[str, Any]] = ()) -> str:
    """Before, after (mean ± sd over seeds), the gain over rows, and the difference to another arm."""
    before, after = [r["before"] for r in runs], [r["after"] for r in runs]
    means = [[fmean(rows.values()) for rows in side] for side in (before, after)]
    gain = shown(difference(after, before))
    smallest = min(b - a for a, b in zip(*means, strict=True))
    seeds = {r["seed"] for r in runs} & {r["seed"] for r in against}
    beside = "-"
    if seeds:
        mine, other = ([r["after"] for r in side if r["seed"] in seeds] for side in (runs, against))
        beside = shown(difference(mine, other))
    cells = [label, str(len(runs)), spread(means[0]), spread(means[1]), gain, f"{smallest:+.2f}", beside]
    return "| " + " | ".join([*cells, str(runs[0]["steps"])]) + " |"


HEAD = "| {} | seeds | before | after | gain | smallest gain | against {} | steps |\n" + "|---" * 8 + "|"


def table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown: one table a group; an arm is compared with the group's first."""
    found = sorted(found, key=lambda r: r["seed"])
    parts = []
    for group in dict.fromkeys(r["group"] for r in found):
        arms = {
            r["arm"]: [s for s in found if (s["group"], s["arm"]) == (group, r["arm"])]
            for r in found
            if r["group"] == group
        }
        order = [a for a in (*SHARINGS, *FAMILIES) if a in arms] + sorted(set(arms) - {*SHARINGS, *FAMILIES})
        first = order[0]
        lines = [HEAD.format(f"{group} ({arms[first][0]['metric']})", LABELS.get(first, first))]
        lines += [row(LABELS.get(a, a), arms[a], arms[first] if a != first else ()) for a in order]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*KINDS, "table", "keep"])
    parser.add_argument("--only", nargs="*", default=[], help="some teams, or some algorithms")
    parser.add_argument("--seeds", nargs="*", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument("--again", action="store_true", help="measure what the repository holds, too")
    words = parser.parse_args()
    out = words.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if words.kind == "keep":
        keep(results(out))
    elif words.kind != "table":
        make, num_seeds = KINDS[words.kind]
        jobs = make(words.seeds or range(num_seeds), words.only)
        run_all(jobs, out, 1 if words.kind == "smollm2" else words.jobs, words.again)
    print("\n" + table(results(out)))


if __name__ == "__main__":
    main()
