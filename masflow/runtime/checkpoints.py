"""Checkpoints: written beside their place and renamed, so that one is whole or absent; kept by rule.

Knows no torch: a model group writes and reads its own folder. Layout: `checkpoints/step_000012/` with
`state.json` and `models/`; `step_000000` is the state after the warm start, `warm_000120` one inside it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from masflow.compiler import runs
from masflow.errors import RunError, closest

NAME = re.compile(r"(warm|step)_(\d{6,})\Z")


class Saver(Protocol):
    """What writes and reads its own part of a checkpoint (a model group)."""

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass
class RunState:
    """Where a run stands; with the models' folders, everything that resuming needs."""

    warm_step: int = 0
    """Updates of the warm start done."""
    warmed: bool = False
    """The warm start is over (or there is none)."""
    step: int = 0
    position: int = 0
    """Task rows drawn so far."""
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Step (as text) → result of its evaluation."""
    idle: dict[str, int] = field(default_factory=dict)
    """Consecutive steps without a learnable group (`groups`) or without a trainable turn of a role."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What passes keep between steps."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl when the checkpoint was written."""
    digest: str = ""

    @property
    def name(self) -> str:
        return f"step_{self.step:06d}" if self.warmed else f"warm_{self.warm_step:06d}"


STATE = TypeAdapter(RunState)
UNREADABLE = "remove that folder to go on from the checkpoint before it, or name another one"


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Turn a failing disk into a RunError that says what stands on it already."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        found = latest(folder / "checkpoints")
        saved = f"saved so far: {found}" if found else "no checkpoint has been saved yet"
        full = (
            any(word in str(error) for word in ("full", "No space left"))
            or getattr(error, "errno", None) == errno.ENOSPC
        )
        mend = "make room on the disk" if full else "check the folder and its permissions"
        fix = f"{mend}, then " + (f"continue with --resume --out {folder}" if found else "start again")
        raise RunError(f"can't write {what} in {folder}: {error}; {saved}", fix) from error


def save(root: Path, state: RunState, models: dict[str, Saver]) -> Path:
    """Write a checkpoint under `root`; it appears under its name only when it is on the disk whole."""
    place = root / state.name
    partial = root / f".partial-{state.name}"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "models").mkdir(parents=True)
    for name, model in models.items():
        (partial / "models" / name).mkdir()
        model.save(partial / "models" / name)
    hashed = {"sha256": runs.weights_hash(partial)}
    (partial / runs.HASHES).write_text(json.dumps(hashed), encoding="utf-8")
    (partial / "state.json").write_text(json.dumps(asdict(state), indent=1, sort_keys=True), encoding="utf-8")
    sync_tree(partial)
    if place.exists():
        old = root / f".partial-old-{state.name}"
        shutil.rmtree(old, ignore_errors=True)
        place.rename(old)
        partial.rename(place)
        shutil.rmtree(old)
    else:
        partial.rename(place)
    _sync(root)
    return place


def put_text(path: Path, text: str) -> None:
    """Write a text file at once: a reader finds the old one or the new one, whole."""
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(text, encoding="utf-8")
    _sync(partial)
    partial.replace(path)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder under `folder`, itself last."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clean(root: Path) -> None:
    """Mend what a killed writer left: an old copy whose successor never appeared goes back to its name."""
    for old in root.glob(".partial-old-*"):
        place = root / old.name.removeprefix(".partial-old-")
        if not place.exists():
            old.rename(place)
    for partial in root.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def listed(root: Path) -> list[Path]:
    """All whole checkpoints, earliest first."""
    found = [p for p in root.glob("*_*") if NAME.match(p.name) and (p / "state.json").is_file()]
    return sorted(found, key=lambda p: (p.name.startswith("step"), int(p.name.split("_")[1])))


def latest(root: Path) -> Path | None:
    found = listed(root)
    return found[-1] if found else None


def read_state(folder: Path) -> RunState:
    """Raises RunError when the folder holds no readable state."""
    try:
        text = (folder / "state.json").read_text(encoding="utf-8")
        found = json.loads(text)
        odd = set(found) ^ set(RunState.__dataclass_fields__) if isinstance(found, dict) else {"state.json"}
        if odd:
            raise ValueError(f"another version of masflow wrote it, or no version did: see '{min(odd)}'")
        return STATE.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = f"{folder / 'state.json'}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
        raise RunError(message, UNREADABLE) from error
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} isn't a checkpoint that can be read: {error}", UNREADABLE) from error


def restore(folder: Path, models: dict[str, Saver]) -> RunState:
    """Load every model group's part and return the state."""
    state = read_state(folder)
    for name, model in models.items():
        part = folder / "models" / name
        if not part.is_dir():
            known = ", ".join(sorted(p.name for p in (folder / "models").glob("*"))) or "none"
            raise RunError(
                f"{folder} holds no model '{name}'; it holds: {known}",
                "use the mapping that it was made with",
            )
        model.load(part)
    return state


def prune(root: Path, keep: int, best: int | None, first: int = 0, every: int | None = None) -> None:
    """Retention: the `keep` newest before the last, the last, the best, the start of RL, and each multiple of
    `every`."""
    steps = [p for p in listed(root) if p.name.startswith("step")]
    kept = {p.name for p in steps[-(keep + 1) :]} | {f"step_{first:06d}"}
    if best is not None:
        kept.add(f"step_{best:06d}")
    if every is not None:
        kept |= {p.name for p in steps if int(p.name.split("_")[1]) % every == 0}
    for path in listed(root):
        if path.name not in kept and (steps or path != latest(root)):
            shutil.rmtree(path)


def best_step(state: RunState, root: Path) -> int | None:
    """The step under `root` with the best held-out headline, the earliest of equals."""
    saved = (int(p.name.split("_")[1]) for p in listed(root) if p.name.startswith("step"))
    return runs.best_step(state.evals, saved)


def find(reference: str, roots: tuple[Path, ...]) -> Path:
    """The checkpoint that `RUN` (its last), `RUN@step`, `RUN@best`, or a checkpoint's own folder names.

    Raises:
        RunError: nothing there, with what is.
    """
    text, _, step = reference.partition("@")
    tried = [Path(text)] if Path(text).is_absolute() else [root / text for root in roots]
    folder = next((path for path in tried if path.is_dir()), None)
    if folder is None:
        names = [p.name for root in roots for p in (root / Path(text).parent).glob("*") if p.is_dir()]
        near = closest(Path(text).name, names)
        fix = (
            f"write '{Path(text).parent / near}'"
            if near
            else "name a run's folder, or one of its checkpoints"
        )
        raise RunError(f"no run at '{text}'", fix)
    if (folder / "state.json").is_file():
        return folder
    root = folder / "checkpoints"
    last = latest(root)
    if last is None:
        seed = min(folder.glob("seed_*"), default=None)
        fix = (
            "let the run reach one, or name another run" if seed is None else f"name a seed's run, as {seed}"
        )
        raise RunError(f"{folder} holds no checkpoint", fix)
    if step in ("", "last"):
        return last
    if step == "best":
        best = best_step(read_state(last), root)
        if best is None:
            message = f"{folder} has no held-out score of a checkpoint, so no best one"
            raise RunError(message, "name a step, or 'last'")
        step = str(best)
    place = root / f"step_{int(step):06d}" if step.isdigit() else root / step
    if not (place / "state.json").is_file():
        known = ", ".join(p.name for p in listed(root)) or "none"
        raise RunError(
            f"{folder} holds no checkpoint of step '{step}'; it holds: {known}", "name one of those"
        )
    return place
