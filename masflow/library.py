"""The content that ships with the package: finds `lib:NAME`, lists what there is, and copies it out.

Knows no specs beyond a document's `summary`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from masflow.decorators import decorated
from masflow.errors import Problem, SpecError, Where, closest
from masflow.spec.yaml import read_yaml

FOLDERS = {
    "workflow": "workflows",
    "reward": "rewards",
    "mapping": "mappings",
    "runtime": "runtime",
    "experiment": "examples",
}
"""Kind of content → its folder."""


@dataclass(frozen=True)
class Content:
    """One document or reward file that a user may name."""

    kind: str
    name: str
    path: str
    """Relative to the root that was listed; for the library `lib:FOLDER/NAME`."""
    summary: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def library_root() -> Path:
    """`masflow/_library` in an installed package, else the root of the repository."""
    package = Path(__file__).resolve().parent
    inside = package / "_library"
    return inside if inside.is_dir() else package.parent


def shown_path(path: Path) -> str:
    """A path as a user would write it: `lib:examples/quickstart.yaml` inside an installed library."""
    root = library_root()
    inside = root.name == "_library" and path.resolve().is_relative_to(root)
    return f"lib:{path.resolve().relative_to(root).as_posix()}" if inside else str(path)


def find_in_library(name: str, where: Where, what: str = "file") -> Path:
    """The shipped file that `lib:NAME` means: a path such as `mappings/shared.yaml`, or a bare name.

    Args:
        what: kind of content that is looked for first (`workflow`, `mapping`, …).
    Raises:
        SpecError: none, with the nearest name; or several.
    """
    files = {str(p.relative_to(library_root()).as_posix()): p for p in _files(library_root())}
    if name in files:
        return files[name]
    own = FOLDERS.get(what)
    found = [
        path
        for key, path in files.items()
        if _is_named(key, name) and (own is None or key.startswith(f"{own}/"))
    ]
    if len(found) == 1:
        return found[0]
    known = sorted(
        {Path(k).stem for k in files if _is_document(k) and (own is None or k.startswith(f"{own}/"))}
    )
    if found:
        listed = ", ".join(sorted(k for k in files if files[k] in found))
        problem = Problem.at(
            where, "ambiguous-path", f"'lib:{name}' may be {listed}", f"write 'lib:{listed.split(', ')[0]}'"
        )
        raise SpecError(problem)
    near = closest(name, [*known, *files])
    fix = f"write 'lib:{near}'" if near else "use a known name; 'masflow ls' lists them"
    message = f"the library has no {what} '{name}'; known: {', '.join(known) or '(none)'}"
    raise SpecError(Problem.at(where, "missing-file", message, fix))


def _is_named(key: str, name: str) -> bool:
    """Whether `name` is the stem of a document that stands right in its folder, or the end of its path."""
    return (_is_document(key) and Path(key).stem == name) or key.endswith(f"/{name}")


def _is_document(key: str) -> bool:
    path = Path(key)
    return len(path.parts) == 2 and path.suffix in (".yaml", ".yml", ".py")


def _files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS.values():
        base = root / folder
        for path in sorted(base.rglob("*")) if base.is_dir() else ():
            inside = path.relative_to(base).parts
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in inside):
                yield path


def list_content(root: Path) -> list[Content]:
    """Everything that a user may name: the project's own content, then the library's."""
    found = _listed(root, "")
    if root.resolve() != library_root().resolve():
        found += _listed(library_root(), "lib:")
    return found


def _listed(root: Path, prefix: str) -> list[Content]:
    content: list[Content] = []
    for path in _files(root):
        key = path.relative_to(root).as_posix()
        if _is_document(key):
            kind = next(kind for kind, folder in FOLDERS.items() if key.startswith(f"{folder}/"))
            if kind == "workflow" and path.suffix == ".py" and not decorated(path):
                continue
            content.append(Content(kind, path.stem, prefix + key, _summary(path)))
    return content


def _summary(path: Path) -> str:
    """A document's `summary`, or the first line of a reward file's docstring; empty when it can't be read."""
    if path.suffix == ".py":
        import ast

        try:
            text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
        except (SyntaxError, ValueError, OSError):
            return ""
        return text.split("\n")[0]
    try:
        data = read_yaml(path.read_bytes(), str(path))[0]
    except (SpecError, OSError):
        return ""
    return str(data.get("summary", "")) if isinstance(data, dict) else ""


def copy_library(folder: Path) -> list[Path]:
    """Copy the shipped content into a folder; files that stand there stay as they are.

    Returns:
        The files written, relative to `folder`; files that were there with the same bytes are left out.
    Raises:
        SpecError: a file of another content stands where one would be written; nothing is copied then.
    """
    root = library_root()
    files = [(path, path.relative_to(root)) for path in _files(root)]
    problems = [
        Problem.at(
            Where(str(folder / inside)),
            "file-exists",
            "this file exists and differs",
            "move it, or choose a new folder",
        )
        for path, inside in files
        if (folder / inside).exists() and not _same(path, folder / inside)
    ]
    parents = {folder / parent for _, inside in files for parent in inside.parents}
    problems += [
        Problem.at(
            Where(str(path)), "file-exists", "this is a file, not a folder", "move it, or choose a new folder"
        )
        for path in sorted(parents)
        if path.exists() and not path.is_dir()
    ]
    if problems:
        raise SpecError(problems)
    written: list[Path] = []
    for path, inside in files:
        if not (folder / inside).exists():
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / inside)
            written.append(inside)
    return written


def _same(a: Path, b: Path) -> bool:
    return b.is_file() and a.read_bytes() == b.read_bytes()
