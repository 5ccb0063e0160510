"""What both sides of the sandbox begin with: limits, and modules for code to run in. Runs inside, as text."""

from __future__ import annotations

import builtins
import os
import signal
import sys
from resource import (
    RLIM_INFINITY,
    RLIMIT_AS,
    RLIMIT_CORE,
    RLIMIT_CPU,
    RLIMIT_FSIZE,
    RLIMIT_NOFILE,
    RLIMIT_NPROC,
    getrlimit,
    setrlimit,
)

MAX_FILES = 64


class Caught:
    """As a context: keeps whatever is raised."""

    error = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.error = error
        return error is not None


def limit(memory_bytes, cpu_s, processes, file_bytes):
    for name, most in (
        (RLIMIT_CORE, 0), (RLIMIT_NOFILE, MAX_FILES), (RLIMIT_FSIZE, file_bytes), (RLIMIT_AS, memory_bytes),
        (RLIMIT_CPU, cpu_s + 1), (RLIMIT_NPROC, processes),
    ):  # fmt: skip
        if most or name == RLIMIT_CORE:
            hard = getrlimit(name)[1]
            most = most if hard == RLIM_INFINITY else min(most, hard)
            setrlimit(name, (most - 1 if name == RLIMIT_CPU else most, most))
    signal.signal(signal.SIGXCPU, out_of_time)


def out_of_time(*_):
    """A second before the kernel ends the process, which says nothing of why."""
    raise TimeoutError("out of CPU time")


def module(name):
    made = type(sys)(name)
    sys.modules[name] = made
    builtins.exit = builtins.quit = sys.exit  # `site` would give them
    return made.__dict__


def end_others(child):
    """Ends whatever has been started here: all of the sandbox, whose first process calls this; without a
    sandbox, the child."""
    with Caught():
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)
        elif child:
            os.kill(child, signal.SIGKILL)
    with Caught():
        while os.waitpid(-1 if os.getpid() == 1 else child, 0)[0] and os.getpid() == 1:
            pass
