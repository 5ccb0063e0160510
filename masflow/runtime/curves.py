"""Learning curves: PNG and SVG from the records of metrics.jsonl. Knows neither plans nor models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
COLOURS = ("#1f5fa8", "#c2571a", "#2b8a4b", "#8a3a8f", "#a8921f", "#5b6770")


def draw_curves(records: Sequence[Record], png: Path, svg: Path) -> None:
    """Four panels: held-out scores, training reward a role, what could be learned, replies a role.

    Args:
        records: lines of metrics.jsonl; without a training or evaluation record nothing is drawn.
    Raises:
        OSError: the files can't be written.
    """
    if not any(record["kind"] in ("train", "eval") for record in records):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "masflow"
    figure, axes = plt.subplots(2, 2, figsize=(11, 7))
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.075, top=0.95, wspace=0.13, hspace=0.28)
    train = [record for record in records if record["kind"] == "train"]
    _held_out(axes[0][0], [record for record in records if record["kind"] == "eval"])
    _training(axes[0][1], train)
    _learnable(axes[1][0], train)
    _rates(axes[1][1], train)
    for axis in axes.flat:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("step")
        if axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False, fontsize=8)
    figure.savefig(png, dpi=120, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None})
    plt.close(figure)


def _line(axis: Axes, points: list[tuple[int, float | None]], label: str, **style: Any) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if known:
        axis.plot([x for x, _ in known], [y for _, y in known], label=label, linewidth=1.6, **style)


def _held_out(axis: Axes, records: Sequence[Record]) -> None:
    axis.set_title("held-out score", loc="left", fontsize=10)
    if not records:
        return
    name = records[-1]["headline"]
    _line(
        axis,
        [(r["step"], r["metrics"].get(name)) for r in records],
        f"team {name}, greedy",
        color="black",
        marker="o",
    )
    sampled = [(r["step"], r["sampled"]["mean"]) for r in records if "sampled" in r]
    _line(axis, sampled, f"team {name}, sampled", color="grey", marker="o", linestyle="--")
    others = [(role, metric) for role, found in records[-1]["roles"].items() for metric in own_metrics(found)]
    for (role, metric), colour in zip(others, COLOURS, strict=False):
        points = [(r["step"], r["roles"].get(role, {}).get(metric)) for r in records]
        _line(axis, points, f"{role} {metric}", color=colour, marker=".")
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))


RATES = ("turns", "reward", "malformed_frac", "truncated_frac", "reply_tokens", "tool_call_error_frac")


def own_metrics(role: dict[str, Any]) -> list[str]:
    """Names of a role's own correctness: rewards paid to its turns alone."""
    return [name for name in role if name not in RATES]


def _training(axis: Axes, train: Sequence[Record]) -> None:
    """Each role's reward, one line where all roles are paid alike; beside it each role's own correctness."""
    title = "training reward and each role's own correctness"
    rewards = [{role: found.get("reward") for role, found in record["roles"].items()} for record in train]
    if all(len(set(found.values())) <= 1 for found in rewards):
        axis.set_title(title, loc="left", fontsize=10)
        team = [next(iter(found.values()), None) for found in rewards]
        _line(axis, list(zip((r["step"] for r in train), team, strict=True)), "team", color="black")
    else:
        _by_role(axis, train, title, lambda role: role.get("reward"))
    own = {(role, name) for r in train for role, found in r["roles"].items() for name in own_metrics(found)}
    for (role, metric), colour in zip(sorted(own), COLOURS * len(own), strict=False):
        points = [(r["step"], r["roles"].get(role, {}).get(metric)) for r in train]
        _line(axis, points, f"{role} {metric}", color=colour, alpha=0.8)
    axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))


def _by_role(
    axis: Axes, train: Sequence[Record], title: str, value: Callable[[Record], float | None]
) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    names = sorted({role for record in train for role in record["roles"]})
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        _line(axis, [(r["step"], value(r["roles"].get(name, {}))) for r in train], name, color=colour)


def _learnable(axis: Axes, train: Sequence[Record]) -> None:
    axis.set_title("groups whose rewards differ (what can be learned from)", loc="left", fontsize=10)
    axis.set_ylim(0, 1.02)
    _line(
        axis, [(r["step"], r["batch"].get("learnable_group_frac")) for r in train], "learnable", color="black"
    )


def _rates(axis: Axes, train: Sequence[Record]) -> None:
    _by_role(
        axis, train, "replies cut at the budget (dashed: malformed)", lambda role: role.get("truncated_frac")
    )
    names = sorted({role for record in train for role in record["roles"]})
    for name, colour in zip(names, COLOURS * len(names), strict=False):
        points = [(r["step"], r["roles"].get(name, {}).get("malformed_frac")) for r in train]
        known = [(x, y) for x, y in points if y is not None]
        axis.plot([x for x, _ in known], [y for _, y in known], color=colour, linestyle="--", linewidth=1.0)
    axis.set_ylim(-0.02, 1.02)
