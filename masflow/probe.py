"""Looks at users' functions inside a process of its own: `python -m masflow.probe RESULTS < request.json`.

Knows nothing of specs. Writes one JSON line a function to a file, so that prints, exits, crashes and endless
loops of users' code can't spoil what was found before them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from masflow.errors import boundary, closest

SOURCE = "__masflow_source__"
"""Where a user's module keeps the hash of the file that it was made from."""


class _AsItStands(importlib.machinery.SourceFileLoader):
    """Compiles the file itself: Python takes a compiled one for the same where second and size agree."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def load_module(name: str, root: str) -> types.ModuleType:
    """The module behind the left side of a reference: a `.py` file, or a module's dotted name.

    A file's module is registered under a name of its own, in a package in which it finds its neighbours
    (`from .neighbour import x`); a module by name may stand in the project's root.
    """
    if not name.endswith(".py"):
        sys.path.insert(0, root)
        try:
            return importlib.import_module(name)
        finally:
            if root in sys.path:
                sys.path.remove(root)
    path = Path(root, name).absolute()
    own = f"masflow_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    folders = path.parent.relative_to(root).parts if path.is_relative_to(root) else ()
    if not folders or not all(folder.isidentifier() for folder in folders):
        folders = (_package_of(path.parent),)
    own = ".".join((*folders, own))
    if own in sys.modules:
        return sys.modules[own]
    spec = importlib.util.spec_from_file_location(own, path, loader=_AsItStands(own, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module
    module.__dict__[SOURCE] = hashlib.sha256(path.read_bytes()).hexdigest()
    whole = False
    sys.path.insert(0, root)  # what it imports may stand there
    try:
        spec.loader.exec_module(module)
        whole = True
    finally:
        if root in sys.path:
            sys.path.remove(root)
        if not whole:
            del sys.modules[own]
    return module


def _package_of(folder: Path) -> str:
    """The name of a package that holds a folder's modules, whatever the folder is called."""
    name = f"masflow_user_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder)]
    return name


def describe(ref: str, root: str) -> dict[str, Any]:
    """What a function takes, or `error` with what is wrong with it and `fix`."""
    name, _, function_name = ref.rpartition(":")
    if name.endswith(".py") and not Path(root, name).is_file():
        return {"error": f"the file '{name}' doesn't exist", "code": "missing-file", "fix": f"create {name}"}
    ended, module = "", None
    with boundary(name) as caught:
        try:
            module = load_module(name, root)
        except SystemExit:
            ended = f"{name} ends the program (sys.exit) when it is imported"
    if module is None:
        way = name if name.endswith(".py") else f'-c "import {name}"'
        message = ended or f"importing failed: {caught.error}{_place(caught.detail, name)}"
        return {
            "error": message,
            "code": "import-fails",
            "fix": f"mend {name}; 'python {way}' shows the error",
        }
    function = getattr(module, function_name, None)
    own = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
    known = ", ".join(sorted(own)[:20]) or "(none)"
    if function is None:
        near = closest(function_name, own)
        fix = f"write '{near}'" if near else f"define {function_name} in {name}"
        message = f"'{name}' has no function '{function_name}'; known: {known}"
        return {"error": message, "code": "unknown-function", "fix": fix}
    if not callable(function):
        message = (
            f"'{function_name}' of {name} isn't a function but a {type(function).__name__}; known: {known}"
        )
        return {"error": message, "code": "not-a-function", "fix": "name a function"}
    with boundary(ref) as caught:
        found = _signature(function)
        found["hash"] = _hash(module)
        declared = getattr(function, "__masflow_workflow__", None)
        if declared is not None:
            found["program"] = declared()
            found["hash"] = _hash_with_imports(module, root)
        return found
    return {"error": f"can't be looked at: {caught.error}", "code": "import-fails", "fix": f"mend {name}"}


def _place(detail: str, name: str) -> str:
    rows = [row.strip() for row in detail.splitlines() if f'{Path(name).name}", line ' in row]
    return f" (line {rows[-1].split('line ')[1].split(',')[0]})" if rows else ""


def _hash(module: types.ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file and Path(file).is_file() else ""


def _hash_with_imports(module: types.ModuleType, root: str) -> str:
    """As `_hash`, with the project's own files that the module has imported, at any depth."""
    inside = Path(root).resolve()
    files = {Path(f).resolve() for m in list(sys.modules.values()) if (f := getattr(m, "__file__", None))}
    own = {f for f in files if f.suffix == ".py" and f.is_relative_to(inside)}
    library = Path(__file__).resolve().parent
    own = {f for f in own if not f.is_relative_to(library) and "site-packages" not in f.parts}
    own.discard(Path(str(module.__file__)).resolve())
    parts = [_hash(module), *sorted(hashlib.sha256(f.read_bytes()).hexdigest() for f in own)]
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _signature(function: Callable[..., Any]) -> dict[str, Any]:
    summary = (inspect.getdoc(function) or "").strip().split("\n\n")[0].replace("\n", " ")
    if inspect.isclass(function):  # a tool made once and then called: its arguments are those of the call
        function = functools.partial(function.__call__, None)
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return {"params": ["**"], "required": [], "nullable": ["**"]}
    hints = _hints(function.func if isinstance(function, functools.partial) else function)
    params: list[str] = []
    required: list[str] = []
    nullable: list[str] = []
    for name, p in signature.parameters.items():
        if p.kind is p.POSITIONAL_ONLY:
            message = f"parameter '{name}' is positional only; arguments are passed by name"
            return {"error": message, "code": "positional-only", "fix": "remove the '/' from the function"}
        if p.kind is p.VAR_POSITIONAL:
            continue
        shown = "**" if p.kind is p.VAR_KEYWORD else name
        params.append(shown)
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            required.append(name)
        if p.default is None or _may_be_null(hints.get(name, p.annotation)):
            nullable.append(shown)
    kinds = {name: _type(hints[name]) for name in params if name in hints}
    types = {name: kind for name, kind in kinds.items() if kind is not None}
    return {"params": params, "required": required, "nullable": nullable, "types": types, "summary": summary}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    with boundary("annotations"):
        return typing.get_type_hints(function)
    return {}


def _type(annotation: Any) -> Any:
    """In the type language: `str`, `int?`, `[str]`, `[go, stop]`; None where there is no word."""
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (str, int, float, bool):
        return annotation.__name__
    if origin is list:
        kind = _type(inside[0])
        return None if kind is None else [kind]
    if origin is typing.Literal and len(inside) > 1 and all(isinstance(word, str) for word in inside):
        return list(inside)
    if origin in (typing.Union, types.UnionType) and type(None) in inside and len(inside) == 2:
        kind = _type(next(a for a in inside if a is not type(None)))
        return f"{kind}?" if isinstance(kind, str) else None
    return None


def _may_be_null(annotation: Any) -> bool:
    if annotation is inspect.Parameter.empty or annotation in (Any, object, None, type(None)):
        return True
    if isinstance(annotation, str):
        return any(word in annotation for word in ("None", "Optional", "Any", "object"))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_may_be_null(arg) for arg in typing.get_args(annotation))
    return False


def main() -> None:
    """Answer a request `{"root", "path", "refs"}` from standard input, one line a function."""
    request = json.loads(sys.stdin.read())
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    sys.path.extend(p for p in request["path"] if p not in sys.path)
    with open(sys.argv[1], "a", encoding="utf-8", buffering=1) as out:
        for ref in request["refs"]:
            out.write(json.dumps({"begin": ref}) + "\n")
            out.write(json.dumps({"ref": ref, **describe(ref, request["root"])}) + "\n")
        out.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
