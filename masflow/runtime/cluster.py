"""The backend of a cluster: actors are processes of Ray, here or elsewhere. The only importer of ray.

Knows no models and no plans. A silent Ray of its own is started where the runtime names no address, and ends
with the backend.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from masflow.errors import MasflowError, RunError
from masflow.runtime import ray_folders
from masflow.runtime.backend import Actor, Ask, Died, stuck
from masflow.runtime.placement import Node, check_feasible
from masflow.spec.runtime import Runtime

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import ray
from ray import cloudpickle
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

__all__ = ["RayActor", "RayBackend", "RayPending", "is_up", "start", "stop"]

_DIAL_S = 5.0
_LOOK_EVERY_S = 3.0
_AWAY_S = 15.0
"""How long the head may not answer: after 60 s Ray ends this process without an error of ours."""
_PULSE_EVERY_S = 10.0
_SILENT_S = 60.0
"""How long a process may not answer a pulse: computing keeps none from it, so that one hangs."""


class _Failure:
    """An error that callers reckon with, on its way back: Ray would wrap it."""

    def __init__(self, error: MasflowError | OSError):
        self.error = error


class _Process:
    """What runs in a process of Ray: makes a plain object and calls it."""

    def __init__(self, threads: int | None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if threads is not None:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ[name] = str(threads)
        self.instance: Any = None
        self.failure: _Failure | None = None

    def make(self, cls: type, *args: Any) -> Any:
        try:
            self.instance = cls(*args)
        except (MasflowError, OSError) as error:
            self.failure = _Failure(error)
        return self.failure

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> None:
        """Answers in a thread of its own, whatever goes on in the other."""

    def call(self, method: str, *args: Any) -> Any:
        bad = self.failure or next((arg for arg in args if isinstance(arg, _Failure)), None)
        if bad is not None:
            return bad
        try:
            return getattr(self.instance, method)(*args)
        except (MasflowError, OSError) as error:
            return _Failure(error)


class RayPending:
    """The result of a call on its way."""

    def __init__(self, actor: RayActor, method: str, ref: Any, needs: Sequence[RayPending] = ()):
        self.actor, self.method, self.ref, self.needs = actor, method, ref, needs

    @property
    def name(self) -> str:
        return self.actor.name

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    def get(self, timeout_s: float) -> Any:
        """As `Pending.get`."""
        try:
            value = self._value(timeout_s)
        except GetTimeoutError:
            raise stuck(self.name, self.method, timeout_s) from None
        except RayTaskError as error:  # also one of the kind of its cause
            if isinstance(error.cause, (RayActorError, ObjectLostError)):
                for need in self.needs:
                    need.get(timeout_s)
                raise Died(self.name, _reason(error.cause)) from None
            raise
        except (RayActorError, ObjectLostError) as error:
            raise Died(self.name, self.actor.hung or _reason(error)) from None
        if isinstance(value, _Failure):
            raise value.error
        return value

    def _value(self, timeout_s: float) -> Any:
        """As `ray.get`; meanwhile Ray itself and the process are looked after."""
        until = time.monotonic() + timeout_s
        while True:
            _check_head()
            for actor in (self.actor, *(need.actor for need in self.needs)):
                actor.check()
            left = until - time.monotonic()
            try:
                return ray.get(self.ref, timeout=min(_LOOK_EVERY_S, max(left, 0.0)))
            except GetTimeoutError:
                if left <= _LOOK_EVERY_S:
                    raise


class RayActor:
    """An object in a process of Ray; may be handed to other actors."""

    def __init__(self, name: str, handle: Any):
        self.name, self._handle = name, handle
        self.hung = ""
        """Why it was ended, if it hung."""
        self._pulse: Any = None
        self._felt_at, self._asked_at, self._was_up = time.monotonic(), 0.0, False

    def __reduce__(self) -> tuple[Any, ...]:
        return RayActor, (self.name, self._handle)

    def check(self) -> None:
        """Feel its pulse now and then; a process that was up and has none hangs, and is ended."""
        now = time.monotonic()
        if self._pulse is None:
            if now - self._felt_at >= _PULSE_EVERY_S:
                self._pulse, self._asked_at = self._handle.pulse.remote(), now
        elif ray.wait([self._pulse], timeout=0, fetch_local=False)[0]:
            self._pulse, self._felt_at, self._was_up = None, now, True
        elif self._was_up and now - self._asked_at > _SILENT_S:
            self.hung = f"its process hung: no sign of life for {_SILENT_S:g} s; it was ended"
            self.kill()

    def call(self, method: str, *args: Any) -> RayPending:
        needs = tuple(arg for arg in args if isinstance(arg, RayPending))
        sent = [arg.ref if isinstance(arg, RayPending) else arg for arg in args]
        return RayPending(self, method, self._handle.call.remote(method, *sent), needs)

    def kill(self) -> None:
        ray.kill(self._handle)


class RayBackend:
    """Spawns processes of Ray. In a process that is part of a Ray already, it uses that one."""

    apart = True

    def __init__(self, runtime: Runtime):
        """Raises RunError: nothing answers at `runtime.address`, or no Ray can be started here."""
        self._timeout_s = runtime.start_timeout_s
        self._owns = not is_up()
        if self._owns:
            start(runtime.address)
        self._actors: list[RayActor] = []
        self._bundles: dict[str, int] = {}
        self._group: Any = None

    def reserve(self, asks: Mapping[str, Ask]) -> None:
        """As `Backend.reserve`: checked against the machines first, then set aside by Ray within
        `start_timeout_s`."""
        wanting = {name: ask for name, ask in asks.items() if ask.cpus or ask.gpus}
        if not wanting:
            return
        check_feasible(wanting, _nodes())
        self._bundles = {name: place for place, name in enumerate(wanting)}
        self._group = placement_group([_resources(ask) for ask in wanting.values()], strategy="PACK")
        if not self._group.wait(self._timeout_s):
            free = ray.available_resources()
            asked = ", ".join(f"{n} ({a.cpus:g} CPUs, {a.gpus:g} GPUs)" for n, a in wanting.items())
            raise RunError(
                f"the cluster is large enough, but had no room in {self._timeout_s:g} s for {asked}; free are"
                f" {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs",
                "see what else runs there ('ray status'), or raise 'runtime.start_timeout_s'",
            )

    def spawn(self, name: str, cls: type, *args: Any, ask: Ask | None = None) -> Actor:
        """As `Backend.spawn`."""
        ask = ask or Ask()
        options: dict[str, Any] = {"num_cpus": ask.cpus, "num_gpus": ask.gpus, "max_restarts": 0}
        if name in self._bundles:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[name]
            )
        elif ask.here:
            here = ray.get_runtime_context().get_node_id()
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        _by_value(cls)
        handle = _REMOTE.options(**options).remote(ask.threads)
        handle.make.remote(cls, *args)
        actor = RayActor(name, handle)
        self._actors.append(actor)
        return actor

    def wait(self, pendings: Sequence[Any], timeout_s: float) -> list[int]:
        """As `Backend.wait`."""
        refs = [pending.ref for pending in pendings]
        if not refs:
            return []
        _check_head()
        for actor in {pending.actor for pending in pendings}:
            actor.check()
        ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=False)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        there = set(ready)
        return [place for place, ref in enumerate(refs) if ref in there]

    def close(self) -> None:
        """As `Backend.close`; a Ray of its own ends too."""
        with suppress(RaySystemError):
            for actor in self._actors:
                actor.kill()
            if self._group is not None:
                remove_placement_group(self._group)
        self._actors, self._group, self._bundles = [], None, {}
        if self._owns:
            stop()


_NO_HISTORY = {"task_events_report_interval_ms": 0}
"""Ray would remember every call: measured, 3.6 kB each; a long run makes millions."""
_GROUPS: Any = {"concurrency_groups": {"pulse": 1}}
_REMOTE: Any = ray.remote(**_GROUPS)(_Process)

# -- Ray itself ----------------------------------------------------------------------------------

_folders: list[str] = []
_seen: dict[str, Any] = {"asked": 0.0, "there": 0.0, "address": ""}
"""Of the head: when it was last asked and last answered, and where."""
_MODE = os.environ.get("RAY_AUTH_MODE")
"""What the person who started this process wants."""


def is_up() -> bool:
    """Whether this process is part of a Ray."""
    return ray.is_initialized()


def start(address: str | None = None, num_cpus: int | None = None) -> None:
    """Start a silent Ray on this machine, or join the one at `address` (`auto`, or HOST:PORT).

    A Ray of its own listens to this machine's processes and asks for no token. Joining does: the token is
    Ray's own affair (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token).

    Raises:
        RunError: it can't be started, or nothing answers at the address.
    """
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    _hush()
    if address is None:
        _authenticate("disabled")
        folder = ray_folders.new_folder()
        try:
            with _own_signals():
                own: Any = {"include_dashboard": False, "_temp_dir": folder, "_system_config": _NO_HISTORY}
                ray.init(address="local", num_cpus=num_cpus, **own, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            ray_folders.end(folder)
            raise RunError(
                f"no Ray could be started here: {_reason(error)}", "write 'backend: local' to do without"
            ) from error
        _folders.append(folder)
        return
    head = _dial(address)
    _authenticate(_MODE or "token")
    try:
        with _own_signals():
            ray.init(address=head, **quiet)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise RunError(
            f"the cluster at '{address}' can't be joined: {_reason(error)}",
            "start it with 'ray start --head' or 'ray up', give this process its token (RAY_AUTH_TOKEN;"
            " where it asks for none, RAY_AUTH_MODE=disabled), and use its version of Ray and Python",
        ) from error


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself while it begins; what this process does about it stays what it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop() -> None:
    """Leave Ray; one that `start` started ends, with all its processes, and its logs go."""
    ray.shutdown()
    while _folders:
        ray_folders.end(_folders.pop())


def _authenticate(mode: str) -> None:
    """Ray reads the variable once, when it is imported; here it reads it again."""
    os.environ["RAY_AUTH_MODE"] = mode
    import_module("ray._raylet").Config.initialize("")


def _dial(address: str) -> str:
    """HOST:PORT of a head that answers; Ray itself would wait for minutes, and then end the process."""
    head = address
    try:
        head = _head() if address == "auto" else address
        _connect(head)
    except OSError as error:
        where = f"'{address}'" if head == address else f"'{address}', which means {head}"
        raise RunError(
            f"no Ray cluster answers at {where}: {error}",
            "start one ('ray start --head --port=6379'), or correct 'address' in the runtime, or RAY_ADDRESS;"
            " without 'address' a Ray of the run's own is started",
        ) from error
    return head


def _head() -> str:
    """What `auto` means: RAY_ADDRESS, what `ray start` began last, or what else runs on this machine; the
    Rays that other runs started for themselves are none of ours. Raises OSError when there is nothing."""
    services = import_module("ray._private.services")
    told = os.environ.get("RAY_ADDRESS") or services.find_bootstrap_address(None)
    others = [told] if told else sorted(services.find_gcs_addresses() - ray_folders.addresses())
    if not others:
        raise OSError("no cluster runs on this machine, and RAY_ADDRESS is not set")
    return others[0]


def _connect(address: str) -> None:
    """Raises OSError when nothing answers there."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise OSError("that is not HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_DIAL_S).close()


def _check_head() -> None:
    """Raises RunError once Ray's head has not answered for a while; asks it every few seconds."""
    now = time.monotonic()
    if now - _seen["asked"] < _LOOK_EVERY_S:
        return
    address = ray.get_runtime_context().gcs_address
    if now - _seen["asked"] > _AWAY_S or address != _seen["address"]:
        _seen["there"] = now  # nobody asked for long
    _seen["asked"], _seen["address"] = now, address
    try:
        _connect(address)
        _seen["there"] = now
    except OSError as error:
        if now - _seen["there"] > _AWAY_S:
            raise RunError(
                f"Ray itself has ended: its head at {address} has not answered for {_AWAY_S:g} s ({error})",
                "see what ended it (memory?), then start again; a run goes on with --resume",
            ) from error


def _hush() -> None:
    """What dies is reported by us, with what it means for the run; Ray would print it among the results."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **kwargs: None


def _nodes() -> list[Node]:
    return [
        Node(n["NodeManagerAddress"], n["Resources"].get("CPU", 0.0), n["Resources"].get("GPU", 0.0))
        for n in ray.nodes()
        if n["Alive"]
    ]


def _resources(ask: Ask) -> dict[str, float]:
    return {key: value for key, value in (("CPU", ask.cpus), ("GPU", ask.gpus)) if value}


def _by_value(cls: type) -> None:
    """Let a class from a file that workers can't import travel with its code."""
    module = sys.modules[cls.__module__]
    file = getattr(module, "__file__", None) or ""
    if module.__name__.split(".")[0] != "masflow" and "site-packages" not in file:
        cloudpickle.register_pickle_by_value(module)


def _reason(error: BaseException) -> str:
    """Why a process ended: the lines of Ray's message that say it, without its guesses."""
    text = str(error)
    if "connection error code 2" in text:
        return "its process was killed (out of memory?), or crashed"
    if "node has crashed" in text:
        return "Ray's own process on its machine has ended"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [
        line for line in lines if line.startswith(("The actor", "Worker exit", "Error Type", "Worker unexp"))
    ]
    return " ".join(told or lines[:2]).partition(" Some common causes")[0][:400] or type(error).__name__
