"""One process in its sandbox: how it is started, what it writes, what it uses, and how it ends.

Knows nothing of tests. With `limits_only` there is no sandbox, and all that holds a program are its limits.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from masflow.descriptors import readable
from masflow.spec.tools import PythonSettings as Limits
from masflow.tools.syscalls import seccomp_filter

__all__ = ["PYTHONS", "Box", "Limits", "nameless_file", "pumped", "python_of"]

PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
"""Of the system: an unprivileged user can't read one in somebody's home."""
NOBODY = 65534
LOOK_S, DRAIN_S = 0.05, 1.0
HERE = Path(__file__).parent
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
MAX_NAMES = 4096
"""Of files, as far as that is seen in time."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def python_of(mode: str) -> str:
    found = next((os.path.realpath(place) for place in PYTHONS if os.path.exists(place)), "")
    return found or (sys.executable if mode == "limits_only" else "")


# -- one sandbox ----------------------------------------------------------------------------------


@cache
def _source(*names: str) -> str:
    """Files of this folder as one text."""
    texts = [(HERE / f"{name}.py").read_text() for name in names]
    between = re.compile(r"^from (__future__|masflow\.tools\._\w+) import .*\n", re.MULTILINE)
    return "\n".join(between.sub("", text) for text in texts)


@cache
def _compiled(python: str, *names: str) -> bytes:
    """The same, read by the Python that will run it: reading it anew costs as much as the sandbox does."""
    code = "import marshal, sys\nread, write = sys.stdin.buffer.read, sys.stdout.buffer.write\n"
    code += "write(marshal.dumps(compile(read(), 'sandbox', 'exec')))"
    made = subprocess.run(
        [python, "-s", "-S", "-B", "-c", code], input=_source(*names).encode(), stdout=subprocess.PIPE,
        env=ENVIRONMENT, check=True,
    )  # fmt: skip
    return made.stdout


def _command(mode: str, limits: Limits, call: str, is_first: bool, filter_fd: int) -> list[str]:
    python = python_of(mode)
    run = [python, "-s", "-S", "-B", "-c", call]
    if mode == "limits_only":
        return run
    folders = [place for place in ("/usr/lib", "/usr/lib64") if os.path.isdir(place)]
    if python.startswith("/usr/local/"):
        folders.append("/usr/local/lib")
    binds = [part for place in (*folders, python) for part in ("--ro-bind", place, place)]
    for place in ("/lib", "/lib64"):
        if os.path.islink(place):
            binds += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            binds += ["--ro-bind", place, place]
    return [
        "bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--uid", str(NOBODY),
        "--gid", str(NOBODY),
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        *(["--as-pid-1"] if is_first else []), *(["--seccomp", str(filter_fd)] if filter_fd else []),
        *binds, "--dev", "/dev", "--remount-ro", "/dev",
        "--size", str(limits.tmpfs_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", *run,
    ]  # fmt: skip


class Box:
    """One process in its sandbox, and what it writes. Ends with everything that it started."""

    def __init__(
        self,
        mode: str,
        limits: Limits,
        parts: Sequence[str],
        call: str,
        fds: Sequence[int],
        *,
        stdin: Any = subprocess.DEVNULL,
        is_first: bool = True,
    ):
        """
        Args:
            parts: the files of this folder that run inside, and then `call`.
            fds: descriptors that it has besides its standard streams.
            is_first: it is its sandbox's first process, which the others can't end.
        """
        self.limits = limits
        processes = limits.processes if mode == "bubblewrap" else 0
        numbers = (limits.memory_mb << 20, limits.cpu_s, processes, limits.file_mb << 20)
        is_root = os.geteuid() == 0 and mode == "bubblewrap"
        # for the real root the limit of processes counts for nothing, whoever it is inside
        user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if is_root else {}
        self.home = tempfile.TemporaryDirectory(prefix="masflow-") if mode == "limits_only" else None
        home = self.home.name if self.home else "/tmp"
        filter_data = seccomp_filter() if mode == "bubblewrap" else b""
        inside = nameless_file(_compiled(python_of(mode), *parts))
        with nameless_file(filter_data) as filter_file, inside:
            filter_fd = filter_file.fileno() if filter_data else 0
            call = (
                f"import marshal\nexec(marshal.loads(open({inside.fileno()}, 'rb').read()))\n"
                f"limit{numbers}\n{call}"
            )
            self.process = subprocess.Popen(
                _command(mode, limits, call, is_first, filter_fd), stdin=stdin, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, pass_fds=(*fds, inside.fileno(), *([filter_fd] if filter_fd else [])),
                start_new_session=True, env=ENVIRONMENT | {"HOME": home}, cwd=home, **user,
            )  # fmt: skip
        assert self.process.stdout and self.process.stderr
        self.pipes = [self.process.stdout, self.process.stderr]
        self.said = {pipe.fileno(): bytearray() for pipe in self.pipes}
        self.open = set(self.said)
        self.num_said = 0
        self._looked_at = 0.0

    def read(self, descriptor: int) -> None:
        """What has come on one of `open`."""
        data = os.read(descriptor, 1 << 16)
        if not data:
            self.open.discard(descriptor)
        kept = self.said[descriptor]
        kept += data[: max(0, (self.limits.output_kb << 10) - len(kept))]
        self.num_said += len(data)

    def trouble(self) -> str:
        """Why it has to end now; empty: it doesn't."""
        if self.num_said > self.limits.output_kb << 14:
            return "output"
        if time.monotonic() - self._looked_at < LOOK_S:
            return ""
        self._looked_at = time.monotonic()
        pids = _family(self.process.pid)
        if _resident_bytes(pids) > self.limits.memory_mb << 20:
            return "memory"
        return "files" if _num_files(pids, self.limits.tmpfs_mb << 20) > MAX_NAMES else ""

    def texts(self) -> tuple[str, str]:
        """Standard output and error."""
        out, err = (bytes(kept).decode("utf-8", "replace") for kept in self.said.values())
        return out, err

    def close(self) -> None:
        if self.pipes[0].closed:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        end = time.monotonic() + DRAIN_S
        while self.open and (left := end - time.monotonic()) > 0:
            for descriptor in readable(self.open, left):
                self.read(descriptor)
        for pipe in self.pipes:
            pipe.close()
        if self.home:
            self.home.cleanup()


def _family(pid: int) -> list[int]:
    """A process and all that it started."""
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        with suppress(OSError, ValueError):
            for thread in Path(f"/proc/{found[-1]}/task").iterdir():
                left += map(int, (thread / "children").read_text().split())
    return found


def _resident_bytes(pids: Sequence[int]) -> int:
    """What processes share counts each time. 0 where nobody says."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return total


def _num_files(pids: Sequence[int], size: int) -> int:
    """In the sandbox's own file system, known by its size in bytes: names of empty files fill no page, but
    memory of the kernel. 0 where nobody says."""
    for pid in pids:
        with suppress(OSError):
            there = os.statvfs(f"/proc/{pid}/root/tmp")
            if there.f_blocks * there.f_frsize == size:
                return there.f_files - there.f_ffree
    return 0


def pumped(boxes: Sequence[Box], more: Sequence[int], end: float) -> tuple[list[int], str]:
    """Read what boxes say, for a moment. Which of `more` can be read, and why it has to end."""
    known = {descriptor: box for box in boxes for descriptor in box.open}
    left = min(LOOK_S, end - time.monotonic())
    if left <= 0:
        return [], "timeout"
    if not known and not more:
        time.sleep(min(left, 0.005))
    ready_now = readable([*known, *more], left) if known or more else []
    for descriptor in ready_now:
        if descriptor in known:
            known[descriptor].read(descriptor)
    trouble = next((words for box in boxes if (words := box.trouble())), "")
    return [descriptor for descriptor in ready_now if descriptor not in known], trouble


def nameless_file(data: bytes) -> IO[bytes]:
    """A file without a name, to be read from its beginning; whoever gets it can't write to it."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return open(f"/proc/self/fd/{file.fileno()}", "rb")
