"""Folders of Rays that runs started, and the processes that write into them: both go with their owner.

Knows no Ray: a process belongs to a folder in which it holds a file open for writing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["addresses", "end", "new_folder"]

_LONGEST = 60
"""A socket's path has 107 bytes, of which Ray takes some 50 below its folder."""
_PROCESSES = Path("/proc")
_WRITES = 0o200


def new_folder() -> str:
    """A folder of its own whose path leaves room for the names of sockets; those of the dead go."""
    usual = Path(tempfile.gettempdir())
    root = usual if len(str(usual)) < _LONGEST else Path("/tmp")
    for left in root.glob("masflow-ray-*-*"):
        owner = left.name.split("-")[2]
        if owner.isdigit() and _PROCESSES.joinpath("self").exists() and not (_PROCESSES / owner).exists():
            end(str(left))
    return tempfile.mkdtemp(prefix=f"masflow-ray-{os.getpid()}-", dir=root)


def end(folder: str) -> None:
    """Kill what still writes into a folder, this process apart, and remove it."""
    for process in _writers(folder):
        with suppress(OSError):  # it has ended meanwhile, or is somebody else's
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def addresses() -> set[str]:
    """HOST:PORT of the heads of all such Rays that run."""
    found: set[str] = set()
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().decode(errors="replace")
            if "/masflow-ray-" in words:
                found.update(re.findall(r"--gcs-address=([^\s\0]+)", words))
    return found


def _writers(folder: str) -> list[int]:
    """Processes with a file of the folder open for writing; none where the system doesn't tell."""
    found = []
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):
            if int(process.name) != os.getpid() and any(
                os.readlink(file).startswith(f"{folder}/") and os.lstat(file).st_mode & _WRITES
                for file in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found
