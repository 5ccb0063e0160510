"""A process that calls users' functions: `python -m masflow.isolated FDS`, started by `masflow.isolation`.

Reads lists of calls, loads the functions that they name, and calls one after the other. Each result goes to a
board in shared memory as soon as it is there, so that whatever a function does to the process costs its own
call alone. Knows nothing of rewards, and imports nothing heavy: no pydantic, no torch.
"""

from __future__ import annotations

import inspect
import io
import marshal
import math
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, NamedTuple

from masflow.errors import RunError, boundary
from masflow.probe import load_module

__all__ = [
    "BOARD",
    "FRAME",
    "HEAD",
    "LARGEST",
    "LOADING",
    "MAX_CALLS",
    "RECORD",
    "Sent",
    "Weighed",
    "number",
    "weighed",
]

HEAD = struct.Struct("=qd")
"""The board's head: number of the call under way, and when it began (monotonic seconds)."""
RECORD = struct.Struct("=dfB3x")
"""One call on the board: value, seconds, status."""
MAX_CALLS = 4096
"""In one message."""
BOARD = HEAD.size + RECORD.size * MAX_CALLS
"""Bytes."""
FRAME = struct.Struct("=cII")
"""What comes through the pipe: kind, number of the call, bytes that follow."""
LOADING = -1
"""Stands for the number of a call while a function is imported."""
UNDONE, VALUE, NULL, FRAMED = range(4)
"""Status of a call: none, a number, null, or it came through the pipe."""
LARGEST = 1e30
SHOWN_BYTES, MOST_BYTES = 1 << 16, 1 << 20
"""Of what one call prints: what is passed on, and what ends it."""


class Sent(NamedTuple):
    """One call as it travels. Made by `isolation`; eaten here."""

    ref: str
    root: str
    hash: str
    """Of the function's file; another one makes it load again. Empty: whatever is there."""
    args: bytes
    """A letter for how they are packed, and the keyword arguments."""
    given: tuple[tuple[str, bytes], ...]
    """Pickled arguments that are passed if the function takes them."""
    timeout_s: float
    memory_bytes: int
    seed: str
    many: int | None
    """How many values it has to give; None: one value."""


class Weighed(NamedTuple):
    """What a result is worth: a number, null, a number a key, or a list of these; and what was wrong."""

    value: Any
    problems: tuple[str, ...] = ()


def number(result: Any) -> float | None:
    """`result` as a float; None unless it is a finite real number (a bool is 0 or 1) of at most 1e30, so that
    sums and squares of rewards stay finite."""
    if not isinstance(result, Real) and not hasattr(result, "__float__"):
        return None
    found = math.nan
    with boundary("float of a result"):  # it may be any object: a list of numbers, an endless integer
        found = float(result)
    return found if abs(found) <= LARGEST else None


def weighed(result: Any, many: int | None = None) -> Weighed:
    """What a function gave, checked.

    Args:
        many: of a function that was called once for so many places: it owes a value for each.
    """
    if many is None:
        return _weighed_one(result)
    values: list[Any] | None = None
    if isinstance(result, (list, tuple)):
        values = list(result)
    elif hasattr(result, "tolist"):  # an array or a tensor
        with boundary("list of a result"):
            values = list(result.tolist())
    if values is None:
        text = f"gave {_shown(result)}; with 'batch: true' it gives a list of {many} values, one each"
        return Weighed([None] * many, (text,))
    if len(values) != many:
        text = f"gave {len(values)} values for {many}; with 'batch: true' it gives one each, in order"
        return Weighed([None] * many, (text,))
    each = [_weighed_one(value) for value in values]
    return Weighed([one.value for one in each], tuple(dict.fromkeys(p for one in each for p in one.problems)))


def _weighed_one(result: Any) -> Weighed:
    if isinstance(result, dict):
        each = {f"{key}": _bad(v) if isinstance(v, dict) else _weighed_one(v) for key, v in result.items()}
        problems = dict.fromkeys(p for one in each.values() for p in one.problems)
        return Weighed({key: one.value for key, one in each.items()}, tuple(problems))
    if result is None:
        return Weighed(None)
    found = number(result)
    return _bad(result) if found is None else Weighed(found)


def _bad(result: Any) -> Weighed:
    text = f"gave {_shown(result)}; a reward is a finite number, or null for unscored"
    return Weighed(None, (text,))


def _shown(value: object, length: int = 80) -> str:
    text = f"a {type(value).__name__} that can't be shown"
    with suppress(Exception):  # a user's __repr__ may fail, an integer may have too many digits
        text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


# -- the process itself ---------------------------------------------------------------------------


class TooMuchOutput(Exception):
    """A function printed without end."""


class _Ended:
    """As a context: keeps what ends the process instead of a function (sys.exit) as its reason."""

    reason = ""
    stopped: RunError | None = None

    def __enter__(self) -> _Ended:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.reason = f"ended with {type(error).__name__}: {error}"
        if isinstance(error, RunError):
            self.stopped = error
        return error is not None


class _Out(io.TextIOBase):
    """Standard output and error of users' functions: passed on through the pipe, up to a limit a call."""

    encoding = "utf-8"

    def __init__(self, send: Callable[[bytes, bytes], None]) -> None:
        self._send, self.size = send, 0

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        data = str(text).encode(errors="replace")
        if self.size < SHOWN_BYTES:
            self._send(b"P", data[: SHOWN_BYTES - self.size])
        self.size += len(data)
        if self.size > MOST_BYTES:
            raise TooMuchOutput(f"printed more than {MOST_BYTES >> 20} MiB")
        return len(text)


class _Process:
    """The board, the pipes, and the functions that were loaded so far."""

    def __init__(self, requests: int, results: int, board: int):
        self.requests = os.fdopen(requests, "rb")
        self.results = results
        self.board = mmap.mmap(board, BOARD)
        self.pid = os.getpid()
        self.index = 0
        self.memory_bytes = 0
        self.loaded: dict[tuple[str, str, str], tuple[Any, frozenset[str]]] = {}
        """(reference, root, hash) → the function and the parameters that it names."""
        self.out = _Out(self.send)
        self.runner: Any = None

    def send(self, kind: bytes, data: bytes) -> None:
        if os.getpid() != self.pid:  # a child that a function forked off
            return
        frame = memoryview(FRAME.pack(kind, max(self.index, 0), len(data)) + data)
        while frame:
            frame = frame[os.write(self.results, frame) :]

    def serve(self) -> None:
        """Until nobody sends calls any more."""
        while len(size := self.requests.read(8)) == 8:
            calls = pickle.loads(self.requests.read(int.from_bytes(size, "little")))
            for index, sent in enumerate(calls):
                self._call(index, Sent(*sent))
            self.send(b".", b"")

    def _call(self, index: int, sent: Sent) -> None:
        self.out.size = 0
        function, takes, failure = self._function(sent)
        if failure:
            self.index = index
            self._note(index, b"L", failure, 0.0)
            return
        self._limit(sent.memory_bytes)
        self._begin(index)
        began = time.monotonic()
        found, ended = Weighed(None), _Ended()
        with ended, boundary(sent.ref) as caught:
            found = weighed(self._value(function, takes, sent), sent.many)
        if os.getpid() != self.pid:  # the function's fork came back here, too
            os._exit(0)
        seconds = time.monotonic() - began
        reason = caught.error or (f"{sent.ref}: {ended.reason}" if ended.reason else "")
        if ended.stopped:
            self._note(index, b"R", ended.stopped.args, seconds)
        elif reason:
            self._note(index, b"E", reason, seconds)
        elif found.problems or not isinstance(found.value, float | None):
            self._note(index, b"V", tuple(found), seconds)
        else:
            status = NULL if found.value is None else VALUE
            place = HEAD.size + index * RECORD.size
            RECORD.pack_into(self.board, place, found.value or 0.0, seconds, status)

    def _begin(self, index: int) -> None:
        self.index = index
        HEAD.pack_into(self.board, 0, index, time.monotonic())

    def _note(self, index: int, kind: bytes, what: Any, seconds: float) -> None:
        self.send(kind, pickle.dumps(what))
        RECORD.pack_into(self.board, HEAD.size + index * RECORD.size, 0.0, seconds, FRAMED)

    def _value(self, function: Callable[..., Any], takes: frozenset[str], sent: Sent) -> Any:
        given = unpacked(sent.args)
        for name, data in sent.given:
            if name in takes and name not in given:
                given[name] = pickle.loads(data)
        _seed(sent.seed)
        value = function(**given)
        if inspect.isawaitable(value):
            import asyncio

            self.runner = self.runner or asyncio.Runner()
            return self.runner.run(_awaited(value))
        return value

    def _function(self, sent: Sent) -> tuple[Any, frozenset[str], str]:
        """The function and the parameters that it names, or why there is none."""
        key = (sent.ref, sent.root, sent.hash)
        if key not in self.loaded:
            self._limit(0)
            self._begin(LOADING)
            function, ended = None, _Ended()
            with ended, boundary(sent.ref) as caught:
                function = self._load(sent)
                self.loaded[key] = function, frozenset(inspect.signature(function).parameters)
            if key not in self.loaded:
                return None, frozenset(), caught.error or f"{sent.ref}: {ended.reason}"
        return *self.loaded[key], ""

    def _load(self, sent: Sent) -> Any:
        name, _, function_name = sent.ref.rpartition(":")
        if any(ref.rpartition(":")[0] == name and hash != sent.hash for ref, _, hash in self.loaded):
            self.loaded.clear()  # its file has changed since
            for known, module in list(sys.modules.items()):
                file = getattr(module, "__file__", None)
                if known == name or (file and known.rpartition(".")[2].startswith("masflow_user_")):
                    del sys.modules[known]
        if sent.root not in sys.path:  # what functions import when they run may stand there
            sys.path.append(sent.root)
        return getattr(load_module(name, sent.root), function_name)

    def _limit(self, memory_bytes: int) -> None:
        """Private memory that may be asked for from now on; 0: any amount. Where the system has such a
        limit: asking for more is then a MemoryError."""
        if memory_bytes == self.memory_bytes or sys.platform != "linux":
            return
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = memory_bytes if memory_bytes and hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        self.memory_bytes = memory_bytes


async def _awaited(value: Any) -> Any:
    return await value


def unpacked(args: bytes) -> dict[str, Any]:
    """The other side of `isolation.packed`."""
    return marshal.loads(args[1:]) if args[:1] == b"m" else pickle.loads(args[1:])


def _seed(text: str) -> None:
    """Make the global generators of whatever is loaded depend on the call alone, not on those before it."""
    if (plain := sys.modules.get("random")) is not None:
        plain.seed(text)
    bits = zlib.crc32(text.encode())
    if (array := sys.modules.get("numpy")) is not None and hasattr(array, "random"):
        array.random.seed(bits)
    if (tensor := sys.modules.get("torch")) is not None and hasattr(tensor, "manual_seed"):
        tensor.manual_seed(bits)


def _end_with_parent(lifeline: int) -> None:
    """Wait for the end of the process that started this one; then this one and what it started end too."""
    with suppress(OSError):
        os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def main(words: Sequence[str]) -> None:
    requests, results, board, lifeline = map(int, words)
    sys.path.extend(p for p in os.environ.pop("MASFLOW_ISOLATED_PATH").split(os.pathsep) if p)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    process = _Process(requests, results, board)
    sys.stdout = sys.stderr = process.out  # type: ignore[assignment]
    process.serve()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
