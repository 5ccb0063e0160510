"""Documents and places: the project's root, references between files, YAML to specs with file and line.

Knows no graph: whatever spans objects is checked by the compiler.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from pydantic import ValidationError

from masflow.decorators import decorated
from masflow.errors import Problem, SpecError, Where, closest
from masflow.spec.base import Spec
from masflow.spec.experiment import Experiment
from masflow.spec.mapping import Mapping
from masflow.spec.problems import problems_of
from masflow.spec.runtime import Runtime
from masflow.spec.workflow import Workflow
from masflow.spec.yaml import read_yaml

Kind = Literal["workflow", "mapping", "runtime", "experiment"]
S = TypeVar("S", bound=Spec)
KINDS: dict[str, type[Spec]] = {
    "workflow": Workflow,
    "experiment": Experiment,
    "mapping": Mapping,
    "runtime": Runtime,
}
"""Every kind of document and its spec."""
ROOT_SIGNS = ("workflows", "pyproject.toml", ".git")
DATA = "MASFLOW_DATA"
"""The variable that says where shared data are."""
MAX_BYTES = 8_000_000
MAX_SHOWN = 200


@dataclass(frozen=True)
class Source:
    """Where the values of a document stand. `lines` maps a path of keys and indices to its line, from 1."""

    file: str
    lines: dict[tuple[str | int, ...], int] = field(default_factory=dict, repr=False)
    files: dict[tuple[str | int, ...], str] = field(default_factory=dict, repr=False)
    """Files of paths that stand elsewhere (a builder called from several files)."""

    def where(self, *path: str | int) -> Where:
        """The place of a value, on the line of its nearest known ancestor."""
        near = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in self.lines), None)
        line = 0 if near is None else self.lines[near]
        return Where(self.files.get(near or (), self.file), line, ".".join(map(str, path)))

    def under(self, *path: str | int) -> Source:
        """The source of a document written inside this one."""
        size = len(path)
        inner = {p[size:]: line for p, line in self.lines.items() if p[:size] == path}
        files = {p[size:]: file for p, file in self.files.items() if p[:size] == path}
        place = self.where(*path)
        return Source(place.file, {(): place.line, **inner}, files)


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """One document as a spec, with the places of its values and the project that it belongs to."""

    kind: Kind
    spec: S
    source: Source
    path: Path | None
    root: Path


def find_root(start: Path) -> Path:
    """The nearest parent that has `workflows/`, `pyproject.toml` or `.git`; else the folder of `start`."""
    start = start.absolute()
    folder = start if start.is_dir() else start.parent
    for parent in (folder, *folder.parents):
        if any((parent / sign).exists() for sign in ROOT_SIGNS):
            return parent
    return folder


def resolve(ref: str, beside: Path | None, root: Path, where: Where, what: str = "file") -> Path:
    """The file that a reference names: `lib:NAME`, beside the file that names it, or at the root.

    Args:
        beside: the file that holds the reference (or a folder); None: the root alone.
        what: the thing in messages: `workflow`, `mapping`, `prompt`, …; narrows `lib:NAME` too.
    Raises:
        SpecError: missing (with the nearest name), or found at both places.
    """
    if not ref.strip():
        raise SpecError(Problem.at(where, "empty", f"the {what} has an empty name", f"name a {what}"))
    if ref.startswith("lib:"):
        from masflow.library import find_in_library

        return find_in_library(ref[4:], where, what)
    folder = None if beside is None else beside if _exists(beside) and beside.is_dir() else beside.parent
    tried = [path / ref for path in dict.fromkeys(p for p in (folder, root) if p is not None)]
    found = list(dict.fromkeys(Path(os.path.normpath(path.absolute())) for path in tried if _exists(path)))
    if len(found) > 1:
        message = f"{what} '{ref}' exists twice: {_short(found[0], root)} and {_short(found[1], root)}"
        raise SpecError(
            Problem.at(where, "ambiguous-path", message, "rename one of them, or write an absolute path")
        )
    if found:
        return found[0]
    raise SpecError(_missing(ref, tried, where, what, root))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _short(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _missing(ref: str, tried: list[Path], where: Where, what: str, root: Path) -> Problem:
    near: str | None = None
    for path in tried:
        if _exists(path.parent) and path.parent.is_dir():
            names = [p.name for p in sorted(path.parent.iterdir())[:2000]]
            near = near or closest(path.name, names)
    fix = (
        f"write '{(Path(ref).parent / near).as_posix()}'"
        if near
        else f"create it as {_short(tried[0], root)}"
    )
    if near is None and Path(ref).is_relative_to(_data_folder(root)):
        fix = f"set {DATA} to the folder that holds {Path(ref).relative_to(_data_folder(root)).as_posix()}"
    if len(ref) > MAX_SHOWN or "\n" in ref:
        shown = repr(ref[:MAX_SHOWN])
        return Problem.at(
            where, "missing-file", f"{what} {shown} … isn't a file's name", "write a file's name"
        )
    places = ", ".join(dict.fromkeys(_short(path.absolute(), root.absolute()) for path in tried))
    return Problem.at(where, "missing-file", f"{what} '{ref}' not found; tried {places}", fix)


def _data_folder(root: Path) -> Path:
    return Path(os.environ.get(DATA) or root.parent / "shared" / "data")


def expand_data(ref: str, root: Path, where: Where) -> str:
    """Put variables into a data path: `${MASFLOW_DATA}` (default `<root>/../shared/data`) and others.

    Raises:
        SpecError: a variable that isn't set.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == DATA:
            return str(_data_folder(root))
        if name not in os.environ:
            message = f"the variable '{name}' of '{ref}' isn't set"
            near = f"write '${{{DATA}}}', " if closest(name, (DATA,)) else ""
            fix = f"{near}export {name}=… or write the path itself"
            raise SpecError(Problem.at(where, "unset-variable", message, fix))
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", value, ref)


def load(path: Path, kind: str | None = None) -> Loaded[Any]:
    """Read a YAML document and make its spec; the kind is told by the keys unless given.

    Raises:
        SpecError: every problem of this document.
    """
    path = Path(path)
    file = display_path(path)
    data, lines, notes = read_yaml(read_bytes(path, file), file)
    source = Source(file, lines)
    if notes:
        raise SpecError(notes)
    return load_data(data, source, kind, find_root(path), path=path)


def load_data(
    data: object, source: Source, kind: str | None, root: Path, path: Path | None = None
) -> Loaded[Any]:
    """Make the spec of already parsed data (a builder's, or a document written inside another one).

    Raises:
        SpecError: every problem of this document.
    """
    kind = _told_kind(data, source) if kind is None else _checked_kind(data, source, kind)
    try:
        spec = KINDS[kind].model_validate(data)
    except ValidationError as error:
        raise SpecError(problems_of(error, data, source.where, source.lines)) from None
    return Loaded(cast(Kind, kind), spec, source, path, root)


def _score(data: dict[Any, Any], kind: str) -> int:
    keys = set(KINDS[kind].known_keys()) - {"name", "summary"}
    return sum(key in keys for key in data)


def _keys(data: object, source: Source) -> dict[Any, Any]:
    if isinstance(data, dict):
        return data
    got = "empty" if data is None else f"a {type(data).__name__}"
    message = f"the document is {got}; it is a mapping: a workflow, mapping, runtime or experiment"
    problem = Problem.at(source.where(), "not-a-document", message, "begin with 'name: my_workflow'")
    raise SpecError(problem)


def _checked_kind(data: object, source: Source, kind: str) -> str:
    keys = _keys(data, source)
    others = {other: _score(keys, other) for other in KINDS}
    told = max(others, key=lambda other: others[other])
    if others[told] and not others[kind]:
        message = f"this is {_a(told)} document; {_a(kind)} belongs here"
        fix = f"name {_a(kind)} file"
        if (told, kind) == ("workflow", "experiment"):
            fix += ", which puts workflow, mapping, base and data together; see 'masflow ls'"
        raise SpecError(Problem.at(source.where(), "wrong-document", message, fix))
    return kind


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _told_kind(data: object, source: Source) -> str:
    data = _keys(data, source)
    scores = {kind: _score(data, kind) for kind in KINDS}
    best = max(scores, key=lambda kind: scores[kind])
    if scores[best]:
        return best
    listed = "; ".join(f"{kind}: {', '.join(spec.known_keys()[:6])}, …" for kind, spec in KINDS.items())
    found = ", ".join(map(str, list(data)[:6])) or "(no keys)"
    message = f"can't tell what kind of document this is by its keys {found}; known: {listed}"
    raise SpecError(
        Problem.at(source.where(), "unknown-document", message, "use the keys of one kind of document")
    )


def display_path(path: Path) -> str:
    """The path as a person would write it: relative to the working folder when it lies inside."""
    try:
        return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)
    except (OSError, ValueError):
        return str(path)


def read_bytes(path: Path, file: str) -> bytes:
    """The bytes of a document.

    Raises:
        SpecError: missing, not a file, unreadable or too big.
    """
    where = Where(file)
    try:
        if path.is_dir():
            raise SpecError(
                Problem.at(where, "not-a-file", f"'{file}' is a folder", "name a YAML file inside it")
            )
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            message = f"'{file}' is no ordinary file"
            raise SpecError(Problem.at(where, "not-a-file", message, "name a YAML file"))
        if path.stat().st_size > MAX_BYTES:
            message = f"'{file}' has more than {MAX_BYTES:,} bytes"
            raise SpecError(
                Problem.at(where, "too-big", message, "a document holds settings; keep data in data files")
            )
        return path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            message = f"'{file}' is a link to '{os.readlink(path)}', which doesn't exist"
            raise SpecError(Problem.at(where, "missing-file", message, "mend the link")) from None
        raise SpecError(
            _missing(str(path), [path.absolute()], where, "file", path.absolute().parent)
        ) from None
    except (OSError, ValueError) as error:
        message = f"'{file}' can't be read: {error}"
        raise SpecError(
            Problem.at(where, "unreadable", message, "check the name and its permissions")
        ) from None


def find_documents(path: Path) -> Iterator[Path]:
    """The YAML files below a folder and the Python files with an `@workflow`, sorted; a file is itself.

    What belongs to Kubernetes or `ray up` is left out.
    """
    if not path.is_dir():
        yield path
        return
    for file in sorted(p for p in path.rglob("*") if p.suffix in (".yaml", ".yml", ".py") and p.is_file()):
        if decorated(file) if file.suffix == ".py" else not _is_foreign(file):
            yield file


def _is_foreign(file: Path) -> bool:
    """Whether a YAML file is Kubernetes' or a cluster of `ray up`, told by the key that each must have."""
    return re.search(rb"^(apiVersion|cluster_name):", file.read_bytes()[:MAX_BYTES], re.MULTILINE) is not None
