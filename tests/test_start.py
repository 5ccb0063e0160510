"""A command's start costs little beside what importing its libraries costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = "import torch, transformers; from transformers import Qwen3ForCausalLM"


def cpu_s(*words: str) -> float:
    """CPU seconds of a Python process and its children; the better of two, so that files are in memory."""
    found = []
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
        after = os.times()
        found.append(
            after.children_user - before.children_user + after.children_system - before.children_system
        )
    return min(found)


@pytest.mark.parametrize("command", ["run", "eval", "train"])
def test_what_is_wrong_with_the_files_is_told_before_torch_is_imported(command: str, tmp_path: Path):
    file = tmp_path / "wrong.yaml"
    file.write_text((ROOT / "examples" / "quickstart.yaml").read_text().replace("steps: 60", "steps: many"))
    words = [sys.executable, "-X", "importtime", "-m", "masflow", command, str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 1
    assert "masflow.compiler.pipeline" in imported and not imported & {"torch", "transformers", "ray"}


@pytest.mark.slow
def test_a_run_of_one_episode_takes_little_more_than_importing_its_libraries():
    # 1.0 measured; the bound is 1.5
    assert cpu_s("-m", "masflow", "run", "examples/quickstart.yaml", "--json") <= 1.5 * cpu_s("-c", LIBRARIES)
