"""Data rows: read from files or the Hugging Face hub, checked against the task's fields, renamed by `from`.

A file is JSON Lines (also gzipped), a JSON list, CSV, Parquet, or a folder that `datasets` saved. Problems
name file, line and field.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from masflow.compiler.graph import TaskFieldIR
from masflow.compiler.plan import SourceIR
from masflow.compiler.saved_data import is_saved, saved_rows
from masflow.errors import Problem, SpecError, Where
from masflow.spec.types import LARGE, Type, mismatch, unwritable

if TYPE_CHECKING:
    from masflow.compiler.plan import Plan

__all__ = [
    "Task",
    "checked_rows",
    "data_problem",
    "glance",
    "load_tasks",
    "read_rows",
    "row_problems",
    "task_of",
]

FILE_ENDS = (".jsonl", ".ndjson", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
TABLE_ENDS = (".csv", ".tsv")
MAX_REPORTED = 3
MAX_CELL = 10_000_000
"""Characters of one cell of a table."""


@dataclass(frozen=True)
class Task:
    """One row as the workflow sees it."""

    id: str
    """Hash of the row's contents, with its ordinal where rows repeat."""
    row: dict[str, Any]
    source: int = 0
    """Which of the split's sources it comes from."""


def read_rows(source: SourceIR, fields: Sequence[TaskFieldIR] = ()) -> list[dict[str, Any]]:
    """All rows of one source, under their columns' names.

    Args:
        fields: give the cells of CSV tables, which are text, their types.
    Raises:
        SpecError: unreadable, empty, or a line that isn't a JSON object; at most three lines are named.
    """
    if not source.is_file:
        return _hub_rows(source)
    rows = [row for _, row in checked_rows(source, fields)]
    problems = [row for row in rows if isinstance(row, Problem)]
    if problems:
        raise SpecError(problems[:MAX_REPORTED])
    return [row for row in rows if isinstance(row, dict)]


def checked_rows(
    source: SourceIR, fields: Sequence[TaskFieldIR] = ()
) -> Iterator[tuple[int, dict[str, Any] | Problem]]:
    """(line from 1, row or what is wrong with it) of a file; a file without rows is one problem."""
    num_rows, types = 0, {f.source or f.name: f.type for f in fields}
    for num_rows, (line, row) in enumerate(_numbered(source.path), 1):  # noqa: B007
        if isinstance(row, Problem):
            yield line, row
        elif isinstance(row, dict):
            yield line, _typed(row, types) if source.path.endswith(TABLE_ENDS) else row
        else:
            message = f"a row is an object with the task's fields, got {type(row).__name__}"
            yield line, data_problem(source.path, line, "", "bad-row", message, 'write {"question": …}')
    if not num_rows:
        message = "the file holds no rows"
        yield 0, data_problem(source.path, 0, "", "empty-data", message, "add rows or name another file")


def data_problem(path: str, line: int, field: str, code: str, message: str, fix: str) -> Problem:
    from masflow.project import display_path

    return Problem(display_path(Path(path)), line, field, code, message, fix)


def _numbered(path: str) -> Iterator[tuple[int, Any]]:
    """(line from 1, row or Problem) of a file."""
    try:
        if path.endswith(".parquet") or is_saved(Path(path)):
            read = _parquet_rows if path.endswith(".parquet") else saved_rows
            yield from enumerate(read(Path(path)), 1)
            return
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        fix = "save it as UTF-8 text" if isinstance(error, UnicodeDecodeError) else "check the file"
        yield 0, data_problem(path, 0, "", "unreadable-data", f"can't be read: {error}", fix)
        return
    if path.endswith(TABLE_ENDS):
        yield from _table(path, text)
    elif path.endswith(".json"):
        yield from _json_list(path, text)
    else:
        for line, item in enumerate(text.split("\n"), 1):
            if item.strip():
                yield line, _json(path, line, item)


def _table(path: str, text: str) -> Iterator[tuple[int, Any]]:
    """Rows of a table with a header, every cell as text."""
    csv.field_size_limit(MAX_CELL)
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if path.endswith(".tsv") else ",")
    try:
        columns = list(table.fieldnames or ())
        twice = next((name for name in columns if columns.count(name) > 1), None)
        if twice is not None:
            message = f"the column '{twice}' stands twice in the header"
            yield 1, data_problem(path, 1, twice, "bad-row", message, "rename one of them")
            return
        for row in table:
            line, message = table.line_num, f"the row has more cells than the header's {len(columns)}"
            fix = "put quotes around a cell that holds the separator"
            yield line, data_problem(path, line, "", "bad-row", message, fix) if None in row else dict(row)
    except csv.Error as error:
        line, message = table.line_num + 1, f"not a table: {error}"
        yield line, data_problem(path, line, "", "bad-row", message, "check the quotes around this line")


def _json(path: str, line: int, text: str) -> Any:
    try:
        return _decoded(text) if not text.startswith("\ufeff") else json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return data_problem(path, line, "", "bad-row", f"not JSON: {why}", "write one JSON object a line")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


_decoder = json.JSONDecoder(parse_constant=_refuse)


def _decoded(text: str) -> Any:
    if text[:1] == "{":  # as nearly every row is: read without a look for space around it
        value, end = _decoder.raw_decode(text)
        if end == len(text):
            return value
    return _decoder.decode(text)


def _json_list(path: str, text: str) -> Iterator[tuple[int, Any]]:
    found = _json(path, 0, text)
    if isinstance(found, list):
        yield from enumerate(found, 1)
    else:
        bad = isinstance(found, Problem)
        message = "a .json data file holds a list of rows"
        yield (
            0,
            found if bad else data_problem(path, 0, "", "bad-row", message, "write [{…}, …], or use .jsonl"),
        )


def _parquet_rows(path: Path) -> list[Any]:
    import pyarrow.parquet  # comes with datasets

    return pyarrow.parquet.read_table(path).to_pylist()


def _hub_rows(source: SourceIR) -> list[dict[str, Any]]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded = datasets.load_dataset(source.path, split=source.split or "train")
    except (OSError, ValueError, DatasetsError) as error:
        message = f"data '{source.path}' can't be loaded from the hub: {str(error).splitlines()[0]}"
        raise SpecError(
            Problem(source.path, 0, "", "unreadable-data", message, "check the id, or name a file")
        ) from None
    return [dict(row) for row in loaded]


def task_of(row: dict[str, Any], fields: Sequence[TaskFieldIR]) -> dict[str, Any]:
    """The task's fields out of a row: renamed, columns that the workflow doesn't name left out.

    A field that may be null may be missing.
    """
    return {f.name: row.get(f.source or f.name) for f in fields}


def glance(fields: Sequence[TaskFieldIR]) -> Callable[[dict[str, Any]], bool]:
    """A test whether a row is surely right, seen at a glance: texts in ASCII, small numbers, lists of them.

    For rows by the ten thousand; `field_problem` has the say on the others.
    """
    exact = {"str": str, "int": int, "float": float, "bool": bool}
    wanted: list[tuple[str, type, type | None]] = []
    for f in fields:
        item = exact.get(f.type.item.kind) if f.type.item is not None else None
        wanted.append((f.source or f.name, list if item else exact.get(f.type.kind, _Unsure), item))

    def right(row: dict[str, Any]) -> bool:
        for column, kind, item in wanted:
            value: Any = row.get(column)
            if type(value) is not kind:
                return False
            if item is None:
                if value.isascii() if kind is str else kind is bool or -LARGE < value < LARGE:
                    continue
                return False
            for one in value:
                if type(one) is not item:
                    return False
                if not (one.isascii() if item is str else item is bool or -LARGE < one < LARGE):
                    return False
        return True

    return right


class _Unsure:
    """No value is one: what a glance doesn't judge."""


def field_problem(row: dict[str, Any], fields: Sequence[TaskFieldIR]) -> tuple[str, str, str] | None:
    """(column, code, message) of the first thing wrong with a row."""
    for f in fields:
        column = f.source or f.name
        if column not in row and not f.type.nullable:
            return (
                column,
                "missing-field",
                f"the row misses '{column}' ({f.type}); it has {', '.join(map(str, row)) or 'nothing'}",
            )
        wrong = mismatch(row.get(column), f.type, column)
        if wrong:
            return column, "wrong-field-type", wrong
        value = row.get(column)
        odd = None if type(value) is str and value.isascii() else unwritable(value)
        if odd:
            return column, "bad-row", f"'{column}' {odd}"
    return None


def row_problems(source: SourceIR, fields: Sequence[TaskFieldIR]) -> list[Problem]:
    """What is wrong with a file's rows, three of them at most; a hub id is checked when it is loaded."""
    return _misfits(source, checked_rows(source, fields), fields) if source.is_file else []


def _misfits(
    source: SourceIR, rows: Iterable[tuple[int, dict[str, Any] | Problem]], fields: Sequence[TaskFieldIR]
) -> list[Problem]:
    found: list[Problem] = []
    right = glance(fields)
    for line, row in rows:
        wrong = None if isinstance(row, Problem) or right(row) else field_problem(row, fields)
        if isinstance(row, Problem):
            found.append(row)
        elif wrong:
            column, code, message = wrong
            fix = f"correct the row, or the type of '{column}' in the workflow's task"
            found.append(data_problem(source.path, line, column, code, message, fix))
        if len(found) == MAX_REPORTED:
            break
    return found


def load_tasks(plan: Plan, split: str) -> list[Task]:
    """The tasks of a split, each row once, in order of their sources.

    Raises:
        SpecError: no such split, an unreadable or empty file, or a row that doesn't fit the task's fields.
    """
    if split not in plan.data:
        from masflow.errors import unknown

        raise SpecError(unknown(Where("data"), "split", split, [s for s in plan.data if s != "warm_start"]))
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, source in enumerate(plan.data[split]):
        raw = [] if source.is_file else read_rows(source)
        found = _misfits(source, enumerate(raw, 1), plan.graph.task)
        if problems := row_problems(source, plan.graph.task) or found:
            raise SpecError(problems)
        rows = [task_of(row, plan.graph.task) for row in raw or read_rows(source, plan.graph.task)]
        for row in rows:
            digest = hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:12]
            seen[digest] = seen.get(digest, 0) + 1
            tasks.append(Task(digest if seen[digest] == 1 else f"{digest}.{seen[digest]}", row, number))
    return tasks


def _typed(row: dict[str, Any], types: Mapping[str, Type]) -> dict[str, Any]:
    return {k: _cell(v, types[k]) if k in types and isinstance(v, str) else v for k, v in row.items()}


def _cell(value: str, type_: Type) -> Any:
    """A table's cell as its field's type, where the text says it plainly; lists and records are JSON."""
    if type_.nullable and value == "":
        return None
    try:
        if type_.kind in ("int", "float") and (not value.isascii() or "_" in value):
            return value
        if type_.kind in ("int", "float"):
            return int(value) if type_.kind == "int" else float(value)
        if type_.kind in ("list", "record"):
            return json.loads(value)
    except ValueError:
        return value
    if type_.kind == "bool":
        return {"true": True, "false": False}.get(value.lower(), value)
    return value
