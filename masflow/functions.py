"""Users' functions: what they take, asked in a process apart with a time limit, and the functions themselves.

A function loaded from a file travels by value, so that it reaches workers that don't have the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from masflow.compiler.graph import FunctionIR
from masflow.errors import Problem, RunError, SpecError, Where, boundary
from masflow.probe import SOURCE, load_module
from masflow.spec.types import parse_type

INSIDE = "MASFLOW_LOOKS_AT_FUNCTIONS"
"""Set in the environment of the processes that import users' files to look at them."""
MAX_STARTS = 8
"""Processes that one inspection starts at most, after crashes and endless loops of single files."""


def inspect_functions(
    refs: Sequence[tuple[str, Where]], root: Path, timeout_s: float = 20
) -> dict[str, FunctionIR | Problem]:
    """Import users' functions in a process apart and read what they take.

    Args:
        refs: `path.py:name` (absolute, or relative to the root) or `module:name`, with the place naming it.
        timeout_s: for one process, in seconds; a file that crashes or hangs costs another process.
    Returns:
        Reference → what was found, or the problem: an import that fails, a missing name, a time limit.
    """
    forget_changed()
    where = dict(reversed(refs))
    pending = list(dict.fromkeys(ref for ref, _ in refs))
    found: dict[str, FunctionIR | Problem] = {}
    for _ in range(MAX_STARTS):
        if not pending:
            return found
        lines, end = _run_probe(pending, root, timeout_s)
        for line in lines:
            if "ref" in line:
                found[line["ref"]] = _result(line, where[line["ref"]])
        begun = [line["begin"] for line in lines if "begin" in line]
        stuck = next((ref for ref in reversed(begun) if ref not in found), pending[0] if not begun else None)
        if stuck is not None and stuck not in found:
            file = stuck.rpartition(":")[0]
            message = f"importing {file} {end}"
            fix = f"keep work out of {file}'s top level"
            for ref in [r for r in pending if r.rpartition(":")[0] == file and r not in found]:
                found[ref] = Problem.at(where[ref], "import-fails", message, fix)
        pending = [ref for ref in pending if ref not in found]
    for ref in pending:
        message = f"'{ref}' wasn't looked at: too many other files crash or hang"
        found[ref] = Problem.at(where[ref], "import-fails", message, "mend the other files first")
    return found


def read_program(ref: str, where: Where, root: Path, timeout_s: float = 20) -> dict[str, Any]:
    """What the decorator of a workflow's function declares, read in a process apart.

    Returns:
        `{data, lines, problems}`, as `masflow.program` makes them, and the `function`'s FunctionIR.
    Raises:
        SpecError: the file can't be imported, has no such function, or the function isn't decorated.
    """
    forget_changed()
    lines, end = _run_probe([ref], root, timeout_s)
    line = next((line for line in lines if "ref" in line), None)
    file, _, name = ref.rpartition(":")
    if line is None:
        fix = f"keep work out of {file}'s top level"
        raise SpecError(Problem.at(where, "import-fails", f"importing {file} {end}", fix))
    found = _result(line, where)
    if isinstance(found, Problem):
        raise SpecError(found)
    if "program" not in line:
        message = f"'{name}' of {file} is a function, but no workflow: it has no '@workflow(…)'"
        fix = f"write '@workflow(task=…, roles=…)' above 'async def {name}'"
        raise SpecError(Problem.at(where, "not-a-workflow", message, fix))
    return {**line["program"], "function": found}


def _run_probe(refs: list[str], root: Path, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """One process over some references: the lines that it wrote, and how it ended if it ended early."""
    if os.environ.get(INSIDE):  # else each process would start another one, for ever
        raise RuntimeError("it compiles workflows at import; put that below if __name__ == '__main__':")
    package = str(Path(__file__).resolve().parents[1])
    request = json.dumps({"root": str(root), "path": [p for p in sys.path if p], "refs": refs})
    with tempfile.TemporaryDirectory(prefix="masflow-") as folder:
        results = Path(folder, "results.jsonl")
        results.touch()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "masflow.probe", str(results)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=root if root.is_dir() else None,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
                INSIDE: "1",
            },
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(request, timeout=timeout_s)
            code = process.returncode
            end = (
                f"ends the process ({_signal(code)})"
                if code < 0
                else f"ends the process with exit code {code}"
            )
        except subprocess.TimeoutExpired:
            end = f"takes more than {timeout_s:g} s"
        finally:
            _kill(process)
        lines = results.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")], end


def _kill(process: subprocess.Popen[str]) -> None:
    """End the process and what it started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _result(line: dict[str, Any], where: Where) -> FunctionIR | Problem:
    if "error" in line:
        return Problem.at(where, line["code"], line["error"], line["fix"])
    return FunctionIR(
        ref=line["ref"],
        hash=line["hash"],
        params=tuple(line["params"]),
        required=tuple(line["required"]),
        nullable=tuple(line["nullable"]),
        types={name: parse_type(kind) for name, kind in line.get("types", {}).items()},
        summary=line.get("summary", ""),
    )


def forget_changed() -> None:
    """Let go of users' modules whose files have changed, so that what is compiled anew is what is played.

    A run that goes on has its functions already; what a file imports stays loaded, as everywhere in Python.
    """
    changed = False
    for name, module in sys.modules.copy().items():
        made_from, file = getattr(module, "__dict__", {}).get(SOURCE), getattr(module, "__file__", None)
        if made_from is None or file is None or (Path(file).is_file() and file_hash(Path(file)) == made_from):
            continue
        del sys.modules[name]
        changed = True
    if changed:
        _load.cache_clear()


def file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


_LOADING = threading.RLock()


def load_callable(ref: str, root: Path | str) -> Callable[..., Any]:
    """The function behind a reference, in this process; the same object at every call.

    Args:
        ref: `path.py:name` (absolute, or relative to the root) or `module:name`.
    Raises:
        RunError: it can't be imported, or isn't there (any more).
    """
    with _LOADING:  # a module that another thread is still reading lacks its functions
        return _load(ref, str(root))


@cache
def _load(ref: str, root: str) -> Callable[..., Any]:
    name, _, function_name = ref.rpartition(":")
    module, function, error = None, None, "sys.exit at import"
    with boundary(ref) as caught, suppress(SystemExit):
        module = load_module(name, root)
        function = getattr(module, function_name)
    if module is None or function is None:
        error = caught.error or f"{ref}: {error}"
        raise RunError(f"can't load {error}", "run 'masflow check' on the workflow that names it")
    if not callable(function):
        raise RunError(f"{ref} isn't a function but a {type(function).__name__}", "name a function")
    if name.endswith(".py"):
        import cloudpickle

        if root not in sys.path:  # what its functions import when they run may stand there
            sys.path.append(root)
        cloudpickle.register_pickle_by_value(module)
    return function
