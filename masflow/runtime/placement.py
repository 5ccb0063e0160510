"""How a model's processes are laid out, what they ask for, and whether a cluster has it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from masflow.compiler.plan import ModelIR
from masflow.errors import RunError
from masflow.runtime.backend import Ask
from masflow.spec.runtime import Runtime

__all__ = ["Layout", "Node", "asks_of", "check_feasible", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """The processes of one model. `colocated`: each speaks and learns, and both numbers are theirs."""

    colocated: bool
    num_speakers: int
    num_trainers: int
    """0: nothing is trained."""


@dataclass(frozen=True)
class Node:
    """A machine of a cluster and what it has in all."""

    name: str
    cpus: float
    gpus: float


def layout_of(model: ModelIR, runtime: Runtime) -> Layout:
    """Resolve `placement: auto`: colocated where one process does both, or nothing is trained; on a cluster
    apart where the engine has weights of its own."""
    place = model.place
    speakers, trainers = place.rollout.workers, place.trainer.workers
    if model.train == "frozen":
        return Layout(True, speakers, 0)
    has_own = (place.rollout.engine or runtime.engine).use == "vllm" and runtime.backend == "ray"
    alone = (speakers, trainers) != (1, 1) or has_own
    if place.placement == "separate" or (place.placement == "auto" and alone):
        return Layout(False, speakers, trainers)
    together = max(speakers, trainers)
    return Layout(True, together, together)


def asks_of(model: ModelIR, runtime: Runtime) -> Iterator[tuple[str, Ask]]:
    """(actor's name, what it takes) of all processes of a model, its store first."""
    layout, place = layout_of(model, runtime), model.place
    shares = runtime.address is None
    yield f"{model.name}/store", Ask(threads=1, here=True)
    rollout, trainer = place.rollout, place.trainer
    if layout.colocated:
        gpus = max(rollout.gpus, trainer.gpus if layout.num_trainers else 0.0)
        cpus = max((c for c in (rollout.cpus, trainer.cpus) if c is not None), default=None)
        for index in range(layout.num_speakers):
            yield f"{model.name}/worker{index}", _ask(cpus, gpus, shares, runtime)
        return
    for index in range(layout.num_trainers):
        yield f"{model.name}/trainer{index}", _ask(trainer.cpus, trainer.gpus, shares, runtime)
    for index in range(layout.num_speakers):
        yield f"{model.name}/rollout{index}", _ask(rollout.cpus, rollout.gpus, shares, runtime)


def _ask(cpus: float | None, gpus: float, shares: bool, runtime: Runtime) -> Ask:
    """Unsaid: a CPU of its own on a cluster; none with a GPU, or where the machine is shared."""
    taken = cpus if cpus is not None else 0.0 if gpus or shares else 1.0
    return Ask(taken, gpus, threads_of(runtime, taken))


def threads_of(runtime: Runtime, cpus: float = 0.0) -> int | None:
    """Of one process; None: torch's choice."""
    if runtime.threads is not None:
        return runtime.threads
    if runtime.deterministic:
        return 1
    return None if runtime.backend == "local" else max(1, int(cpus))


def check_feasible(asks: Mapping[str, Ask], nodes: Sequence[Node]) -> None:
    """Whether all actors fit on the machines at once, each whole on one.

    Raises:
        RunError: they don't, with what is asked for and what there is.
    """
    left = {node.name: [node.cpus, node.gpus] for node in nodes}
    order = sorted(asks, key=lambda name: (-asks[name].gpus, -asks[name].cpus, name))
    homeless = [name for name in order if not _settle(asks[name], left)]
    if not homeless:
        return
    total = Ask(sum(a.cpus for a in asks.values()), sum(a.gpus for a in asks.values()))
    there = "; ".join(f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs" for n in nodes) or "no machine"
    first = asks[homeless[0]]
    raise RunError(
        f"the runtime asks for more than the cluster has: {len(asks)} processes want {total.cpus:g} CPUs and"
        f" {total.gpus:g} GPUs; there is {there}; no room for {', '.join(homeless[:6])}"
        f"{' …' if homeless[6:] else ''} ({first.cpus:g} CPUs, {first.gpus:g} GPUs each)",
        "ask for fewer workers, 'cpus' or 'gpus' in the runtime's 'defaults' or 'models', or join a larger"
        " cluster",
    )


def _settle(ask: Ask, left: dict[str, list[float]]) -> bool:
    """Take an actor's share from the first machine that has it."""
    for free in left.values():
        if free[0] + 1e-9 >= ask.cpus and free[1] + 1e-9 >= ask.gpus:
            free[0] -= ask.cpus
            free[1] -= ask.gpus
            return True
    return False
