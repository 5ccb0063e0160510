"""The program's side of the sandbox: runs an untrusted program, by itself or for tests that stand elsewhere.

Runs inside the sandbox, as text behind `_inside.py` and `_line.py`. From its first line on, whatever happens
in this process is the program's doing; nothing that it says is believed.
"""

from __future__ import annotations

import _socket
import os
import sys

from masflow.tools._inside import Caught, end_others, module
from masflow.tools._line import OPS, Peer, pack, words


def read_all(descriptor):
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts).decode("utf-8", "surrogatepass")


def run_program(code):
    """The untrusted program by itself: its standard streams are its own."""
    source = read_all(code)
    sys.excepthook = _show
    exec(compile(source, "program.py", "exec"), module("__main__"))


def _show(kind, error, trace):
    """As Python does, without the frames above the program's own."""
    while trace and trace.tb_frame.f_code.co_filename != "program.py":
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def run_for_tests(code, control):
    """Load the untrusted program, then answer for each test in a process of its own that begins there."""
    line = _socket.socket(fileno=control)
    source = read_all(code)
    scope = module("program")
    line.send(b"begun")
    with Caught() as caught:
        exec(compile(source, "program.py", "exec"), scope)
    if caught.error is not None:
        line.send(pack(["raised", type(caught.error).__name__, words(caught.error)], lambda v: (b"m", 0)))
        return
    flush()
    line.send(pack(["ready", [name for name in scope if type(name) is str][:2000], ""], lambda v: (b"m", 0)))
    child = 0
    while True:
        data, ancillary, _, _ = line.recvmsg(16, _socket.CMSG_SPACE(4))
        end_others(child)
        if not data or not ancillary:
            return
        descriptor = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
        child = os.fork()
        if child == 0:
            line.close()
            answer_for(_socket.socket(fileno=descriptor), scope)
        os.close(descriptor)


def answer_for(line, scope):
    ops = {**OPS, "get": lambda name: scope[name]}
    peer = Peer(line, ops, lambda value: None)
    with Caught():
        while True:
            peer.serve(peer.receive())
            flush()
    os._exit(0)


def flush():
    with Caught():
        sys.stdout.flush()
    with Caught():
        sys.stderr.flush()
