"""The wheel ships what git tracks: the package and a copy of the content folders, nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTENT = ("workflows", "rewards", "mappings", "runtime", "examples")


def tracked(folder: str) -> set[str]:
    done = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return {name for name in done.stdout.splitlines() if (ROOT / name).exists()}


def test_the_wheel_holds_exactly_the_tracked_package_and_content(tmp_path):
    ignored = ROOT / "examples" / "__pycache__"
    ignored.mkdir(exist_ok=True)
    probe = ignored / "ignored_by_git.pyc"
    probe.write_text("must not be published")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        probe.unlink()
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = tracked("masflow") | {
        f"masflow/_library/{name}" for folder in CONTENT for name in tracked(folder)
    }
    untracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    names -= set(untracked) | {f"masflow/_library/{name}" for name in untracked}
    assert names == expected
