"""Policies on disk: weights as safetensors, optimizer states by parameter name; exact both ways."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from masflow.errors import RunError, boundary
from masflow.models.trainer import Learner

__all__ = [
    "checksum",
    "file_name",
    "load_learner",
    "load_weights",
    "read_facts",
    "read_whole",
    "save_learner",
    "save_weights",
    "write_facts",
]


def file_name(policy: str) -> str:
    """A policy's name as a file's: `team/worker` → `team.worker`."""
    return policy.replace("/", ".")


def save_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors, read them back and compare; ones that share memory (tied weights) are written once each.

    Raises:
        RunError: what stands on the disk isn't what was written.
    """
    save_file({name: w.detach().cpu().contiguous().clone() for name, w in weights.items()}, path)
    written = load_file(path)
    wrong = [
        n for n, w in weights.items() if n not in written or not _same_bits(written[n], w.detach().cpu())
    ]
    if wrong:
        raise RunError(f"{path} was written, but reads back otherwise, e.g. '{wrong[0]}'", "look at its disk")


def load_weights(paths: Path | Sequence[Path], into: Mapping[str, nn.Parameter]) -> None:
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
    with torch.no_grad():
        for name, parameter in into.items():
            parameter.copy_(saved[name])


def read_whole(path: Path, read: Callable[[Path], Any]) -> Any:
    """What `read` finds in a file of a checkpoint.

    Raises:
        RunError: the file is missing or torn.
    """
    found: Any = None
    with boundary(str(path)) as caught:
        found = read(path)
    if caught.error:
        fix = "remove that checkpoint's folder to go on from the one before it, or name another checkpoint"
        raise RunError(f"can't be read: {caught.error}", fix)
    return found


def save_learner(folder: Path, learner: Learner) -> None:
    """Write `<policy>.safetensors`, and where there are any its `.optimizer.pt`, `.reference.safetensors`."""
    stem = file_name(learner.name)
    save_weights(folder / f"{stem}.safetensors", learner.parameters)
    if learner.optimizer is not None:
        names = dict(zip(learner.parameters.values(), learner.parameters, strict=True))
        states = {names[p]: dict(state) for p, state in learner.optimizer.state.items()}  # type: ignore[index]
        torch.save(states, folder / f"{stem}.optimizer.pt")
    if learner.reference is not None:
        save_weights(folder / f"{stem}.reference.safetensors", learner.reference)


def load_learner(folder: Path, learner: Learner) -> None:
    """The exact reverse of `save_learner`."""
    stem = file_name(learner.name)
    load_weights(folder / f"{stem}.safetensors", learner.parameters)
    file = folder / f"{stem}.optimizer.pt"
    learner.optimizer = None
    if file.is_file():
        device = next(iter(learner.parameters.values())).device
        states: dict[str, dict[str, Any]] = read_whole(file, torch.load)
        learner.optimizer = torch.optim.AdamW(list(learner.parameters.values()), lr=0.0)
        for name, state in states.items():
            moved = {
                k: v.to(device) if isinstance(v, Tensor) and k != "step" else v for k, v in state.items()
            }
            learner.optimizer.state[learner.parameters[name]] = moved
    reference = folder / f"{stem}.reference.safetensors"
    learner.reference = None
    if reference.is_file():
        device = next(iter(learner.parameters.values())).device
        learner.reference = {name: w.to(device) for name, w in read_whole(reference, load_file).items()}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "model.json").write_text(json.dumps(facts, indent=1, sort_keys=True))


def read_facts(folder: Path) -> dict[str, Any]:
    """Raises RunError where `folder` isn't a model's part of a checkpoint."""
    try:
        return json.loads((folder / "model.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder} isn't a model's folder of a checkpoint: {error}", "name another checkpoint"
        ) from error


def checksum(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes, 16 hex digits; equal exactly where every bit is."""
    from hashlib import sha256

    digest = sha256()
    for name, weight in weights.items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
