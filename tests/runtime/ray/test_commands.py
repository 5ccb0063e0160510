"""The commands with a Ray runtime, as a person types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_run_is_interrupted_scored_and_continued(toy: Callable[..., Path]) -> None:
    experiment = toy(("steps: 4, tasks", "steps: 400, patience: 400, tasks"))
    root = experiment.parent
    (root / "echo.py").write_text(
        "import time\n"
        + (root / "echo.py").read_text().replace("    return", "    time.sleep(0.02)\n    return")
    )
    (root / "ray.yaml").write_text("{backend: ray, threads: 1}")
    out = root / "run"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "masflow", *words, "--runtime", str(root / "ray.yaml")]

    train = command("train", str(experiment), "--out", str(out))
    with subprocess.Popen(train, stdout=-1, stderr=-1, text=True, env=environment) as running:
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and not (out / "checkpoints/step_000001").exists():
            time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        said, told = running.communicate(timeout=100)
    assert running.returncode == 130 and f"continue with --resume --out {out}" in told and not said
    assert "raylet" not in told and "ray::" not in told
    scored = subprocess.run(
        command("eval", str(experiment), "--checkpoint", str(out), "--json"),
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["episodes"] == 3
