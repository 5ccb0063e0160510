"""Where a workload's time goes in masflow: Python functions (cProfile), then operators (torch's profiler).

    python -m tests.bench.speed.profiled retrieval-1M conversation-1M > profiles.md

Each is a run of its own, since a profiler slows what it watches; a share of the time is what counts.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import re
import subprocess
import sys
from typing import Any

import torch

KINDS = ("python", "torch")
LINES = 16


class Profile:
    """A profiler that is started and stopped by hand; prints a table to standard error."""

    def __init__(self, kind: str):
        self.kind = kind
        self.python = cProfile.Profile()
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.torch: Any = torch.profiler.profile(activities=activities, acc_events=True)

    def start(self) -> None:
        self.python.enable() if self.kind == "python" else self.torch.start()

    def stop(self) -> None:
        if self.kind == "python":
            self.python.disable()
            table = self._functions()
        else:
            self.torch.stop()
            table = self._operators()
        print("\n".join(table), file=sys.stderr)

    def _functions(self) -> list[str]:
        stats: dict[Any, Any] = pstats.Stats(self.python).stats  # pyright: ignore[reportAttributeAccessIssue]
        whole = sum(own for _, _, own, _, _ in stats.values())
        ranked = sorted(stats.items(), key=lambda item: -item[1][2])[:LINES]
        lines = [
            f"{whole:.2f} s under cProfile",
            "",
            "| own time | with callees | calls | function |",
            "|---|---|---|---|",
        ]
        for (file, _, name), (_, calls, own, cumulative, _) in ranked:
            place = "/".join(file.split("/")[-2:]) if "/" in file else ""
            lines.append(f"| {own / whole:.1%} | {cumulative / whole:.1%} | {calls:,} | `{place}` {name} |")
        ours = sum(v[2] for k, v in stats.items() if "/masflow/" in k[0])
        return [*lines, "", f"masflow's own Python: {ours / whole:.1%}"]

    def _operators(self) -> list[str]:
        found = self.torch.key_averages()
        whole = sum(one.self_cpu_time_total for one in found)
        ranked = sorted(found, key=lambda one: -one.self_cpu_time_total)[:LINES]
        lines = [f"{whole / 1e6:.2f} s of operators", "", "| own time | calls | operator |", "|---|---|---|"]
        lines += [f"| {o.self_cpu_time_total / whole:.1%} | {o.count:,} | `{o.key}` |" for o in ranked]
        return lines


def main() -> None:
    from tests.bench.speed.make_models import made
    from tests.bench.speed.suite import workload

    for name in sys.argv[1:]:
        work = workload(name)
        for kind in KINDS:
            command = [
                sys.executable,
                "-m",
                "tests.bench.speed.side_masflow",
                work.text(),
                str(made(work.model)),
            ]
            done = subprocess.run(
                command, env={**os.environ, "BENCH_PROFILE": kind}, capture_output=True, text=True, check=True
            )
            table = done.stderr[re.search(r"[0-9.]+ s (under|of)", done.stderr).start() :]  # pyright: ignore
            print(f"### {name}: {kind}\n\n{table.strip()}\n", flush=True)


if __name__ == "__main__":
    main()
