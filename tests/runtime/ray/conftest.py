"""One silent Ray of two CPUs for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from masflow.runtime import cluster
from masflow.runtime.cluster import RayBackend
from masflow.spec.runtime import Runtime

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def ray_up() -> Iterator[None]:
    cluster.start(num_cpus=2)
    yield
    cluster.stop()


@pytest.fixture
def backend(ray_up: None) -> Iterator[RayBackend]:
    """Actors that end with the test."""
    made = RayBackend(Runtime(backend="ray", start_timeout_s=60.0, call_timeout_s=60.0))
    yield made
    made.close()
