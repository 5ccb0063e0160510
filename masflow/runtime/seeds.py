"""Several seeds of one experiment together: what they reached, how sure that is, and their curves.

Knows results and records, no plans. Intervals are Student's t over seeds: where the mean over all seeds lies,
with 95 % confidence, if they scatter about it normally.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from masflow.runtime.checkpoints import put_text
from masflow.runtime.progress import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SeedResult", "draw_seeds", "summary", "summary_text", "t_interval", "write_summary"]

Record = dict[str, Any]


@dataclass(frozen=True)
class SeedResult:
    """How one seed ended: with a run's result, or with an error."""

    seed: int
    out: Path
    result: dict[str, Any] | None = None
    error: str | None = None

    def score(self, key: str) -> float | None:
        """The held-out headline of `eval_before` or `eval_after`."""
        found = self.result[key] if self.result else None
        return found["metrics"].get(found["headline"]) if found else None


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean by Student's t; None for one value, which says nothing of the scatter."""
    if len(values) < 2:
        return None
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def t_quantile(freedom: int) -> float:
    """The t that |T| stays below in 95 % of cases (Abramowitz and Stegun, 26.7.3 and 26.7.4, inverted).

    Args:
        freedom: degrees of freedom, at least 1.
    """
    low, high = 1.9, 13.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """P(|T| < t)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, term, total = math.cos(angle), 1.0, 0.0
    odd = freedom % 2
    if odd:
        term = cosine
    for power in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


# -- the summary ----------------------------------------------------------------------------------


def summary(seeds: Sequence[SeedResult], out: Path) -> dict[str, Any]:
    """`eval_before`, `eval_after` and `gain` over seeds, and each seed's own.

    Returns:
        `{"steps", "eval_before", "eval_after", "gain", "out", "seeds": [{"seed", "out", "steps", "before",
        "after", "error"}]}`; each of the three is `{"mean", "sd", "low", "high", "seeds"}` or null.
    """
    gains = [(one.score("eval_before"), one.score("eval_after")) for one in seeds]
    return {
        "steps": max((one.result["steps"] for one in seeds if one.result), default=0),
        "eval_before": _spread(before for before, _ in gains),
        "eval_after": _spread(after for _, after in gains),
        "gain": _spread(b - a for a, b in gains if a is not None and b is not None),
        "out": str(out),
        "seeds": [
            {
                "seed": one.seed,
                "out": str(one.out),
                "steps": one.result["steps"] if one.result else None,
                "before": before,
                "after": after,
                "error": one.error,
            }
            for one, (before, after) in zip(seeds, gains, strict=True)
        ],
    }


def _spread(values: Iterable[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = t_interval(known) or (None, None)
    sd = stdev(known) if len(known) > 1 else None
    return {"mean": fmean(known), "sd": sd, "low": low, "high": high, "seeds": known}


def write_summary(found: dict[str, Any], out: Path) -> None:
    """`seeds.json` in the folder of all seeds."""
    put_text(out / "seeds.json", json.dumps(found, indent=1, default=str) + "\n")


def summary_text(found: dict[str, Any]) -> str:
    """A line before, a line after, a line for the gain; the seeds that failed."""
    lines = []
    for key, word in (("eval_before", "held out before"), ("eval_after", "held out after"), ("gain", "gain")):
        if one := found[key]:
            each = " ".join(number(value) for value in one["seeds"])
            text = f"{word + ':':<17}{number(one['mean'])}"
            if one["low"] is not None:
                text += (
                    f" ± {number(one['sd'])} sd, 95 % interval {number(one['low'])} to {number(one['high'])}"
                )
            lines.append(f"{text}   ({each})")
    lines.append(f"curves of all: {found['out']}/curves.png")
    lines += [f"seed {one['seed']} failed: {one['error']}" for one in found["seeds"] if one["error"]]
    return "\n".join(lines)


# -- curves ---------------------------------------------------------------------------------------


def draw_seeds(records: Mapping[int, Sequence[Record]], png: Path, svg: Path) -> None:
    """Held-out score and training reward: each seed, their mean, and its interval as a band.

    Args:
        records: seed → lines of its metrics.jsonl; without an evaluation or a step nothing is drawn.
    Raises:
        OSError: the files can't be written.
    """
    held_out = {seed: _points(found, "eval", "metrics") for seed, found in records.items()}
    rewards = {seed: _points(found, "train", "rewards") for seed, found in records.items()}
    name = next((r["headline"] for found in records.values() for r in found if r["kind"] == "eval"), None)
    if name is None and not any(rewards.values()):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "masflow"
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8))
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.13, top=0.91, wspace=0.13)
    for axis, title, found in zip(
        axes, (f"held-out {name}", "training reward"), (held_out, rewards), strict=True
    ):
        axis.set_title(f"{title}, {len(records)} seeds", loc="left", fontsize=10)
        _band(axis, list(found.values()))
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("step")
    figure.savefig(png, dpi=120, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None})
    plt.close(figure)


def _points(records: Sequence[Record], kind: str, part: str) -> dict[int, float]:
    """Step → the headline, of training records the reward of that name (or the first)."""
    name = next((r["headline"] for r in records if r["kind"] == "eval"), None)
    found = {}
    for record in (r for r in records if r["kind"] == kind):
        values = record[part]
        value = values.get(name, next(iter(values.values()), None))
        if value is not None:
            found[record["step"]] = float(value)
    return found


def _band(axis: Axes, seeds: Sequence[dict[int, float]]) -> None:
    for points in seeds:
        axis.plot(list(points), list(points.values()), color="#1f5fa8", alpha=0.25, linewidth=0.9)
    steps = sorted({step for points in seeds for step in points})
    values = [[points[step] for points in seeds if step in points] for step in steps]
    if not steps:
        return
    axis.plot(steps, [fmean(v) for v in values], color="#1f5fa8", linewidth=1.8, label="mean")
    bands = [(step, *found) for step, v in zip(steps, values, strict=True) if (found := t_interval(v))]
    if bands:
        at, low, high = zip(*bands, strict=True)
        axis.fill_between(
            at, low, high, color="#1f5fa8", alpha=0.15, linewidth=0, label="95 % of the mean (t)"
        )
    axis.legend(frameon=False, fontsize=8)
