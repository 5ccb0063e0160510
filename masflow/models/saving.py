"""Policies on disk: weights as safetensors, optimizer states by parameter name; exact both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from masflow.errors import RunError, boundary
from masflow.models.trainer import Learner
from masflow.models.weights import checksum, gathered, put, spread_like

__all__ = [
    "Facts",
    "Saved",
    "checksum",
    "file_name",
    "load_alone",
    "load_learner",
    "load_weights",
    "read_facts",
    "read_whole",
    "save_learner",
    "save_object",
    "save_weights",
    "write_facts",
]


MENDS = "remove that checkpoint's folder to go on from the one before it, or name another checkpoint"


@dataclass(frozen=True)
class Saved:
    """A policy of a saved model."""

    adapter: str | None
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """`model.json`: what a model's part of a checkpoint holds."""

    model: str
    train: str
    policies: dict[str, Saved]
    versions: dict[str, int]
    changed: tuple[str, ...]
    """Policies whose weights are here; the others are the base's own."""
    has_reference: tuple[str, ...]
    optimizers: tuple[str, ...] | None = None
    """Learners whose optimizer has a file; None: unknown."""
    references: tuple[str, ...] | None = None
    """Learners whose reference has a file; None: unknown."""
    dtype: str = ""
    """In which the model was held while it was trained, e.g. `float32`; empty: unknown."""
    alpha: float | None = None
    """Of all adapters, in a checkpoint that has no `alphas`."""
    alphas: dict[str, float] | None = None
    """Of each adapter: what its product is multiplied by, times the rank; None: unknown."""
    files: dict[str, str] | None = None
    """Of each learner, how its files' names begin; None: as earlier versions named them."""

    def __post_init__(self) -> None:
        if set(self.versions) != set(self.policies):
            raise ValueError("versions and policies name others")

    def stem(self, learner: str) -> str:
        """How the names of a learner's files begin."""
        return (
            learner.replace("/", ".") if self.files is None else self.files.get(learner, file_name(learner))
        )

    def alpha_of(self, policy: str) -> float | None:
        return self.alpha if self.alphas is None else self.alphas.get(policy)


FACTS = TypeAdapter(Facts)


def file_name(policy: str) -> str:
    """A policy's name as a file's: `policy/team.worker` → `policy.team-worker`. No two of one model's
    policies share one."""
    if "/" not in policy:
        return policy
    parts = [quote(part, safe="").replace("-", "%2D").replace(".", "-") for part in policy.split("/")]
    return ".".join(parts)


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Raises OSError for whatever a library raises when it can't write `path`: each has errors of its own."""
    with boundary(str(path)) as caught:
        yield
    if caught.error:
        raise OSError(caught.error)


def save_object(path: Path, value: Any) -> None:
    """Raises OSError when it can't be written."""
    with on_disk(path):
        torch.save(value, path)


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors, read them back and compare; ones that share memory (tied weights) are written once each.

    Raises:
        OSError: it can't be written.
        RunError: what stands on the disk isn't what was written.
    """
    with on_disk(path):
        save_file({name: w.detach().cpu().contiguous().clone() for name, w in weights.items()}, path)
    written = load_file(path)
    wrong = [
        n for n, w in weights.items() if n not in written or not _same_bits(written[n], w.detach().cpu())
    ]
    if wrong:
        raise RunError(f"{path} was written, but reads back otherwise, e.g. '{wrong[0]}'", "look at its disk")


def load_weights(paths: Path | Sequence[Path], into: Mapping[str, Tensor]) -> None:
    """Copy tensors saved in one or several files into parameters, all of them or none.

    Raises:
        RunError: a file is missing, or names, shapes or dtypes differ from what this run has.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    saved: dict[str, Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise RunError(f"{path} is missing", "name a checkpoint that holds this model")
        saved |= read_whole(path, load_file)
    file = paths[0]
    if set(saved) != set(into):
        odd = sorted(set(saved) ^ set(into))
        raise RunError(
            f"{file} holds other weights than this model has, e.g. '{odd[0]}'",
            "use the model that it was saved from",
        )
    for name, parameter in into.items():
        if saved[name].shape != parameter.shape:
            shapes = f"{tuple(saved[name].shape)}, not {tuple(parameter.shape)}"
            raise RunError(f"{file}: '{name}' has shape {shapes}", "use the model that it was saved from")
    for name, parameter in into.items():
        put(parameter, saved[name])


def read_whole(path: Path, read: Callable[[Path], Any]) -> Any:
    """What `read` finds in a file of a checkpoint.

    Raises:
        RunError: the file is missing or torn.
    """
    found: Any = None
    with boundary(str(path)) as caught:
        found = read(path)
    if caught.error:
        raise RunError(f"can't be read: {caught.error}", MENDS)
    return found


def save_learner(folder: Path, learner: Learner, writes: bool = True) -> None:
    """Write `<policy>.safetensors`, and where there are any its `.optimizer.pt`, `.reference.safetensors`.

    Args:
        writes: False in all but one of several processes that share the weights: they only give their parts.
    """
    stem = file_name(learner.name)
    weights = {name: gathered(p.detach()) for name, p in learner.parameters.items()}
    if writes:
        save_weights(folder / f"{stem}.safetensors", weights)
    if learner.optimizer is not None:
        names = dict(zip(learner.parameters.values(), learner.parameters, strict=True))
        found = learner.optimizer.state.items()
        states = {names[p]: {k: gathered(v) for k, v in state.items()} for p, state in found}  # type: ignore[index]
        if writes:
            save_object(folder / f"{stem}.optimizer.pt", states)
    if learner.reference is not None:
        reference = {name: gathered(weight) for name, weight in learner.reference.items()}
        if writes:
            save_weights(folder / f"{stem}.reference.safetensors", reference)


def load_learner(folder: Path, learner: Learner, facts: Facts) -> None:
    """The exact reverse of `save_learner`.

    Raises:
        RunError: a file is missing, torn, or another model's.
    """
    stem = facts.stem(learner.name)
    load_alone(folder, learner, stem, facts.optimizers)
    file = folder / f"{stem}.reference.safetensors"
    if _is_there(file, learner.name, facts.references):
        learner.reference = {name: w.detach().clone() for name, w in learner.parameters.items()}
        load_weights(file, learner.reference)


def load_alone(folder: Path, learner: Learner, stem: str, optimizers: tuple[str, ...] | None) -> None:
    """Weights and optimizer of a learner that belongs to no model's facts, or before its reference.

    Args:
        optimizers: learners whose optimizer has a file; None: unknown.
    Raises:
        RunError: as `load_learner`.
    """
    load_weights(folder / f"{stem}.safetensors", learner.parameters)
    learner.optimizer = learner.reference = None
    file = folder / f"{stem}.optimizer.pt"
    if _is_there(file, learner.name, optimizers):
        read_whole(file, lambda path: _load_optimizer(path, learner))


def _is_there(file: Path, name: str, listed: tuple[str, ...] | None) -> bool:
    """Raises RunError when the checkpoint was saved with this file and it is gone."""
    if listed is not None and name in listed and not file.is_file():
        raise RunError(f"{file} is missing", MENDS)
    return file.is_file()


def _load_optimizer(path: Path, learner: Learner) -> None:
    states: dict[str, dict[str, Any]] = torch.load(path, weights_only=True)
    learner.optimizer = optimizer = learner.fresh_optimizer()
    for name, state in states.items():
        parameter = learner.parameters[name]
        optimizer.state[parameter] = {k: _state_like(parameter, k, v) for k, v in state.items()}


def _state_like(parameter: Tensor, key: str, value: Any) -> Any:
    """An optimizer's state where its parameter is; only the count of steps is the same on every process."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.to(parameter.device)
    return spread_like(parameter, value.to(parameter.device))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def write_facts(folder: Path, facts: Facts) -> None:
    (folder / "model.json").write_bytes(FACTS.dump_json(facts, indent=1))


def read_facts(folder: Path) -> Facts:
    """Raises RunError where `folder` isn't a model's part of a checkpoint."""
    try:
        return FACTS.validate_json((folder / "model.json").read_bytes(), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg'].lower()}"
        message = f"{folder / 'model.json'} is torn, or another version of masflow wrote it ({wrong})"
        raise RunError(message, MENDS) from error
    except OSError as error:
        raise RunError(f"{folder} isn't a model's folder of a checkpoint: {error}", MENDS) from error
