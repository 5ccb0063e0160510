"""How fast this machine is just now: bounds in seconds are of the machine that they were set on."""

from __future__ import annotations

import time

USUAL_S = 0.16
"""Of one `_work` there."""


def slowness() -> float:
    """How many times longer than there plain Python takes here, 1 at least: seconds of one machine mean
    nothing on another, and a busy neighbour on the same core costs processor time, too."""
    return max(1.0, min(_work() for _ in range(5)) / USUAL_S)


def _work() -> float:
    """Processor time of a fixed piece of plain Python: calls, dicts, texts."""
    began = time.process_time()
    for number in range(60_000):
        found = {str(key): (key, number) for key in range(3)}
        sorted(found, key=lambda key: found[key][0])
    return time.process_time() - began
