"""Folders written by `datasets` (`save_to_disk`): split, hash and rows, without importing it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from masflow.compiler.documents import file_hash
from masflow.errors import Problem, Where, unknown

__all__ = ["arrow_files", "is_saved", "saved_hash", "saved_rows", "saved_split"]

ONE, SEVERAL = "state.json", "dataset_dict.json"


def is_saved(path: Path) -> bool:
    """True for the folder of one saved data set, or of several splits."""
    return (path / ONE).is_file() or (path / SEVERAL).is_file()


def saved_split(path: Path, split: str | None, where: Where) -> Path | Problem:
    """The folder that holds the rows of a split (default: train); a data set without splits is its own."""
    if (path / ONE).is_file():
        if split is None:
            return path
        message = f"'{path.name}' holds one data set, which has no splits"
        return Problem.at(where, "option-without-effect", message, "remove 'split'")
    known = sorted(p.name for p in path.iterdir() if (p / ONE).is_file())
    name = split or "train"
    return path / name if name in known else unknown(where, "split", name, known)


def arrow_files(folder: Path) -> list[Path]:
    """The files that hold the rows, in order.

    Raises:
        OSError, ValueError: the folder's list of them can't be read.
    """
    listed = json.loads((folder / ONE).read_text(encoding="utf-8")).get("_data_files") or []
    return [folder / str(entry["filename"]) for entry in listed]


def saved_hash(folder: Path) -> str:
    """Hash of the rows' files; where the folder stands doesn't matter. Raises as `arrow_files`."""
    text = "".join(file_hash(path) for path in arrow_files(folder))
    return hashlib.sha256(text.encode()).hexdigest()


def saved_rows(folder: Path) -> list[Any]:
    """All rows as dictionaries. Raises as `arrow_files`."""
    import pyarrow  # comes with datasets

    rows: list[Any] = []
    for path in arrow_files(folder):
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            rows += stream.read_all().to_pylist()
    return rows
