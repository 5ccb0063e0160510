"""A workflow document with its place: reads what it names (prompts, functions) and says where things stand.

Knows no graph. Problems are collected in the list that every method is handed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from masflow.errors import Problem, SpecError, Where, unknown
from masflow.project import Source, expand_data, resolve
from masflow.spec.workflow import Workflow

__all__ = ["Doc", "file_hash", "is_file_function", "text_hash"]

_FUNCTION = re.compile(
    r"(?P<file>[^\s:]+\.py)\s*:\s*(?P<fn>[A-Za-z_]\w*)\Z|(?P<module>[A-Za-z_][\w.]*):[A-Za-z_]\w*\Z"
)


@dataclass(frozen=True)
class Doc:
    """One workflow as written: the whole file, or a part of one (`prefix`)."""

    spec: Workflow
    source: Source
    path: Path | None
    root: Path
    prefix: tuple[str | int, ...] = ()

    def where(self, *path: str | int) -> Where:
        return self.source.where(*self.prefix, *path)

    def inner(self, spec: Workflow, *path: str | int) -> Doc:
        """A workflow written inside this one."""
        return Doc(spec, self.source, self.path, self.root, (*self.prefix, *path))

    def resolve(self, ref: str, what: str, problems: list[Problem], *path: str | int) -> Path | None:
        try:
            return resolve(ref, self.path, self.root, self.where(*path), what)
        except SpecError as error:
            problems.extend(error.problems)
            return None

    def text(self, raw: str | None, problems: list[Problem], *path: str | int) -> tuple[str | None, str]:
        """A prompt: (its text, the file it came from or ""). Inline when it has a blank, a line break or
        `{{`.
        """
        if raw is None:
            return None, ""
        if not raw or re.search(r"\s|\{\{", raw):
            return raw, ""
        missing: list[Problem] = []
        found = self.resolve(raw, "prompt file", missing, *path)
        if found is None:
            if not re.search(r"/|\.\w+\Z", raw):
                hint = f'; a prompt of one word is taken for a file: to write the text itself: "{raw}\\n"'
                missing = [replace(p, fix=p.fix + hint) for p in missing]
            problems.extend(missing)
            return "", raw
        if not found.is_file():
            message = f"prompt file '{raw}' is no ordinary file"
            problems.append(Problem.at(self.where(*path), "bad-prompt-file", message, "name a file of text"))
            return "", raw
        try:
            return found.read_text(encoding="utf-8"), str(found)
        except (OSError, UnicodeDecodeError) as error:
            message = f"can't read prompt file '{raw}': {error}"
            problems.append(
                Problem.at(self.where(*path), "bad-prompt-file", message, "save it as UTF-8 text")
            )
            return "", raw

    def function(self, ref: str, problems: list[Problem], *path: str | int) -> str | None:
        """`file.py:fn` with the file made absolute; `module:fn` as it is; None when it is neither or is
        missing.
        """
        match = _FUNCTION.match(ref.strip())
        if not match:
            message = f"'{ref}' isn't a function; write 'file.py:fn' or 'module:fn'"
            problems.append(Problem.at(self.where(*path), "bad-function", message, "name a Python function"))
            return None
        if not match["file"]:
            return ref.strip()
        found = self.resolve(match["file"], "Python file", problems, *path)
        return f"{found}:{match['fn']}" if found else None

    def rendered(self, raw: Any, params: Mapping[str, Any], problems: list[Problem], *path: str | int) -> Any:
        """A value whose templates see `params` alone, worked out now; None after a problem."""
        if "{{" not in str(raw):
            return raw
        from masflow.compiler import expressions

        lost = list(_lost_names(raw, params, self.where(*path)))
        problems.extend(lost)
        if lost:
            return None
        try:
            return expressions.value(raw, {"params": dict(params)})
        except expressions.TemplateProblem as error:
            fix = "mend the template, or write a literal"
            problems.append(Problem.at(self.where(*path), "bad-template", str(error), fix))
            return None

    def data_file(self, raw: str, what: str, problems: list[Problem], *path: str | int) -> Path | None:
        """A data path with its variables expanded, found, and a file."""
        try:
            found = self.resolve(expand_data(raw, self.root, self.where(*path)), what, problems, *path)
        except SpecError as error:
            problems.extend(error.problems)
            return None
        if found is not None and not found.is_file():
            message = f"{what} '{raw}' is a folder"
            problems.append(Problem.at(self.where(*path), "not-a-file", message, "name a file inside it"))
            return None
        return found


def _lost_names(raw: Any, params: Mapping[str, Any], where: Where) -> Iterator[Problem]:
    """The names in a value's templates that aren't there when a workflow is compiled."""
    from masflow.compiler import expressions

    if isinstance(raw, (Mapping, list, tuple)):
        for item in raw.values() if isinstance(raw, Mapping) else raw:
            yield from _lost_names(item, params, where)
    for name, *fields in (
        (r.path for r in expressions.references(raw, "value")) if isinstance(raw, str) else ()
    ):
        if name != "params":
            message = f"'{name}' isn't known when a workflow is compiled; known: params"
            yield Problem.at(where, "bad-template", message, "use params or a literal")
        elif fields and fields[0] not in params:
            yield unknown(where, "param", fields[0], params)


def is_file_function(ref: str) -> bool:
    return bool((match := _FUNCTION.match(ref)) and match["file"])


def text_hash(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


@lru_cache(maxsize=1024)
def _hash_of(path: str, size: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def file_hash(path: Path | str) -> str:
    """Hash of a file's contents; kept until its size or time of change differ."""
    stat = Path(path).stat()
    return _hash_of(str(path), stat.st_size, stat.st_mtime_ns)
