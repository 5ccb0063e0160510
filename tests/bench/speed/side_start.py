"""What a start costs: `masflow run` on the quickstart, from start to end, or importing its libraries.

    python -m tests.bench.speed.side_start (run|imports)

`run` counts the whole command: start, compiling, loading, both turns, printing. `imports` is torch,
transformers and the class of the quickstart's model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
IMPORTS = "import torch, transformers; from transformers import Qwen3ForCausalLM"
TIMES = 2


def spent(command: list[str]) -> tuple[float, float]:
    """Seconds of the clock and of the CPU, of the command and its children."""
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    wall, after = time.perf_counter() - began, os.times()
    assert done.returncode == 0, done.stderr[-2000:]
    return wall, after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="masflow-") as place:
        run = [sys.executable, "-m", "masflow", "run", "examples/quickstart.yaml", "--out", place, "--json"]
        command = run if sys.argv[1] == "run" else [sys.executable, "-c", IMPORTS]
        spent(command)
        found = [spent(command) for _ in range(TIMES)]
    wall, cpu = (min(one[i] for one in found) for i in (0, 1))
    facts = {"wall_s": wall, "cpu_s": cpu, "samples_per_s": 1 / wall, "samples_per_cpu_s": 1 / cpu}
    print(json.dumps({key: round(value, 4) for key, value in facts.items()}))


if __name__ == "__main__":
    main()
