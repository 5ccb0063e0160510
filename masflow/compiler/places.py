"""What every model gets of a cluster, and the placements that can't be had. Knows no machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from masflow.compiler.plan import ModelIR
from masflow.errors import Problem, unknown
from masflow.project import Loaded
from masflow.spec.mapping import Mapping
from masflow.spec.runtime import Engine, Place, Runtime

__all__ = ["link_places"]


def link_places(
    models: tuple[ModelIR, ...], mapping: Loaded[Mapping], runtime: Loaded[Runtime], problems: list[Problem]
) -> tuple[ModelIR, ...]:
    """Models with their places: an entry of `models` by the part's name, else by the mapping's, else
    `defaults`."""
    problems.extend(_settings_of_nobody(models, runtime))
    if runtime.spec.backend == "local":
        return models
    keys = {m.name: _key(m.name, mapping.spec) for m in models}
    known = dict.fromkeys((*mapping.spec.models, *keys))
    for name in runtime.spec.models:
        if name not in known:
            problems.append(unknown(runtime.source.where("models", name), "model", name, known))
    found = []
    for model in models:
        named = next((n for n in (model.name, keys[model.name]) if n in runtime.spec.models), None)
        place = runtime.spec.models[named] if named else runtime.spec.defaults
        at = ("models", named) if named else ("defaults",)
        problems.extend(_problems(model, place, runtime, at))
        found.append(replace(model, place=place))
    return tuple(found)


def _settings_of_nobody(models: tuple[ModelIR, ...], runtime: Loaded[Runtime]) -> Iterator[Problem]:
    """What is said of engines and workers where servers play everything."""
    if not models or any(model.endpoint is None for model in models):
        return
    for key, usual in (("engine", Engine()), ("defaults", Place())):
        if getattr(runtime.spec, key) != usual:
            message = f"'{key}' is about models that masflow loads, and servers play this whole team"
            yield Problem.at(runtime.source.where(key), "useless-key", message, f"remove '{key}'")


def _key(part: str, mapping: Mapping) -> str:
    """The mapping's name of a model: with `per: role` it stands for all of its parts."""
    parts = [n for n, m in mapping.models.items() if m.per == "role" and part.startswith(f"{n}.")]
    return part if part in mapping.models or not parts else max(parts, key=len)


def _problems(
    model: ModelIR, place: Place, runtime: Loaded[Runtime], at: tuple[str, ...]
) -> Iterator[Problem]:
    def problem(code: str, message: str, fix: str, *path: str) -> Problem:
        return Problem.at(runtime.source.where(*at, *path), code, message, fix)

    named = at[0] == "models"
    if model.endpoint is not None:
        if named:
            message = f"model '{model.name}' is played by a server; there is nothing to place"
            yield problem("useless-key", message, "remove it here")
        return
    if model.train == "frozen" and named and "trainer" in place.model_fields_set:
        message = f"model '{model.name}' is frozen: it has no trainer workers"
        yield problem("useless-key", message, "remove 'trainer'", "trainer")
    if model.train == "frozen" and named and place.placement == "separate":
        message = f"model '{model.name}' is frozen: there is no trainer to stand apart from"
        yield problem("useless-key", message, "remove 'placement'", "placement")
    for key, gpus in (("rollout", place.rollout.gpus), ("trainer", place.trainer.gpus)):
        if gpus > 1 and gpus != int(gpus):
            message = f"{gpus:g} GPUs: a fraction shares one device, and more than one are whole"
            yield problem("bad-placement", message, f"write {int(gpus)} or {int(gpus) + 1}", key, "gpus")
    if model.train != "frozen":
        yield from _training_problems(model, place, runtime, at)


def _training_problems(
    model: ModelIR, place: Place, runtime: Loaded[Runtime], at: tuple[str, ...]
) -> Iterator[Problem]:
    """Of a model that learns."""

    def problem(message: str, fix: str, *path: str) -> Problem:
        return Problem.at(runtime.source.where(*at, *path), "bad-placement", message, fix)

    sharded = place.trainer.strategy == "fsdp2"
    together = place.placement == "colocated"
    workers = max(place.rollout.workers, place.trainer.workers) if together else place.trainer.workers
    if sharded and workers == 1:
        message = f"one worker trains '{model.name}': there is nobody to share its weights with"
        yield problem(message, "write 'workers: 2' or more, or remove 'strategy'", "trainer", "strategy")
    if sharded and together and workers > 1:
        message = f"'{model.name}': colocated workers speak with whole weights, and fsdp2 gives each a shard"
        yield problem(message, "write 'placement: separate', or 'strategy: ddp'", "trainer", "strategy")
    if sharded and model.quantize is not None:
        message = f"'{model.name}' is held in 4 bits, which fsdp2 can't shard"
        yield problem(message, "write 'strategy: ddp', or remove 'quantize'", "trainer", "strategy")
    if together and workers > 1 and (place.rollout.engine or runtime.spec.engine).use == "vllm":
        message = f"vllm has weights of its own, which one process trains; '{model.name}' has {workers}"
        yield problem(message, "write 'placement: separate', or 'workers: 1'", "placement")
