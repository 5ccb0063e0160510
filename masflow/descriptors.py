"""Which file descriptors can be read, however many the process has open."""

from __future__ import annotations

import select
from collections.abc import Iterable

__all__ = ["readable"]


def readable(descriptors: Iterable[int], timeout_s: float) -> list[int]:
    """Those that can be read now, or have ended, waiting for the first at most `timeout_s`.

    `select` would do for descriptors below 1,024 alone: a process that trains may have more.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1000)]
