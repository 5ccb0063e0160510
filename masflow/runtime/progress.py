"""What a person sees of a run: bars and a live table on a terminal, lines elsewhere. Changes nothing."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

PLAIN_EVERY_S = 5.0


def number(value: Any, digits: int = 3) -> str:
    """A number for people; an unknown one is a dash."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


class Display:
    """Shows the events of a controller; use as a context manager."""

    def __init__(self, steps: int, warm_steps: int, console: Console | None = None):
        self.console = console or Console(stderr=True)
        self.steps, self.warm_steps = steps, warm_steps
        self.live: Live | None = None
        self.progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bars: dict[str, Any] = {}
        self._table = Table.grid()
        self._told = 0.0

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.live = Live(Group(self._table, self.progress), console=self.console, refresh_per_second=4)
            self.live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*error)
            self.live = None

    def __call__(self, kind: str, facts: dict[str, Any]) -> None:
        show = getattr(self, f"_on_{kind}", None)
        if show is not None:
            show(facts)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _bar(self, name: str, done: int, total: int) -> None:
        if self.live is None:
            return
        if name not in self._bars:
            self._bars[name] = self.progress.add_task(name, total=total)
        self.progress.update(self._bars[name], completed=done, total=total)

    def _rarely(self) -> bool:
        """True at most every few seconds, so that a log stays short."""
        if time.monotonic() - self._told < PLAIN_EVERY_S:
            return False
        self._told = time.monotonic()
        return True

    def _on_start(self, facts: dict[str, Any]) -> None:
        begun = f"resumed at step {facts['step']}" if facts["resumed"] else "new run"
        self._say(f"{begun} in {facts['out']}")
        for name, model in facts["models"].items():
            if "endpoint" in model:
                self._say(f"  {name}: {model['model']} at {model['endpoint']}")
                continue
            learned = sum(model["trainable"].values())
            sizes = (
                f"{model['parameters']:,} parameters, {learned:,} trained, vocabulary {model['vocabulary']:,}"
            )
            self._say(f"  {name}: {sizes}, context {model['context']}, {model['dtype']} on {model['device']}")
            for critic, found in model.get("critics", {}).items():
                heads = ", ".join(found["roles"])
                self._say(
                    f"    critic {critic}: {found['parameters']:,} trained parameters, values of {heads}"
                )
            for note in model.get("notes", ()):
                self._say(f"    {note}")

    def _on_warm_start(self, facts: dict[str, Any]) -> None:
        self._bar("warm start", facts["step"], self.warm_steps)
        if self.live is None and (facts["step"] in (1, self.warm_steps) or self._rarely()):
            losses = "  ".join(
                f"{name} loss {number(m.get('loss'))}" for name, m in facts["policies"].items()
            )
            self._say(f"warm start {facts['step']}/{self.warm_steps}  {losses}")

    def _on_eval_progress(self, facts: dict[str, Any]) -> None:
        self._bar("held out", facts["done"], facts["total"])

    def _on_eval(self, facts: dict[str, Any]) -> None:
        name = facts["headline"]
        text = f"held out at step {facts['step']}: {name} {number(facts['metrics'].get(name))} greedy"
        if "sampled" in facts:
            text += f", {number(facts['sampled']['mean'])} sampled"
        self._say(text)

    def _on_train(self, facts: dict[str, Any]) -> None:
        self._bar("training", facts["step"], self.steps)
        if self.live is not None:
            self._table = step_table(facts)
            self.live.update(Group(self._table, self.progress))
        elif facts["step"] in (1, self.steps) or self._rarely():
            rewards = "  ".join(f"{name} {number(value)}" for name, value in facts["rewards"].items())
            learnable = number(facts["batch"].get("learnable_group_frac"), 2)
            speed = facts["time"]["tokens_per_s"]
            self._say(
                f"step {facts['step']}/{self.steps}  {rewards}  learnable {learnable}  {speed:.0f} tokens/s,"
                f" {facts['concurrency']:.0f} replies at once"
            )

    def _on_warning(self, facts: dict[str, Any]) -> None:
        self.console.print(f"WARNING: {facts['message']}", style="bold yellow", markup=False, soft_wrap=True)

    def _on_end(self, facts: dict[str, Any]) -> None:
        self._told = 0.0


def step_table(facts: dict[str, Any]) -> Table:
    """The live table: a row a role, and what the whole step could learn from."""
    speed = facts["time"]["tokens_per_s"]
    learnable = number(facts["batch"].get("learnable_group_frac"), 2)
    title = f"step {facts['step']}   learnable groups {learnable}   {speed:.0f} tokens/s"
    title += f"   {facts['concurrency']:.0f} replies at once"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    keys = ["reward", "truncated_frac", "malformed_frac"]
    columns = ["role", "reward", "truncated", "malformed"]
    if any("tool_call_error_frac" in found for found in facts["roles"].values()):
        keys, columns = [*keys, "tool_call_error_frac"], [*columns, "bad tool calls"]
    for column in (*columns, "reply tokens", "own"):
        table.add_column(column, justify="left" if column in ("role", "own") else "right")
    from masflow.runtime.curves import own_metrics

    for role, found in facts["roles"].items():
        own = "  ".join(f"{name} {number(found[name])}" for name in own_metrics(found))
        rates = (number(found.get(key)) for key in keys)
        table.add_row(role, *rates, number(found.get("reply_tokens"), 1), own)
    return table
