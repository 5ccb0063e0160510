"""Corpora of passages: read from a user's file with every bad row named, and kept with offsets, so that one
passage can be read without the others.
"""

from __future__ import annotations

import gzip
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from masflow.errors import Problem, SpecError, Where

__all__ = ["StoredPassages", "read_corpus", "save_passages", "searched_texts", "stamp"]

Passage = dict[str, Any]
Passages = Sequence[Passage]

ROWS, OFFSETS = "passages.jsonl", "offsets.npy"


class StoredPassages(Sequence[Passage]):
    """Passages in a folder that `save_passages` wrote, memory-mapped: read when asked for, shared by all
    processes."""

    def __init__(self, folder: Path):
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        with (folder / ROWS).open("rb") as file:
            self._rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if int(self._offsets[-1]) != len(self._rows):
            raise ValueError("the passages don't end where their offsets say")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, end = int(self._offsets[place]), int(self._offsets[place + 1])
        return json.loads(self._rows[start:end].decode("utf-8", "surrogatepass"))


def save_passages(passages: Passages, folder: Path) -> None:
    """Write passages one a line, and the (n + 1,) int64 offsets of their lines in bytes."""
    offsets = np.zeros(len(passages) + 1, dtype=np.int64)
    with (folder / ROWS).open("wb") as out:
        for i, passage in enumerate(passages):
            text = json.dumps(passage, ensure_ascii=False) + "\n"
            offsets[i + 1] = offsets[i] + out.write(text.encode("utf-8", "surrogatepass"))
    np.save(folder / OFFSETS, offsets)


def searched_texts(passages: Passages, path: Path, title_field: str | None) -> list[str]:
    """The text of each passage as it is searched, its title before it.

    Raises:
        SpecError: no passage has the title field.
    """
    if title_field is None:
        return [passage["text"] for passage in passages]
    if not any(title_field in passage for passage in passages):
        known = ", ".join(passages[0])
        message = f"no passage has a '{title_field}'; the first one has {known}"
        fix = "name a field of the passages as title_field, or leave it out"
        raise SpecError(Problem.at(Where(str(path)), "bad-corpus-field", message, fix))
    return [f"{passage.get(title_field) or ''} {passage['text']}" for passage in passages]


def stamp(path: Path) -> tuple[int, int]:
    """Time and size of a corpus, which tell that it has changed.

    Raises:
        SpecError: it isn't there.
    """
    try:
        stat = path.stat()
    except OSError as error:
        message = f"cannot read the corpus: {error.strerror}"
        fix = "write an existing file"
        raise SpecError(Problem.at(Where(str(path)), "missing-corpus", message, fix)) from None
    return stat.st_mtime_ns, stat.st_size


def read_corpus(path: Path, text_field: str = "text", id_field: str = "id") -> list[dict[str, Any]]:
    """Passages `{"id", "text", …}` in file order; other fields are kept.

    Without an id the line's number is one.

    Raises:
        SpecError: every bad row, with its line.
    """
    passages, problems, seen = [], [], {}
    for line, text in _lines(path):
        row, wrong = _passage(text, text_field, id_field, line)
        if not wrong and row["id"] in seen:
            wrong = f"id {row['id']!r} stands on line {seen[row['id']]} already"
        if wrong:
            fix = f'write {{"{id_field}": …, "{text_field}": "…"}}, one object a line'
            problems.append(Problem.at(Where(str(path), line), "bad-corpus-row", wrong, fix))
        else:
            seen[row["id"]] = line
            passages.append(row)
    if not passages and not problems:
        problems.append(
            Problem.at(Where(str(path)), "empty-corpus", "the corpus has no passages", "write one a line")
        )
    if problems:
        raise SpecError(problems)
    return passages


def _passage(text: str, text_field: str, id_field: str, line: int) -> tuple[dict[str, Any], str]:
    try:
        row = json.loads(text)
    except ValueError as error:
        return {}, f"not JSON: {error}"
    if not isinstance(row, dict):
        return {}, f"expected an object, got {type(row).__name__}"
    if not isinstance(row.get(text_field), str):
        return (
            {},
            f"field '{text_field}' must be text, got {row.get(text_field)!r}; fields here: {', '.join(row)}",
        )
    rest = {k: v for k, v in row.items() if k not in (text_field, id_field)}
    return {"id": str(row.get(id_field, line)), "text": row[text_field], **rest}, ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with _open(path) as file:
            yield from ((n, text) for n, text in enumerate(file, 1) if text.strip())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        problem = Problem.at(
            Where(str(path)),
            "bad-corpus",
            f"cannot read the corpus: {error}",
            "write UTF-8 .jsonl or .jsonl.gz",
        )
        raise SpecError(problem) from None


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")
