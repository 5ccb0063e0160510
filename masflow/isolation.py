"""Call users' functions in processes of our own: what a function does there, it does to nobody else.

A few processes, started when there is work, each fed by a thread with many calls a message. A call that runs
out of its time, or that ends its process, is answered with the reason; a new process goes on with the calls
behind it. Knows nothing of rewards. `masflow.isolated` is the other side.
"""

from __future__ import annotations

import atexit
import marshal
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from masflow.descriptors import readable
from masflow.errors import RunError
from masflow.isolated import BOARD, FRAME, FRAMED, HEAD, LOADING, MAX_CALLS, NULL, RECORD, Sent, Weighed

__all__ = ["Call", "Pool", "packed", "pool"]

MAX_PROCESSES = max(4, min(8, os.cpu_count() or 4))
MESSAGE_S = 0.02
"""Work that one message holds, as far as is known: long messages would keep other processes idle."""
LOOK_S = 0.05
"""How often a process at work is looked at, and whether another one is needed."""
GROW_S = 0.1
"""How long calls wait before another process is started."""
GAP_S = 5.0
"""Between two looks: more than that, and the machine stood still."""
LOAD_S = 300.0
"""For importing one function's file."""


@dataclass(eq=False)
class Call:
    """One call that is asked for. `answer` is there when the pool has it, with the `seconds` that it took."""

    sent: Sent
    answer: Weighed | None = None
    seconds: float = 0.0
    fatal: RunError | None = None
    """Why the run can't go on: the function can't be loaded, or says so itself."""


def packed(args: dict[str, Any]) -> bytes:
    """Arguments as bytes, a copy of their own for whoever reads them.

    Raises:
        Exception: whatever pickling raises, for values that can't travel.
    """
    try:
        return b"m" + marshal.dumps(args)
    except ValueError:  # not plain data
        return b"p" + cloudpickle.dumps(args)


class Pool:
    """The processes and the calls that wait for them. Its methods may be called from any thread."""

    def __init__(self, max_processes: int = MAX_PROCESSES) -> None:
        self._max = max_processes
        self._lock = threading.Condition()
        self._queue: deque[Call] = deque()
        self._since = 0.0
        """When a call last left the queue, or came into an empty one."""
        self._cost_s: dict[str, float] = {}
        self._feeders: list[_Feeder] = []
        self._idle = 0
        self.closed = False
        self.broken = False
        """A feeder failed: our own bug."""

    def start(self) -> None:
        """Have one process ready soon."""
        with self._lock:
            if not self._feeders:
                self._grow()

    def submit(self, calls: Sequence[Call]) -> None:
        """Begin calls; they are answered in any order."""
        with self._lock:
            if not self._queue:
                self._since = time.monotonic()
            self._queue.extend(calls)
            if not self._feeders:
                self._grow()
            self._lock.notify_all()

    def wait(self, calls: Iterable[Call]) -> None:
        """Until all of them are answered.

        Raises:
            RunError: a function can't be loaded, or raised one: what it needs isn't there.
        """
        for call in calls:
            if call.answer is None:
                with self._lock:
                    while call.answer is None:
                        assert not (self.broken or self.closed), "the pool of reward processes has ended"
                        self._lock.wait(LOOK_S)
                        self._look()
            if call.fatal:
                raise call.fatal

    def drop(self, calls: Iterable[Call]) -> None:
        """Nobody waits for these: those that haven't begun never will."""
        gone = {id(call) for call in calls}
        with self._lock:
            self._queue = deque(call for call in self._queue if id(call) not in gone)

    def close(self) -> None:
        """End all processes, and what they started."""
        with self._lock:
            self.closed = True
            self._queue.clear()
            self._lock.notify_all()
        for feeder in self._feeders:
            feeder.end()

    def _look(self) -> None:
        """Start another process where calls have waited. Holds the lock."""
        if self._queue and not self._idle and time.monotonic() - self._since > GROW_S:
            self._grow()

    def _grow(self) -> None:
        if len(self._feeders) < self._max and not self.closed:
            self._since = time.monotonic()
            self._feeders.append(_Feeder(self, len(self._feeders)))

    # what feeders ask and tell

    def take(self) -> list[Call]:
        """Calls for one message; waits for some. Empty: the pool is closed."""
        with self._lock:
            self._idle += 1
            while not self._queue and not self.closed:
                self._lock.wait()
            self._idle -= 1
            taken: list[Call] = []
            left_s = MESSAGE_S
            while self._queue and left_s > 0 and len(taken) < MAX_CALLS:
                left_s -= self._cost_s.get(self._queue[0].sent.ref, MESSAGE_S)
                taken.append(self._queue.popleft())
            self._since = time.monotonic()
            return [] if self.closed else taken

    def told(self, calls: Sequence[Call], unanswered: Sequence[Call]) -> None:
        """These have answers; those didn't begin and come first again."""
        with self._lock:
            for call in calls:
                old = self._cost_s.get(call.sent.ref, call.seconds)
                self._cost_s[call.sent.ref] = max(1e-6, 0.9 * old + 0.1 * call.seconds)
            self._queue.extendleft(reversed(unanswered))
            self._look()
            self._lock.notify_all()

    def look(self) -> None:
        with self._lock:
            self._look()


class _Feeder:
    """One thread and its process: sends messages, watches the clock, ends and replaces the process."""

    def __init__(self, pool: Pool, number: int):
        self.pool = pool
        self.process: _Process | None = None
        name = f"masflow-isolation-{number}"
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _run(self) -> None:
        try:
            self._feed()
        finally:
            self.pool.broken = not self.pool.closed

    def _feed(self) -> None:
        self.process = _Process()
        while calls := self.pool.take():
            if not self.process.alive():
                self.process.kill()
                self.process = _Process()
            reason = self.process.work(calls, self.pool.look)
            done, rest = self.process.read(calls), []
            if reason:
                self.process.kill()
                first, rest = self._unfinished(calls)
                if first is not None:
                    _fail(first, reason, is_loading=self.process.was_loading)
                    done.append(first)
                self.process = None if self.pool.closed else _Process()
            self.pool.told(done, rest)
            if self.process is None:
                return
        self.end()

    @staticmethod
    def _unfinished(calls: Sequence[Call]) -> tuple[Call | None, list[Call]]:
        left = [call for call in calls if call.answer is None]
        return (left[0], left[1:]) if left else (None, [])


def _fail(call: Call, reason: str, is_loading: bool) -> None:
    text = f"{call.sent.ref}: {reason}"
    call.answer = Weighed([None] * call.sent.many if call.sent.many is not None else None, (text,))
    if is_loading:
        call.fatal = _unloaded(f"{call.sent.ref}: importing its file {reason}")


def _unloaded(words: str) -> RunError:
    return RunError(f"can't load {words}", "run 'masflow check' on the workflow that names it")


class _Process:
    """One process at work; everything that comes from it is read here."""

    def __init__(self) -> None:
        self.was_loading = False
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._unread = b""
        self._under_way, self._lost_s, self._looked_at = LOADING, 0.0, 0.0
        self._mark = f"{os.getpid()}-{id(self)}-{time.monotonic_ns()}"
        with tempfile.TemporaryFile(prefix="masflow-") as file:
            file.truncate(BOARD)
            self._board = mmap.mmap(file.fileno(), BOARD)
            requests, self._requests = os.pipe()
            self._results, results = os.pipe()
            lifeline, self._lifeline = os.pipe()
            theirs = (requests, results, file.fileno(), lifeline)
            command = [sys.executable, "-P", "-m", "masflow.isolated", *map(str, theirs)]
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=theirs,
                env=self._environment(), start_new_session=True,
            )  # fmt: skip
        for descriptor in (requests, results, lifeline):
            os.close(descriptor)

    def _environment(self) -> dict[str, str]:
        package = str(Path(__file__).resolve().parents[1])
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
            "PYTHONHASHSEED": "0",  # sets of texts have the same order in every run
            "MASFLOW_ISOLATED_PATH": os.pathsep.join(sys.path),
            MARK: self._mark,
        }

    def alive(self) -> bool:
        return self._popen.poll() is None

    def work(self, calls: Sequence[Call], look: Any) -> str:
        """Have calls made. Returns why the process has to be replaced; empty when all are answered."""
        self._frames.clear()
        self._under_way, self._lost_s, self._looked_at = LOADING, 0.0, time.monotonic()
        self._board[: HEAD.size] = HEAD.pack(LOADING, self._looked_at)
        self._board[HEAD.size : HEAD.size + RECORD.size * len(calls)] = bytes(RECORD.size * len(calls))
        data = pickle.dumps([tuple(call.sent) for call in calls])
        try:
            self._send(len(data).to_bytes(8, "little") + data)
        except OSError:
            return self._end()
        while True:
            heard = self._hear(min(LOOK_S, max(0.0, self._left_s(calls))))
            if heard is None or (not heard and not self.alive()):
                return self._end()
            if heard == b".":
                return ""
            look()
            if self._left_s(calls) <= 0:
                limit = LOAD_S if self.was_loading else calls[self._index()].sent.timeout_s
                return f"OutOfTime: no result within {limit:g} s"

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._requests, view) :]

    def _index(self) -> int:
        index, _ = HEAD.unpack_from(self._board, 0)
        self.was_loading = index == LOADING
        return index

    def _left_s(self, calls: Sequence[Call]) -> float:
        """Of the time of the call under way. A gap between two looks isn't the call's: a machine that was
        halted goes on with a clock that ran."""
        index, began = HEAD.unpack_from(self._board, 0)
        now, lost = time.monotonic(), 0.0 if index != self._under_way else self._lost_s
        gap = now - self._looked_at
        self._under_way, self._looked_at = index, now
        self._lost_s = lost + (min(gap, now - began) if gap > GAP_S else 0.0)
        self.was_loading = index == LOADING
        limit = LOAD_S if self.was_loading else calls[index].sent.timeout_s
        return began + limit + self._lost_s - now

    def _hear(self, timeout_s: float) -> bytes | None:
        """Kind of the last frame that came; empty: none in this time. None: nothing will come any more."""
        if not readable([self._results], timeout_s):
            return b""
        data = os.read(self._results, 1 << 16)
        if not data:
            return None
        self._unread += data
        last = b"-"
        while len(self._unread) >= FRAME.size:
            kind, index, size = FRAME.unpack_from(self._unread)
            if len(self._unread) < FRAME.size + size:
                break
            body = self._unread[FRAME.size : FRAME.size + size]
            self._unread = self._unread[FRAME.size + size :]
            last = kind
            if kind == b"P":
                print(body.decode(errors="replace"), end="", file=sys.stderr, flush=True)
            elif kind != b".":
                self._frames[index] = kind, body
        return last

    def _end(self) -> str:
        """How the process ended by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        code = self._popen.returncode
        self._index()
        if code is None:
            return "left the process that called it"
        if code < 0:
            with suppress(ValueError):
                return f"ended its process ({signal.Signals(-code).name})"
        return f"ended its process with exit code {code}"

    def read(self, calls: Sequence[Call]) -> list[Call]:
        """Fill in the answers that are on the board."""
        done: list[Call] = []
        for i, call in enumerate(calls):
            value, seconds, status = RECORD.unpack_from(self._board, HEAD.size + i * RECORD.size)
            if not status:
                continue
            call.seconds = seconds
            if status == FRAMED:
                if i not in self._frames:
                    continue
                self._framed(call, *self._frames[i])
            else:
                call.answer = Weighed(None if status == NULL else value)
            done.append(call)
        return done

    @staticmethod
    def _framed(call: Call, kind: bytes, body: bytes) -> None:
        found = pickle.loads(body)
        if kind == b"V":
            call.answer = Weighed(*found)
            return
        if kind == b"R":
            call.fatal = RunError(*found)
        elif kind == b"L":
            call.fatal = _unloaded(found)
        many = call.sent.many
        call.answer = Weighed([None] * many if many is not None else None, (str(found),))

    def kill(self) -> None:
        """End it and whatever it started, also what left its group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        _end_marked(self._mark)
        for descriptor in (self._requests, self._results, self._lifeline):
            with suppress(OSError):
                os.close(descriptor)
        self._requests = self._results = self._lifeline = -1


MARK = "MASFLOW_ISOLATED_MARK"
"""Names in a process's environment whose child it is, wherever it has gone."""


def _end_marked(mark: str) -> None:
    """End processes that were started there and have left its group. Where the system shows environments."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(5):
        found = False
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted in place.read_bytes():
                    os.kill(int(place.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return


_pool: Pool | None = None
_making = threading.Lock()


def pool() -> Pool:
    """This process's pool."""
    global _pool
    with _making:
        if _pool is None or _pool.closed:
            _pool = Pool()
            atexit.register(_pool.close)
        return _pool


def _forget() -> None:
    """A process that was forked off has none of its parent's threads."""
    global _pool, _making
    _pool, _making = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
