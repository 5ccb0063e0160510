"""The table and the plots of what `pairs` measured.

python -m tests.bench.speed.report --out tests/bench/results
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from tests.bench.speed.suite import COMPARISONS

ROOT = Path(__file__).resolve().parents[3]
HEAD = "| workload | against | ratio, median (min to max) | bar | a second | extra memory, MB | |"
COLOURS = {"trl": "#4878a8", "comlrl": "#a86c48", "floor": "#7a7a7a"}


def results(folder: Path) -> list[dict[str, Any]]:
    """In the order of the suite."""
    files = [folder / f"{comparison.name}.json" for comparison in COMPARISONS]
    return [json.loads(file.read_text()) for file in files if file.is_file()]


def row(one: dict[str, Any]) -> str:
    ratio, ours, theirs = one["ratio"], *one["extra_mb"]
    rates = " and ".join(f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}" for rate in one["rates"])
    mark = {True: "reached", False: "**missed**", None: ""}[one["passed"]]
    bar = "" if one["bar"] is None else f"{one['bar']:.2g}"
    return (
        f"| {one['name'].rpartition('-')[0]} | {one['sides'][1]} | {ratio['median']:.2f} "
        f"({ratio['min']:.2f} to {ratio['max']:.2f}) | {bar} | {rates} {one['unit']} "
        f"| {ours:,.0f} and {theirs:,.0f} | {mark} |"
    )


def table(found: list[dict[str, Any]]) -> str:
    """Markdown, with what it was measured on."""
    lines = [HEAD, "|---|---|---|---|---|---|---|", *map(row, found), ""]
    for machine in {json.dumps(kept(one["machine"]), sort_keys=True) for one in found}:
        told = json.loads(machine)
        ours = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
        theirs = ", ".join(f"{name} {version}" for name, version in told["peers"].items())
        lines.append(f"{told['cpu']}, {told['cpus']} CPUs, Python {told['python']}, {told['system']}. ")
        lines.append(f"masflow with {ours}; peers: {theirs}. One thread on one CPU.")
    return "\n".join(lines) + "\n"


def kept(machine: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in machine.items() if key not in ("load", "time", "commit")}


def draw_ratios(found: list[dict[str, Any]], file: Path) -> None:
    """Every ratio of samples a second with its spread and its bar."""
    names = [one["name"] for one in found]
    places = range(len(found))
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(found) + 1.4), layout="constrained")
    middle = [one["ratio"]["median"] for one in found]
    low = [m - one["ratio"]["min"] for m, one in zip(middle, found, strict=True)]
    high = [one["ratio"]["max"] - m for m, one in zip(middle, found, strict=True)]
    colours = [COLOURS.get(one["sides"][1], "#88a848") for one in found]
    axes.barh(places, middle, xerr=[low, high], color=colours, height=0.7)
    bars = [(place, one["bar"]) for place, one in zip(places, found, strict=True) if one["bar"]]
    axes.plot([bar for _, bar in bars], [place for place, _ in bars], "k|", markersize=12, label="bar")
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("ratio of rates, first side to second (log scale)")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def draw_sizes(found: list[dict[str, Any]], file: Path) -> None:
    """Retrieval over model sizes: samples a second of masflow, TRL and the floor."""
    sizes = ("1M", "5M", "20M")
    known = {one["name"]: one for one in found}
    figure, axes = pyplot.subplots(figsize=(5, 3.6), layout="constrained")
    for label, other, side in (("masflow", "trl", 0), ("TRL", "trl", 1), ("floor", "floor", 1)):
        rates = [known[name]["rates"][side] for s in sizes if (name := f"retrieval-{s}-{other}") in known]
        shown = [s for s in sizes if f"retrieval-{s}-{other}" in known]
        axes.plot(shown, rates, "o-", label=label)
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("samples a second, retrieval")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "bench" / "results")
    folder = parser.parse_args().out
    found = results(folder)
    if not found:
        raise SystemExit(f"{folder} holds no results")
    (folder / "table.md").write_text(table(found))
    draw_ratios(found, folder / "ratios.png")
    draw_sizes(found, folder / "sizes.png")
    print(table(found))


if __name__ == "__main__":
    main()
