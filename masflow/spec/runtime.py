"""The runtime document: where a plan runs. Nothing in it changes what is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from masflow.spec.base import Fault, Spec


class Engine(Spec):
    """The rollout engine of the models; a name alone selects it with its defaults."""

    use: Literal["transformers", "vllm"] = "transformers"
    max_batch_tokens: int = Field(default=16384, ge=1)
    """Prompt and reply tokens of the rows that are drawn together, padding included."""
    prefix_cache_bytes: int = Field(default=2**28, ge=0)
    """With transformers: keys and values of rows that a later prompt may go on from (conversations, tools,
    retries, branches), for each process; the least recently used go first. 0: none are kept."""
    decoder: Literal["auto", "modules"] = "auto"
    """With transformers: `auto` draws without the overhead of modules where the architecture is known and
    gives the same; `modules` never does."""
    memory_frac: float = Field(default=0.85, gt=0, le=1)
    """With vllm: the share of a device's memory that its engine may take, weights included; on a CPU, of the
    free memory, for its cache alone."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return {"use": data} if isinstance(data, str) else data

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        use = data.get("use", "transformers")
        owners = dict.fromkeys(("max_batch_tokens", "prefix_cache_bytes", "decoder"), "transformers")
        for key, engine in (owners | {"memory_frac": "vllm"}).items():
            if cls.says(data, key) and use != engine:
                message = f"'{key}' belongs to the engine {engine}; this one is {use}"
                yield Fault(message, code="useless-key", fix=f"remove '{key}'", path=(key,))


class RolloutWorkers(Spec):
    """The processes that speak for one model."""

    workers: int = Field(default=1, ge=1)
    cpus: float | None = Field(default=None, ge=0)
    """Of each worker, as Ray counts them; default: none reserved where it has a GPU, or where the Ray is the
    run's own; else one."""
    gpus: float = Field(default=0, ge=0)
    """Of each worker; a fraction shares a device."""
    engine: Engine | None = None
    """Default: the runtime's `engine`."""


class TrainerWorkers(Spec):
    """The processes that train one model."""

    workers: int = Field(default=1, ge=1)
    cpus: float | None = Field(default=None, ge=0)
    gpus: float = Field(default=0, ge=0)
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """With several workers: each holds the whole model (`ddp`), or a shard of it (`fsdp2`)."""


class Place(Spec):
    """What one model gets of a cluster."""

    placement: Literal["auto", "colocated", "separate"] = "auto"
    """`colocated`: engine and trainer in one process on one device, sharing weights; vllm has weights of its
    own and sleeps while the trainer works. `separate`: rollout workers and trainer workers apart. `auto`:
    colocated where one process does both, or nothing is trained; with vllm on ray, separate."""
    rollout: RolloutWorkers = RolloutWorkers()
    trainer: TrainerWorkers = TrainerWorkers()

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        rollout, trainer = data.get("rollout"), data.get("trainer")
        if data.get("placement") == "colocated" and isinstance(rollout, dict) and isinstance(trainer, dict):
            for key in ("workers", "gpus", "cpus"):
                if key in rollout and key in trainer and rollout[key] != trainer[key]:
                    message = f"colocated workers are the same processes, and '{key}' differs between them"
                    fix = "write it once, or equal in both; or 'placement: separate'"
                    yield Fault(message, code="bad-placement", fix=fix, path=("trainer", key))


class Wandb(Spec):
    """Weights & Biases. Its key comes from the environment; WANDB_MODE=offline writes to the run's folder."""

    project: str = "masflow"
    entity: str | None = None
    group: str | None = None
    """Default: over several seeds their common folder's name."""
    name: str | None = None
    """Default: the run's folder's name."""
    tags: tuple[str, ...] = ()

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return {"project": data} if isinstance(data, str) else data


class Tracking(Spec):
    """Where a run's numbers go beside metrics.jsonl, under the same names with `/` between their parts."""

    tensorboard: bool = False
    """Write event files to the run's folder, `tensorboard/` (extra: tensorboard)."""
    wandb: Wandb | None = None
    """A project's name is enough, or `true` (extra: wandb)."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("wandb"), bool):
            return {**data, "wandb": {} if data["wandb"] else None}
        return data


RAY_ONLY = ("address", "defaults", "models", "start_timeout_s", "call_timeout_s")


class Runtime(Spec):
    """A whole runtime."""

    backend: Literal["local", "ray"] = "local"
    """`local`: one process, which a debugger can stop. `ray`: a star of actors, here or on a cluster."""
    address: str | None = None
    """With ray: `auto` or HOST:PORT joins a cluster; default: a silent Ray of the run's own."""
    deterministic: bool = True
    """Batches form at barriers in node order with fixed threads: a run repeats bit for bit. Turned off (the
    default with ray), requests go out as they come, and sums may round otherwise."""
    threads: int | None = Field(default=None, ge=1)
    """Of each process. Default: 1 where the run is deterministic, else torch's choice (with ray: the CPUs of
    a worker)."""
    engine: Engine = Engine()
    pipeline: Literal["auto", "sync"] = "auto"
    sandbox: Literal["bubblewrap", "limits_only"] = "bubblewrap"
    """Where programs that models write run. `limits_only` is NOT SAFE: they then have the files, the network
    and the processes of whoever trains, under limits of time and memory alone."""
    defaults: Place = Place()
    """With ray: what each model gets that `models` doesn't name."""
    models: dict[str, Place] = Field(default_factory=dict)
    """With ray: by the mapping's name of a model."""
    tracking: Tracking = Tracking()
    start_timeout_s: float = Field(default=300.0, gt=0)
    """With ray: how long actors may take to be placed and to load their model."""
    call_timeout_s: float = Field(default=3600.0, gt=0)
    """With ray: how long one batch of replies, or one update, may take."""

    hints: ClassVar[dict[str, str]] = {"workers": "defaults: {rollout: {workers: …}}", "ray": "backend: ray"}

    @classmethod
    def longhand(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("backend") == "ray" and "deterministic" not in data:
            return {**data, "deterministic": False}
        return data

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("backend", "local") != "local":
            return
        for key in RAY_ONLY:
            if cls.says(data, key):
                message = f"'{key}' belongs to 'backend: ray'; this runtime is local"
                fix = f"write 'backend: ray', or remove '{key}'"
                yield Fault(message, code="useless-key", fix=fix, path=(key,))
