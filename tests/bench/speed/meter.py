"""What a side measures of itself between two points of its run, and how it says it. Knows no library."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def resident_mb(key: str = "VmRSS") -> float:
    """Memory of this process: `VmRSS` now, `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forget_peak() -> None:
    """Let the peak begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


@dataclass
class Meter:
    """Seconds and memory from the first step's end to the last one's."""

    samples: int
    """Of one step."""
    steps: int
    """Measured, after the first."""
    done: int = 0
    began: tuple[float, float] = (0.0, 0.0)
    loaded_mb: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def loaded(self) -> None:
        """Call when libraries are imported and models loaded, before the first step."""
        self.loaded_mb = resident_mb()
        forget_peak()

    def step(self) -> None:
        """Call at the end of each step."""
        self.done += 1
        if self.done == 1:
            self.began = time.perf_counter(), time.process_time()
        if self.done == self.steps + 1:
            wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
            samples = self.samples * self.steps
            self.facts |= {
                "wall_s": round(wall, 4),
                "cpu_s": round(cpu, 4),
                "samples_per_s": round(samples / wall, 3),
                "samples_per_cpu_s": round(samples / cpu, 3),
                "samples": samples,
            }

    def tell(self, **facts: Any) -> None:
        """Print the result as the last line."""
        peak = resident_mb("VmHWM")
        memory = {"peak_mb": round(peak, 1), "extra_mb": round(peak - self.loaded_mb, 1)}
        print(json.dumps({**self.facts, **memory, **facts}), flush=True)


def pin() -> None:
    """One CPU, one thread."""
    wanted = int(os.environ.get("BENCH_CPU", "-1"))
    if wanted >= 0:
        os.sched_setaffinity(0, {wanted})
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
