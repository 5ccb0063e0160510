"""Folders of Rays: what is left behind by those that are gone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from masflow.runtime import ray_folders

HOLDS = "import sys, time; file = open(sys.argv[1], sys.argv[2]); print(1, flush=True); time.sleep(100)"


def test_a_folder_whose_owner_is_gone_goes_with_its_writers_and_spares_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ray_folders, "_LONGEST", 10_000)  # pytest's own folders are deep
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"masflow-ray-{ended.pid}-abc"
    left.mkdir()
    log = left / "worker.out"
    log.touch()
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDS, str(log), mode], stdout=subprocess.PIPE)
        for mode in ("a", "r")
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None and holder.stdout.readline()
        new = Path(ray_folders.new_folder())
        assert new.is_dir() and not left.exists()
        assert holders[0].wait(10) == -9 and holders[1].poll() is None
        again = Path(ray_folders.new_folder())  # a folder of the living stays
        assert new.is_dir() and again.is_dir() and again != new
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
