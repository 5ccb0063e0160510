"""Ray itself dies under a run, or the process that started it is told to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CODE = """if True:
    import os, psutil, signal, time
    from masflow.errors import RunError
    from masflow.runtime import cluster
    from masflow.runtime.cluster import RayBackend
    from masflow.spec.runtime import Runtime
    from tests.runtime.ray.plain_actors import Echo

    backend = RayBackend(Runtime(backend="ray"))
    echo = backend.spawn("echo", Echo)
    echo.call("pid").get(60.0)
    processes = psutil.Process().children(recursive=True)
    [head] = [one for one in processes if "gcs_server" in " ".join(one.cmdline()[:1])]
    head.kill()
    began = time.monotonic()
    try:
        HOW
    except RunError as error:
        print(error.message)
    print(time.monotonic() - began < 40)
    folder = cluster._folders[0]
    backend.close()
    print(os.path.exists(folder))
    _, alive = psutil.wait_procs(processes, timeout=5)
    print([one for one in alive if one.status() != psutil.STATUS_ZOMBIE])
"""


@pytest.mark.parametrize(
    "how",
    [
        "echo.call('sleep', 100.0).get(100.0)",
        "while not backend.wait([echo.call('sleep', 100.0)], 0.2): pass",
        "while True: echo.call('sleep', 0.1).get(10.0)",
    ],
)
def test_a_head_that_ended_is_told_in_time_and_leaves_no_process(how: str) -> None:
    message, *rest = _said(CODE.replace("HOW", how))
    assert message.startswith("Ray itself has ended: its head at ")
    assert rest == ["True", "False", "[]"]


def test_a_process_with_a_ray_does_on_sigterm_what_it_did_before() -> None:
    code = """if True:
        import os, signal
        from masflow.runtime import cluster

        signal.signal(signal.SIGTERM, lambda number, frame: print("asked to end"))
        cluster.start()
        os.kill(os.getpid(), signal.SIGTERM)
        cluster.stop()
    """
    assert _said(code) == ["asked to end"]


def _said(code: str) -> list[str]:
    """Lines that a process of its own prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
