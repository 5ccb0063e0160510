"""masflow stays near the floor: ratios of CPU time within one process, pair by pair, never times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from tests.bench.speed import side_floor, side_masflow
from tests.bench.speed.make_models import made
from tests.bench.speed.meter import Meter
from tests.bench.speed.suite import RETRIEVAL, TALK
from tests.bench.speed.workloads import Workload

PAIRS = 3
MOST = 2.0
"""CPU time over the floor's; measured on an idle machine it is below 1."""


@pytest.mark.slow
@pytest.mark.parametrize("work", [replace(RETRIEVAL, steps=2), replace(TALK, tasks=4)], ids=lambda w: w.name)
def test_rollout_and_update_take_at_most_twice_the_floor(work: Workload, tmp_path: Path) -> None:
    folder = made(work.model, tmp_path)

    def cpu_s(meter: Meter) -> float:
        return meter.facts["cpu_s"]

    ratios = []
    for _ in range(PAIRS):
        ours, floor = (Meter(work.samples, work.steps) for _ in range(2))
        side_masflow.run(work, folder, ours, {})
        side_floor.run(work, folder, floor)
        ratios.append(cpu_s(ours) / cpu_s(floor))
    assert median(ratios) <= MOST, ratios
