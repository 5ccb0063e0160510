"""Run untrusted programs, such as models write, and judge them by tests.

Under bubblewrap a program has no network, sees no file of the host but its Python, no process but its own,
and runs as a user without rights under limits on time, memory, processes, files and output. Its verdicts are
made where it can't reach: in a second sandbox that holds the tests and asks the program for values. Knows no
workflow and no reward. A program costs some 40 ms, one with its tests 55 ms and 7 ms a verdict.

What remains possible: a program may give right values without being right in general (tests are what they
are); where a test leaves a whole judgement to an object of the program's own class (`assert obj`, `a == b`
between two of them, `obj.is_ok()`), the program answers it, as anywhere; a test that evaluates text from the
program gives its own verdict away, and no other. Memory of all processes together, and numbers of files, are
looked at twenty times a second: for so long there may be more. With `limits_only` nothing of this holds.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from masflow.errors import RunError
from masflow.tools.boxes import PYTHONS, Box, Limits, nameless_file, pumped, python_of

__all__ = ["Limits", "Ran", "Verdicts", "make", "ready", "run_program", "run_tests"]

MODE = "MASFLOW_SANDBOX"
"""In the environment: the mode that the runtime says, for processes started later."""
USUAL = Limits()
START_S = 10.0
"""For a sandbox to begin, on a busy machine."""
RUN = ("_inside", "_program")
PROGRAM = ("_inside", "_line", "_program")
TESTS = ("_inside", "_line", "_tests")
"""Files that run inside."""
RAISED = {"MemoryError": "memory", "TimeoutError": "timeout", "SystemExit": "ended"}
"""What it means that a program raised."""
TROUBLES = {
    "timeout": {"timeout", "TimeoutError"},
    "memory": {"MemoryError"},
    "ended": {"Gone", "ConnectionResetError", "BrokenPipeError", "ended"},
}
"""What a test's reason begins with, when the run was in trouble."""


@dataclass(frozen=True)
class Verdicts:
    """What tests said of a program. Made by `run_tests`."""

    passed: tuple[bool, ...]
    pass_rate: float
    stdout: str
    stderr: str
    error: str
    """What went wrong besides wrong answers: empty, `raised` (while it was loaded), `ended` (itself, before
    a test was over), `timeout`, `memory`, `crashed`, `output`, `files` or `forged`."""
    reasons: tuple[str, ...] = ()
    """Of each test: empty where it passed, else why not."""
    called: tuple[bool, ...] = ()
    """Of each test: whether it passed and called something of the program; `assert True` does not."""


@dataclass(frozen=True)
class Ran:
    """What a program did. Made by `run_program`."""

    stdout: str
    stderr: str
    exit: int
    """Its exit status; negative: the signal that ended it."""
    error: str
    """Empty, `raised` (status other than 0), `timeout`, `memory`, `crashed`,
    `output` or `files`."""


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    imports: Sequence[str] = (),
    limits: Limits = USUAL,
    mode: str = "",
) -> Verdicts:
    """Judge a program by tests: each passes when it runs to its end (`assert f(2) == 4`).

    Every test begins where the program has just been loaded; none sees what another did. What a test reads
    by the program's names comes as data (numbers, text, lists, dicts, sets, tuples and their like), or stands
    for an object that stays there; an argument that a function changed in place is changed if it gave None.

    Args:
        code: the program; its `__name__` is "program".
        tests: source text, several statements each if need be.
        imports: statements that the tests need before them, such as `import math`.
        mode: `bubblewrap` or `limits_only`; empty: what the runtime says.
    Raises:
        RunError: there is no sandbox here.
    """
    if not tests:
        return Verdicts((), 0.0, "", "", "")
    ready(mode)
    with _Tested(code, limits, _mode(mode)) as run:
        return run.judged(tests, imports)


def run_program(code: str, stdin: str = "", *, limits: Limits = USUAL, mode: str = "") -> Ran:
    """Run a program by itself, as `__main__`.

    Raises:
        RunError: there is no sandbox here.
    """
    ready(mode)
    return _ran(code, stdin, limits, _mode(mode))


def make(settings: dict[str, Any]) -> Python:
    """The tool `python`.

    Raises:
        RunError: there is no sandbox here.
    """
    ready("")
    return Python(Limits(**settings))


class Python:
    """`python(code=…, tests=[…])` judges a program; without tests it runs it, with `stdin`."""

    def __init__(self, limits: Limits, mode: str = ""):
        self.limits, self.mode = limits, mode

    def __call__(
        self,
        code: str,
        tests: list[str] | None = None,
        imports: list[str] | None = None,
        stdin: str | None = None,
    ) -> dict[str, Any]:
        """`{"text", "stdout", "stderr", "error", "passed", "pass_rate", "reasons", "exit"}`; what doesn't
        belong to the kind of call is empty or null."""
        for name, value in (("code", code), ("stdin", stdin or "")):
            if not isinstance(value, str):
                raise TypeError(f"{name} must be text, got {value!r}")
        for name, texts in (("tests", tests or []), ("imports", imports or [])):
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise TypeError(f"{name} must be a list of texts, got {texts!r}")
        if tests is None:
            ran = run_program(code, stdin or "", limits=self.limits, mode=self.mode)
            text = ran.stdout if not ran.error else f"{ran.stdout}\nerror: {ran.error}\n{ran.stderr}".strip()
            return {
                "text": text, "stdout": ran.stdout, "stderr": ran.stderr, "error": ran.error, "passed": [],
                "pass_rate": None, "reasons": [], "exit": ran.exit,
            }  # fmt: skip
        found = run_tests(code, tests, imports=imports or (), limits=self.limits, mode=self.mode)
        lines = [f"{test}: {why or 'passed'}" for test, why in zip(tests, found.reasons, strict=True)]
        return {
            "text": "\n".join([f"error: {found.error}"] * bool(found.error) + lines),
            "stdout": found.stdout, "stderr": found.stderr, "error": found.error,
            "passed": list(found.passed), "pass_rate": found.pass_rate, "reasons": list(found.reasons),
            "exit": None,
        }  # fmt: skip


# -- is there a sandbox? --------------------------------------------------------------------------


def ready(mode: str = "") -> None:
    """Raises RunError: programs can't be run here as `mode` says."""
    words = _missing(_mode(mode))
    if words:
        raise RunError(
            words,
            "apt-get install bubblewrap (or your system's package of that name; 0.8 or newer). Where that "
            "is not possible: 'sandbox: limits_only' in the runtime, which is NOT SAFE: programs that models "
            "write then have your files, network and processes, under limits of time and memory alone",
        )


def _mode(mode: str) -> str:
    return mode or os.environ.get(MODE, "bubblewrap")


@cache
def _missing(mode: str) -> str:
    """Why programs can't be run; empty: they can."""
    if mode == "limits_only":
        return ""
    assert mode == "bubblewrap", mode
    if shutil.which("bwrap") is None:
        return "bubblewrap isn't installed, and programs that models write run in nothing else"
    if not python_of(mode):
        return f"no Python for the sandbox; looked for {', '.join(PYTHONS)}"
    ran = _ran("print('ready')", "", Limits(wall_s=START_S), "bubblewrap")
    if ran.stdout == "ready\n":
        return ""
    return f"bubblewrap makes no sandbox here: {ran.stderr.strip() or ran.error}"


# -- a program by itself --------------------------------------------------------------------------


def _ran(code: str, stdin: str, limits: Limits, mode: str) -> Ran:
    end = time.monotonic() + limits.wall_s
    with nameless_file(_bytes(code)) as source, nameless_file(_bytes(stdin)) as given:
        call = f"run_program({source.fileno()})"
        box = Box(mode, limits, RUN, call, [source.fileno()], stdin=given, is_first=False)
        error = ""
        try:
            while not error and (box.open or box.process.poll() is None):
                error = pumped([box], [], end)[1]
                if box.process.poll() is not None:
                    break
        finally:
            box.close()
    status = box.process.returncode
    if not error and status:
        status = 128 - status if status > 128 else status  # as a shell says it → as Python does
        error = (
            "raised"
            if status > 0
            else "timeout"
            if -status in (signal.SIGXCPU, signal.SIGKILL)
            else "crashed"
        )
    out, err = box.texts()
    if error == "raised":
        error = RAISED.get(err.rstrip().rpartition("\n")[2].partition(":")[0], error)
        error = "raised" if error == "ended" else error
    return Ran(out, err, status, error)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# -- a program and its tests ----------------------------------------------------------------------


class _Tested:
    """A program in one sandbox, its tests in another."""

    def __init__(self, code: str, limits: Limits, mode: str):
        self.limits = limits
        self.end = time.monotonic() + limits.wall_s
        self._heard = b""
        with ExitStack() as opened:
            theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            source = opened.enter_context(nameless_file(_bytes(code)))
            opened.callback(theirs.close)
            opened.callback(ours.close)
            asked, self._ask = os.pipe()
            self._told, told = os.pipe()
            opened.callback(os.close, asked)
            opened.callback(os.close, told)
            call = f"run_for_tests({source.fileno()}, {theirs.fileno()})"
            self.program = Box(mode, limits, PROGRAM, call, [source.fileno(), theirs.fileno()])
            call = f"run_tests({asked}, {ours.fileno()}, {told})"
            try:
                self.tests = Box(mode, limits, TESTS, call, [asked, ours.fileno(), told])
            except OSError:
                self.program.close()
                raise

    def __enter__(self) -> _Tested:
        return self

    def __exit__(self, *_: object) -> None:
        for box in (self.program, self.tests):
            box.close()
        for descriptor in (self._ask, self._told):
            with suppress(OSError):
                os.close(descriptor)

    def judged(self, tests: Sequence[str], imports: Sequence[str]) -> Verdicts:
        self._send(str(self.limits.test_s))
        self._send("\n".join(imports))
        loaded, error = self._answer()
        kind, _, words = loaded.partition("\0")
        if not error and kind != "ready":
            error = self._ended(kind, words)
        said: list[str] = []
        while not error and len(said) < len(tests):
            self._send(tests[len(said)])
            verdict, error = self._answer()
            if not error:
                said.append(verdict)
        said += [f"-{words or error}"] * (len(tests) - len(said))
        for box in (self.program, self.tests):
            box.close()
        passed = tuple(verdict[:1] in ("+", "0") for verdict in said)
        reasons = tuple(verdict[1:] for verdict in said)
        called = tuple(verdict[:1] == "+" for verdict in said)
        out, err = self.program.texts()
        rate = sum(passed) / len(passed)
        return Verdicts(passed, rate, out, err, error or _worst(reasons), reasons, called)

    def _ended(self, kind: str, words: str) -> str:
        """The kind of end, where the program wasn't loaded."""
        if kind == "ended":
            with suppress(subprocess.TimeoutExpired):
                status = self.program.process.wait(0.5)
                return "timeout" if status == 128 + signal.SIGKILL else "crashed" if status > 128 else "ended"
        if kind == "raised":
            return RAISED.get(words.partition(":")[0], "raised")
        return kind

    def _send(self, text: str) -> None:
        data = _bytes(text)
        data = len(data).to_bytes(4, "big") + data
        with suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._ask, data) :]

    def _answer(self) -> tuple[str, str]:
        """The next text from the tests' side, or why there will be none."""
        while True:
            size = int.from_bytes(self._heard[:4], "big") + 4
            if len(self._heard) >= max(4, size):
                text, self._heard = self._heard[4:size], self._heard[size:]
                return text.decode("utf-8", "replace"), ""
            ready_now, error = pumped([self.program, self.tests], [self._told], self.end)
            if error:
                return "", error
            if ready_now:
                data = os.read(self._told, 1 << 16)
                if not data:
                    return "", "crashed"
                self._heard += data


def _worst(reasons: Sequence[str]) -> str:
    kinds = {reason.partition(":")[0] for reason in reasons}
    for kind, names in TROUBLES.items():
        if kinds & names:
            return kind
    return ""
