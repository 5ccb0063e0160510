"""The tests' side of the sandbox: judges tests of a program that runs elsewhere.

Never runs a line of the program: the program's names stand for requests over a line, and what comes back is
plain data, compared here. So a program can pass a test only by giving the values that the test expects, and
it never sees the test's text. Each test has a process of its own, tests come one at a time, and the first
process, which runs none, passes the verdicts on: tests that a model wrote can't touch each other's.

Runs inside the sandbox, as text behind `_inside.py` and `_line.py`.
"""

from __future__ import annotations

import _socket
import builtins
import os
import select
import sys
import time

from masflow.tools._inside import Caught, end_others, module
from masflow.tools._line import OPS, Peer, unpack, words

ONLY_TREE = 0x400
"""A flag of `compile`."""
START_S = 30.0
"""For the program's process to begin, on a busy machine; the program's own time comes after it."""
KINDS = ("ready", "raised")
VERDICT_BYTES = 1 << 12
OWN_LIBRARY = {"Counter", "OrderedDict", "defaultdict", "deque"}
"""Of `collections`: tests use them by these names."""


def run_tests(source, control, verdicts):
    """Judge each test that comes from `source`, in a process of its own; it runs no test itself."""
    line = _socket.socket(fileno=control)
    test_s = float(read_frame(source) or "")
    imports = read_frame(source)
    loaded = _loaded(line, test_s)
    write_frame(verdicts, "\0".join(loaded[:2]))
    names = frozenset(loaded[2])
    child = 0
    while loaded[0] == "ready" and (test := read_frame(source)) is not None:
        theirs, ours = _socket.socketpair()
        with Caught():
            number = theirs.fileno().to_bytes(4, sys.byteorder)
            rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, number)]
            line.sendmsg([b"test"], rights, _socket.MSG_DONTWAIT)
        theirs.close()
        mine, told = os.pipe()
        child = os.fork()
        if child == 0:
            for descriptor in (source, control, verdicts, mine):
                os.close(descriptor)
            for stream in (1, 2):  # what tests print is nobody's
                os.dup2(0, stream)
            _judge(ours, test, imports, names, told)
            os._exit(0)
        ours.close()
        os.close(told)
        verdict = _told(mine, test_s)
        os.close(mine)
        end_others(child)
        write_frame(verdicts, verdict)


def _readable(descriptor, timeout_s):
    """Whether it can be read within that time; unlike `select`, of any number."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _loaded(line, limit_s):
    """("ready" or what went wrong, in which words, names)."""
    if not _readable(line.fileno(), START_S) or line.recv(16) != b"begun":
        return "ended", "the program's process didn't begin", []
    if not _readable(line.fileno(), limit_s):
        return "timeout", "timeout: the program wasn't loaded in time", []
    found = None
    with Caught() as caught:
        data = line.recv(1 << 18)
        if not data:
            return "ended", "ended: the program ended before its tests", []
        found = unpack(data, None)
    if caught.error is not None or type(found) is not list or len(found) != 3 or found[0] not in KINDS:
        return "forged", "forged: the program wrote to the channel of its verdicts", []
    if found[0] != "ready":
        return "raised", f"{found[1]}: {found[2]}", []
    return "ready", "", [name for name in found[1] if type(name) is str]


def _told(descriptor, limit_s):
    """What the test's process wrote before its end: `+`, `0` when it passed without a call of the program's
    functions, else `-` and why it didn't pass."""
    end = time.monotonic() + limit_s
    data = b""
    while True:
        if not _readable(descriptor, max(0.0, end - time.monotonic())):
            return "-timeout"
        part = os.read(descriptor, 1 << 12)
        data += part
        if not part or len(data) > VERDICT_BYTES:
            break
    said = data.decode("utf-8", "replace")
    return said if said[:1] in ("+", "0", "-") else "-ended"


def _judge(line, test, imports, names, told):
    """One test, in its own process."""
    peer = Peer(line, {"call": OPS["call"], "attr": _public, "set": _public_set}, _giveable)
    scope = module("test")
    with Caught() as caught:
        exec(compile(imports, "imports", "exec"), scope)
        tree = compile(test, "test", "exec", ONLY_TREE)
        for name in _taken(_names(tree), names, scope):
            scope[name] = peer.ask("get", name)
        exec(compile(tree, "test", "exec"), scope)  # type: ignore[arg-type]
    reason = "+" if peer.num_calls else "0"
    if caught.error is not None:
        reason = f"-{type(caught.error).__name__}: {words(caught.error)}"
    os.write(told, reason.encode("utf-8", "replace"))


def _names(node):
    """Every name that a test reads."""
    found = set()
    if type(node).__name__ == "Name":
        found.add(node.id)
    for field in node._fields:
        inner = getattr(node, field, None)
        for part in inner if isinstance(inner, list) else [inner]:
            if hasattr(part, "_fields"):
                found |= _names(part)
    return found


def _taken(used, names, scope):
    """Of the names that a test uses, those that the program gives. A program can't replace what Python itself
    gives, unless the test is about nothing else."""
    mine = {name for name in used if name in scope}
    shared = {
        n
        for n in used & names - mine
        if hasattr(builtins, n) or n in sys.stdlib_module_names or n in OWN_LIBRARY
    }
    others = used & names - mine - shared
    if not others:
        return shared
    for name in shared:
        if name in OWN_LIBRARY:
            scope[name] = getattr(__import__("collections"), name)
        elif not hasattr(builtins, name):
            scope[name] = __import__(name)
    return others


def _giveable(value):
    """Of a test's own objects, a program gets functions and objects of the test's classes."""
    if not callable(value) and type(value).__module__ != "test":
        raise TypeError(f"a {type(value).__name__} can't be given to the program")


def _public(there, name):
    if type(name) is not str or name.startswith("_") or type(there).__module__ != "test":
        raise AttributeError(name)
    return getattr(there, name)


def _public_set(there, name, value):
    if type(name) is not str or name.startswith("_") or type(there).__module__ != "test":
        raise AttributeError(name)
    setattr(there, name, value)


def read_frame(descriptor):
    """Text that comes with its length before it; None at the end."""
    size = _exactly(descriptor, 4)
    if len(size) < 4:
        return None
    return _exactly(descriptor, int.from_bytes(size, "big")).decode("utf-8", "surrogatepass")


def _exactly(descriptor, size):
    data = b""
    while len(data) < size:
        part = os.read(descriptor, size - len(data))
        if not part:
            return b""
        data += part
    return data


def write_frame(descriptor, text):
    data = text.encode("utf-8", "replace")
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(descriptor, data) :]
