"""Differences on the same held-out rows, with bootstrap intervals over rows; scores are read from traces."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

Rows = dict[str, float]
"""Task id → score."""


def scores_of(run: Path, step: int, metric: str, split: str = "eval") -> Rows:
    """The greedy score of every held-out row at a step of a run; unscored rows are left out."""
    with closing(sqlite3.connect(f"{(run / 'trace.sqlite').absolute().as_uri()}?mode=ro", uri=True)) as db:
        found = db.execute(
            "SELECT task_id, metrics FROM trajectories WHERE step=? AND split=? AND sample=0", (step, split)
        ).fetchall()
    scores = {task: json.loads(metrics).get(metric) for task, metrics in found}
    if not scores:
        raise SystemExit(f"{run}: no held-out episodes at step {step}")
    return {task: float(value) for task, value in scores.items() if value is not None}


def difference(
    after: Sequence[Rows], before: Sequence[Rows], resamples: int = 4000, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, low, high) of after - before over rows: 95 % percentile bootstrap (Efron and Tibshirani 1993,
    chapter 13).

    A row's difference is its mean over the seeds, so that rows and not runs are drawn anew: the interval
    tells how far other held-out rows might move it, not other seeds.

    Args:
        after, before: one a seed, in the same order; rows that both know are compared.
    Raises:
        SystemExit: another number of seeds, or no row in common.
    """
    if len(after) != len(before):
        raise SystemExit(f"{len(after)} runs can't be paired with {len(before)}")
    shared = sorted(set.intersection(*(set(rows) for rows in (*after, *before))))
    if not shared:
        raise SystemExit("the two sides have no held-out row in common")
    gains_SR = np.array([[a[t] - b[t] for t in shared] for a, b in zip(after, before, strict=True)])
    gain_R = gains_SR.mean(0)
    rng = np.random.default_rng(seed)
    means = gain_R[rng.integers(0, len(gain_R), (resamples, len(gain_R)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(gain_R.mean()), float(low), float(high)


def shown(found: tuple[float, float, float]) -> str:
    mean, low, high = found
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def mean_of(rows: Mapping[str, float]) -> float:
    return sum(rows.values()) / len(rows)
