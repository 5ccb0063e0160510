"""The backend of Ray with plain objects: order, errors, deaths, time limits, placement."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from masflow.errors import RunError, SpecError
from masflow.runtime import cluster, ray_folders
from masflow.runtime.backend import Ask, Died
from masflow.runtime.cluster import RayActor, RayBackend
from masflow.spec.runtime import Runtime
from tests.runtime.ray.plain_actors import Echo


def test_calls_of_an_actor_run_in_order_and_hand_values_on_without_the_caller(backend: RayBackend) -> None:
    one, two = backend.spawn("one", Echo, ask=Ask(threads=3)), backend.spawn("two", Echo)
    for number in range(20):
        one.call("say", number)
    assert one.call("all").get(30.0) == list(range(20))
    assert two.call("size_of", one.call("zeros", 5_000_000)).get(30.0) == 5_000_000
    assert one.call("pid").get(30.0) != two.call("pid").get(30.0)
    assert one.call("threads").get(30.0) == "3"
    slow, quick = one.call("sleep", 0.5), two.call("say", "quick")
    assert backend.wait([slow, quick], 30.0) == [1] and quick.done() and not slow.done()


def test_errors_come_back_as_they_were_raised(backend: RayBackend) -> None:
    echo = backend.spawn("echo", Echo)
    with pytest.raises(RunError, match="it broke\n  fix: mend it"):
        echo.call("fail", "run").get(30.0)
    with pytest.raises(SpecError, match=r"a\.yaml:3 x"):
        echo.call("fail", "spec").get(30.0)
    with pytest.raises(OSError, match="No space left") as full:
        echo.call("fail", "disk").get(30.0)
    assert full.value.errno == 28 and full.value.filename == "/some/file"
    with pytest.raises(ZeroDivisionError, match="a bug"):
        echo.call("fail", "bug").get(30.0)
    with pytest.raises(RunError, match="it broke"):  # of the call whose value was to be handed on
        echo.call("say", echo.call("fail", "run")).get(30.0)
    with pytest.raises(RunError, match="can't begin"):
        backend.spawn("unmade", Echo, "can't begin").call("all").get(30.0)


def test_a_death_is_told_with_the_name_of_who_died(backend: RayBackend) -> None:
    one, two = backend.spawn("one", Echo), backend.spawn("two", Echo)
    assert two.call("say", 1).get(30.0) == 1
    slow = one.call("sleep", 60)
    needs = two.call("say", slow)
    one.kill()
    for call in (slow, needs, one.call("say", 1)):
        with pytest.raises(Died, match="'one' died: ") as death:
            call.get(30.0)
        assert death.value.name == "one"
    assert two.call("say", 2).get(30.0) == 2


def test_a_process_that_hangs_is_ended_and_named_and_one_that_computes_is_not(
    backend: RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_PULSE_EVERY_S", 0.2)
    monkeypatch.setattr(cluster, "_SILENT_S", 2.0)
    monkeypatch.setattr(cluster, "_LOOK_EVERY_S", 0.2)
    one, two = backend.spawn("m/trainer0", Echo), backend.spawn("m/rollout0", Echo)
    assert one.call("compute", 4.0).get(60.0) > 0  # never gives the interpreter away by itself
    os.kill(one.call("pid").get(30.0), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Died, match=r"'m/trainer0' died: its process hung: no sign of life for 2 s"):
        two.call("say", one.call("say", 1)).get(60.0)
    assert time.monotonic() - began < 30
    assert two.call("say", 2).get(30.0) == 2


def test_runtime__placement_hangs_without_a_cause__every_wait_is_bounded_and_names_the_stuck_part(
    backend: RayBackend, ray_up: None
) -> None:
    """Row of FIELD_PROBLEMS, Runtime: placement hangs without a cause."""
    echo = backend.spawn("m/rollout0", Echo)
    with pytest.raises(RunError, match=r"'m/rollout0' has not answered 'sleep' after 0\.2 s"):
        echo.call("sleep", 1.0).get(0.2)
    with pytest.raises(RunError) as impossible:
        backend.reserve({"m/rollout0": Ask(cpus=2), "m/trainer0": Ask(cpus=1, gpus=1)})
    text = str(impossible.value)
    assert "2 processes want 3 CPUs and 1 GPUs" in text and "2 CPUs, 0 GPUs" in text and "m/trainer0" in text
    backend.reserve({"m/rollout0": Ask(cpus=2)})
    other = RayBackend(Runtime(backend="ray", start_timeout_s=1.0))
    began = time.monotonic()
    with pytest.raises(RunError, match=r"had no room in 1 s for n/worker0 \(1 CPUs.*free are 0 CPUs"):
        other.reserve({"n/worker0": Ask(cpus=1)})
    assert time.monotonic() - began < 10
    other.close()


def test_an_actor_has_what_was_reserved_for_its_name_and_may_be_made_again(backend: RayBackend) -> None:
    backend.reserve({"big": Ask(cpus=2)})
    for _ in range(2):
        actor = backend.spawn("big", Echo, ask=Ask(cpus=2))
        assert actor.call("say", 1).get(30.0) == 1
        actor.kill()


def test_a_cluster_that_does_not_answer_is_told_at_once(ray_up: None) -> None:
    for address in ("127.0.0.1:9", "nowhere"):
        began = time.monotonic()
        with pytest.raises(RunError, match=f"(?s)no Ray cluster answers at '{address}'.*ray start --head"):
            cluster.start(address)
        assert time.monotonic() - began < 10


def test_auto_means_no_ray_of_another_run_and_waits_for_none_that_is_gone(
    ray_up: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_folders.addresses()  # this process's own is one
    with suppress(OSError):  # somebody may have a cluster here
        assert cluster._head() not in ray_folders.addresses()
    for address, told in (("127.0.0.1:1", "refused"), ("http://127.0.0.1:8265", "not HOST:PORT")):
        monkeypatch.setenv("RAY_ADDRESS", address)
        began = time.monotonic()
        with pytest.raises(RunError, match=f"answers at 'auto', which means {address}: .*{told}"):
            cluster.start("auto")
        assert time.monotonic() - began < 10


def test_an_actor_may_be_handed_to_another(backend: RayBackend, tmp_path: Path) -> None:
    one, two = backend.spawn("one", Echo), backend.spawn("two", Echo)
    found = two.call("say", one).get(30.0)
    assert isinstance(found, RayActor) and found.name == "one" and found.call("say", 5).get(30.0) == 5


def test_ray_remembers_no_call_that_is_over(backend: RayBackend) -> None:
    head = next(p for p in psutil.Process().children(recursive=True) if "gcs_server" in p.name())
    echo = backend.spawn("echo", Echo)

    def grown(num_calls: int) -> int:
        before = head.memory_info().rss
        for _ in range(num_calls // 200):
            [call.get(30.0) for call in [echo.call("threads") for _ in range(200)]]
        time.sleep(2.0)  # what it is told of calls, it is told once a second
        return head.memory_info().rss - before

    grown(400)
    assert grown(4000) < 6_000_000  # it was 19 MB
