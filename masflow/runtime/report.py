"""Results as text for people: evaluations, the end of a run, one episode. Prints nothing itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from masflow.library import shown_path
from masflow.runtime.curves import RATES, own_metrics
from masflow.runtime.progress import number
from masflow.runtime.recorded import place_text, printable
from masflow.trace import Effect, Scored, Turn, path_json


def table(rows: list[list[str]], indent: str = "  ") -> str:
    """Columns aligned by blanks; the first one to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        indent
        + "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def sampled_text(found: dict[str, Any]) -> str:
    """`0.79 [0.75, 0.83]`, or a dash."""
    sampled = found.get("sampled")
    if not sampled:
        return "-"
    return f"{number(sampled['mean'])} [{number(sampled['low'])}, {number(sampled['high'])}]"


def eval_text(found: dict[str, Any]) -> str:
    """An evaluation: rewards, roles, outcomes."""
    name = found["headline"]
    lines = [
        f"{found['episodes']} tasks of '{found['split']}'",
        f"{name}: {number(found['metrics'].get(name))} greedy",
    ]
    if "sampled" in found:
        lines[-1] += f", {sampled_text(found)} over {found['sampled']['samples']} samples a task"
    lines += ["", table([[key, number(value)] for key, value in found["metrics"].items()])]
    if "sources" in found:
        sources = [
            [source, str(one["tasks"]), number(one["rewards"].get(name))]
            for source, one in found["sources"].items()
        ]
        lines += ["", table([["source", "tasks", name], *sources])]
    columns = ["role", "turns", "reward", "malformed_frac", "truncated_frac", "own"]
    rows = [columns]
    for role, own in found["roles"].items():
        mine = "  ".join(f"{key} {number(own[key])}" for key in own_metrics(own))
        rows.append([role, *(number(own.get(key)) for key in columns[1:-1]), mine or "-"])
    lines += [
        "",
        table(rows),
        "",
        "outcomes: " + ", ".join(f"{key} {n}" for key, n in found["outcomes"].items()),
    ]
    return "\n".join(lines)


def result_text(result: dict[str, Any], experiment: Path, options: str = "") -> str:
    """The end of a run: held-out scores before and after, where the curve is, what to try next.

    Args:
        options: the words of the run's command that a command on its checkpoint needs too.
    """
    out = Path(result["out"])
    shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    lines = ["", *scores(result)] if result["eval_before"] or result["eval_after"] else [""]
    if (out / "curves.png").exists():
        lines += ["", f"curves   {shown}/curves.png"]
    lines += [f"run      {shown}", "", "next"]
    name = shown_path(experiment)
    on_it = f"{name}{options and ' '}{options} --checkpoint {shown}"
    tries = [
        ("watch the team work on one task", f"masflow run {on_it}"),
        ("score it again, sampled", f"masflow eval {on_it} --samples 4"),
    ]
    if result["steps"]:
        tries.append(("take it along, for transformers", f"masflow export {shown} --to {shown}/export"))
    if "--mapping" not in options:
        tries.append(("one model a role", f"masflow train {name} --mapping lib:separate"))
    return "\n".join([*lines, *(f"  {why:<33}{command}" for why, command in tries)])


def scores(result: dict[str, Any]) -> list[str]:
    """Held-out scores side by side: the team's rewards, then each role's own correctness."""
    before, after = result["eval_before"] or {}, result["eval_after"] or {}
    one = after or before
    name = one["headline"]

    def cells(label: str, old: Any, new: Any) -> list[str]:
        return [label, number(old), number(new)]

    rows = [["", "before", "after"]]
    rows.append(cells(f"team {name}, greedy", *(e.get("metrics", {}).get(name) for e in (before, after))))
    if "sampled" in one:
        rows.append([f"team {name}, sampled", *(sampled_text(e) for e in (before, after))])
    for source in one.get("sources", {}):
        parts = (e.get("sources", {}).get(source, {}) for e in (before, after))
        rows.append(cells(f"team {name} on {source}", *(p.get("rewards", {}).get(name) for p in parts)))
    for role, found in one["roles"].items():
        for metric in own_metrics(found):
            values = (e.get("roles", {}).get(role, {}).get(metric) for e in (before, after))
            rows.append(cells(f"{role} {metric}", *values))
    shown = {key for found in one["roles"].values() for key in found} | set(RATES)
    for metric in one["metrics"]:
        values = [e.get("metrics", {}).get(metric) for e in (before, after)]
        if metric != name and metric not in shown and values != [None, None]:
            rows.append(cells(metric, *values))
    return [f"held out, {one['episodes']} tasks", table(rows)]


def turn_text(turn: Turn, rewards: dict[str, float | None], total: float | None) -> str:
    """One turn: who, what it read, what it said, what it was paid."""
    place = "/".join(map(place_text, turn.path))
    tokens = f"{turn.prompt_tokens}+{turn.reply_tokens} tokens"
    lines = [f"── {place} · {turn.member} ({turn.policy}) · {turn.outcome} · {tokens}"]
    for message in turn.messages:
        lines += [f"  {message.role}: " + message.content.replace("\n", "\n    ")]
    lines.append("  reply: " + turn.text.replace("\n", "\n    "))
    if turn.detail:
        lines.append(f"  why: {turn.detail}")
    if rewards:
        paid = ", ".join(f"{name} {number(value)}" for name, value in rewards.items())
        lines.append(f"  rewards: {paid}; total {number(total)}")
    return "\n".join(lines)


def effect_text(effect: Effect) -> str:
    """One tool's use, function's call or person's answer."""
    place = "/".join(map(place_text, effect.path))
    given = f" {effect.args}" if effect.args else ""
    return f"── {place} · {effect.kind}{given}\n  result: {effect.error or effect.value}"


def trajectory_text(scored: Scored) -> str:
    """One episode in the order in which things happened."""
    one = scored.trajectory
    lines = [f"task: {one.task}"]
    for event in sorted((*one.turns, *one.effects), key=lambda event: event.superstep):
        if isinstance(event, Turn):
            text = turn_text(event, scored.components.get(event.id, {}), scored.totals.get(event.id))
        else:
            text = effect_text(event)
        lines += ["", text]
    lines += [
        "",
        f"outcome: {one.outcome}" + (f" ({one.detail})" if one.detail else ""),
        f"output: {one.output}",
    ]
    for failure in scored.failures:
        lines.append(f"unscored: {failure}")
    return printable("\n".join(lines))


def trajectory_json(scored: Scored) -> dict[str, Any]:
    """The trajectory, its turns with their rewards."""
    one = scored.trajectory
    turns = [
        {
            **{k: v for k, v in asdict(turn).items() if k != "path"},
            "path": path_json(turn.path),
            "rewards": scored.components.get(turn.id, {}),
            "total": scored.totals.get(turn.id),
        }
        for turn in one.turns
    ]
    effects = [{**asdict(effect), "path": path_json(effect.path)} for effect in one.effects]
    return {
        "id": one.id,
        "task": one.task,
        "outcome": one.outcome,
        "detail": one.detail,
        "output": one.output,
        "turns": turns,
        "effects": effects,
        "rewards": scored.metrics,
        "failures": list(scored.failures),
    }
