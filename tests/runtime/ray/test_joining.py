"""Joining a cluster that somebody started, with token authentication on."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from masflow.models.ranks import free_address

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(address, token) of a cluster of one machine; it ends with the test."""
    port = free_address().rpartition(":")[2]
    token = secrets.token_hex(32)
    folder = Path("/tmp") / f"masflow-head-{os.getpid()}"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", "--num-cpus=4", "--include-dashboard=false", f"--temp-dir={folder}"]
    environment = {**_plain(), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with subprocess.Popen(
        command, stdout=-1, stderr=-2, text=True, env=environment, start_new_session=True
    ) as ray:
        assert ray.stdout is not None
        said = ""
        while "runtime started" not in said:
            line = ray.stdout.readline()
            assert line, said
            said += line
        yield f"127.0.0.1:{port}", token
        ray.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            ray.communicate(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(ray.pid, signal.SIGKILL)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def _plain() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | OURS


def test_a_run_joins_with_the_token_and_without_it_is_told_what_to_do(
    toy: Callable[..., Path], head: tuple[str, str]
) -> None:
    address, token = head
    experiment = toy(("steps: 4, tasks", "steps: 2, tasks"))
    runtime = experiment.parent / "cluster.yaml"
    runtime.write_text(
        f"{{backend: ray, address: '{address}', threads: 1, defaults: {{placement: separate}}}}"
    )

    def train(out: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "masflow", "train", str(experiment), "--json"]
        command += ["--runtime", str(runtime), "--out", str(experiment.parent / out)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=200, env={**_plain(), **variables}
        )

    file = experiment.parent / "token"
    file.write_text(token)
    # What the first one took is given back for the second.
    for number, told in enumerate(({"RAY_AUTH_TOKEN": token}, {"RAY_AUTH_TOKEN_PATH": str(file)})):
        joined = train(f"run{number}", **told)
        assert joined.returncode == 0, joined.stderr
        assert '"steps": 2' in joined.stdout
    for variables in ({"RAY_AUTH_TOKEN": secrets.token_hex(32)}, {"HOME": str(experiment.parent)}):
        refused = train("refused", **variables)
        assert refused.returncode == 3
        assert re.search(r"can't be joined.*\n  fix: .*\(RAY_AUTH_TOKEN;", refused.stderr), refused.stderr
        assert token not in refused.stderr


def test_a_ray_of_ones_own_asks_for_no_token_whatever_the_shell_says(tmp_path: Path) -> None:
    code = """if True:
        from masflow.runtime import cluster
        from masflow.runtime.cluster import RayBackend
        from masflow.spec.runtime import Runtime
        from tests.runtime.ray.plain_actors import Echo

        backend = RayBackend(Runtime(backend="ray"))
        print(backend.spawn("echo", Echo).call("say", "heard").get(60.0))
        backend.close()
    """
    environment = {**_plain(), "RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=Path(__file__).parents[3]
    )
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr
    assert not (tmp_path / ".ray").exists()
