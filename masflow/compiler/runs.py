"""`RUN[@step]`: whether an earlier run has the checkpoint that a document starts from. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from masflow.errors import Problem, SpecError
from masflow.project import Loaded, resolve

__all__ = ["run_problems"]


def run_problems(loaded: Loaded[Any], init: str, *at: str) -> Iterator[Problem]:
    """A missing run, or one without that checkpoint; `at` is where the document says it."""
    where = loaded.source.where(*at)
    run, _, step = init.partition("@")
    try:
        folder = resolve(run, loaded.path, loaded.root, where, "run")
    except SpecError as error:
        yield from error.problems
        return
    if (folder / "state.json").is_file() and not step:
        return  # the folder of one checkpoint
    kept = sorted(p.parent.name for p in folder.glob("checkpoints/*/state.json"))
    wanted = f"step_{int(step):06d}" if step.isdigit() else step
    if not kept or (step and wanted not in kept):
        message = f"'{init}' has no such checkpoint; kept: {', '.join(kept) or 'none'}"
        fix = "name a kept step, or leave '@step' out for the last one"
        yield Problem.at(where, "missing-checkpoint", message, fix)
