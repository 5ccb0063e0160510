"""What a sandboxed program may not ask the kernel for: a seccomp filter, in the form that bubblewrap reads.

Namespaces and limits hold most of it; this closes what they leave open: sockets other than local ones (a
virtual machine's vsock has no namespace), memory that no limit of a process counts, other processes' insides.
"""

from __future__ import annotations

import platform
import struct

__all__ = ["seccomp_filter"]

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""As the kernel's audit names them (linux/audit.h)."""
SOCKET = {"x86_64": 41, "aarch64": 198}
DENIED = {
    "add_key": (248, 217), "bpf": (321, 280), "io_uring_setup": (425, 425), "kcmp": (312, 272),
    "keyctl": (250, 219), "memfd_create": (319, 279), "memfd_secret": (447, 447), "mount": (165, 40),
    "mq_open": (240, 180), "msgget": (68, 186), "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "request_key": (249, 218), "semget": (64, 190), "setns": (308, 268), "shmget": (29, 194),
    "unshare": (272, 97), "userfaultfd": (323, 282),
}  # fmt: skip
"""Numbers on x86_64 and on aarch64."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, EPERM = 0x7FFF0000, 0x80000000, 0x00050001
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
"""Bytes into `struct seccomp_data`, little end first."""
X32 = 0x40000000
AF_UNIX = 1


def seccomp_filter(machine: str = "") -> bytes:
    """The filter's instructions; empty for a machine whose numbers aren't known here.

    Args:
        machine: as `platform.machine` says it; default: this one.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return b""
    which = list(ARCHITECTURES).index(machine)
    denied = [numbers[which] for numbers in DENIED.values()]
    end = len(denied) + 5
    """Index, counted from the first comparison of numbers, of the instruction that denies."""
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, end - 1, 0, X32),
        *((EQUAL, end - i - 2, 0, number) for i, number in enumerate(denied)),
        (EQUAL, 0, 2, SOCKET[machine]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (EQUAL, 0, 1, AF_UNIX),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, EPERM),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)
