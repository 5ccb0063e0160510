"""Users' functions are looked at in a process apart, whatever their files do."""

import pickle
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

from masflow.compiler.graph import FunctionIR
from masflow.errors import Problem, RunError, Where
from masflow.functions import inspect_functions, load_callable

PLACE = Where("w.yaml", 7, "rewards.0")


def inspect(root: Path, *refs: str, timeout_s: float = 20):
    return inspect_functions([(ref, PLACE) for ref in refs], root, timeout_s)


def write(root: Path, name: str, text: str) -> None:
    (root / name).write_text(text)


def test_parameters_required_and_nullable_are_read_from_the_signature(tmp_path):
    write(
        tmp_path,
        "r.py",
        "from __future__ import annotations\n"
        "def f(a: str, b: int | None, c, d: float = 1.0, e: str = None, *x, k: 'list[str]', **more): ...\n",
    )
    found = inspect(tmp_path, "r.py:f")["r.py:f"]
    assert isinstance(found, FunctionIR)
    assert found.params == ("a", "b", "c", "d", "e", "k", "**")
    assert found.required == ("a", "b", "c", "k")
    assert found.nullable == ("b", "c", "e", "**")


def test_the_hash_follows_the_files_bytes_and_not_its_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "r.py", "def f(): ...\n")
    write(tmp_path, "c.py", "def f(): return 1\n")
    found = inspect(tmp_path, "a/r.py:f", "b/r.py:f", "c.py:f")
    hashes = [f.hash for f in found.values() if isinstance(f, FunctionIR)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_prints_and_a_closed_stdout_of_user_code_change_nothing(tmp_path):
    text = "import os, sys\nprint('{\"ref\": 1}')\nos.write(1, b'noise')\nsys.stdout.close()\ndef f(x): ...\n"
    write(tmp_path, "r.py", text)
    found = inspect(tmp_path, "r.py:f")["r.py:f"]
    assert isinstance(found, FunctionIR) and found.params == ("x",)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("import no_such_module_here\n", "No module named 'no_such_module_here'"),
        ("x = 1\ndef f(:\n", "SyntaxError"),
        ("raise ValueError('broken table')\n", "broken table (line 1)"),
        ("import sys\nsys.exit(3)\n", "sys.exit"),
        ("import os\nos._exit(4)\n", "exit code 4"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "SIGSEGV"),
        ("def g(): ...\n", "has no function 'f'; known: g"),
        ("f = 3\n", "isn't a function but a int"),
        ("def f(a, /): ...\n", "positional only"),
        ("raise KeyboardInterrupt\n", "ends the process"),
    ],
)
def test_what_is_wrong_with_a_file_becomes_a_problem_at_the_place_that_names_it(tmp_path, text, fragment):
    write(tmp_path, "r.py", text)
    write(tmp_path, "good.py", "def f(): ...\n")
    found = inspect(tmp_path, "r.py:f", "good.py:f")
    problem = found["r.py:f"]
    assert isinstance(problem, Problem)
    assert fragment in problem.message
    assert (problem.file, problem.line) == ("w.yaml", 7) and problem.fix
    assert isinstance(found["good.py:f"], FunctionIR), "the other file is looked at all the same"


def test_an_endless_loop_is_stopped_and_the_rest_is_still_looked_at(tmp_path):
    write(tmp_path, "r.py", "while True: pass\n")
    write(tmp_path, "good.py", "def f(): ...\n")
    begin = time.monotonic()
    found = inspect(tmp_path, "r.py:f", "r.py:g", "good.py:f", timeout_s=2)
    assert time.monotonic() - begin < 15
    loops = [found["r.py:f"], found["r.py:g"]]
    assert all(isinstance(p, Problem) and "takes more than 2 s" in p.message for p in loops)
    assert isinstance(found["good.py:f"], FunctionIR)


def test_functions_of_modules_are_found_with_the_projects_root_on_the_path(tmp_path):
    (tmp_path / "my_tools").mkdir()
    write(tmp_path / "my_tools", "__init__.py", "")
    write(tmp_path / "my_tools", "maths.py", "def double(x: int) -> int:\n    return 2 * x\n")
    found = inspect(tmp_path, "my_tools.maths:double", "json:dumps", "my_tools.gone:f")
    assert isinstance(found["my_tools.maths:double"], FunctionIR)
    assert isinstance(found["json:dumps"], FunctionIR)
    assert isinstance(found["my_tools.gone:f"], Problem)
    assert load_callable("my_tools.maths:double", tmp_path)(x=4) == 8
    assert str(tmp_path) not in sys.path


def test_a_function_of_a_file_travels_by_value(tmp_path):
    write(tmp_path, "r.py", "SCALE = 3\ndef triple(x):\n    return SCALE * x\n")
    function = load_callable("r.py:triple", tmp_path)
    assert load_callable("r.py:triple", tmp_path) is function
    carried = tmp_path / "carried.pickle"
    carried.write_bytes(cloudpickle.dumps(function))
    (tmp_path / "r.py").unlink()
    code = f"import pickle; print(pickle.load(open({str(carried)!r}, 'rb'))(5))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "15\n", done.stderr
    assert pickle.loads(carried.read_bytes())(5) == 15


@pytest.mark.parametrize(
    "text", ["import sys\nsys.exit(1)\n", "raise ValueError('no')\n", "g = 1\n", "f = 1\n"]
)
def test_a_function_that_cannot_be_loaded_is_a_run_error(tmp_path, text):
    write(tmp_path, "r.py", text)
    with pytest.raises(RunError):
        load_callable("r.py:f", tmp_path)


def test_annotations_and_the_docstring_describe_a_function_to_a_model(tmp_path: Path):
    (tmp_path / "fns.py").write_text(
        "from typing import Literal\n"
        "def f(a: str, b: int | None, c: list[float], d: Literal['x', 'y'], e: dict, g=1) -> str:\n"
        "    '''Says it\n    all.\n\n    Not this.'''\n"
    )
    found = inspect_functions([("fns.py:f", Where())], tmp_path)["fns.py:f"]
    assert isinstance(found, FunctionIR)
    assert {name: str(kind) for name, kind in found.types.items()} == {
        "a": "str",
        "b": "int?",
        "c": "[float]",
        "d": "[x, y]",
    }
    assert found.summary == "Says it all."


def test_a_file_that_changed_is_loaded_anew_once_it_is_looked_at_again(tmp_path):
    file = tmp_path / "changing.py"
    file.write_text("def f():\n    return 1\n")
    ref = f"{file}:f"
    inspect_functions([(ref, Where())], tmp_path)
    first = load_callable(ref, tmp_path)
    file.write_text("def f():\n    return 2\n")
    assert load_callable(ref, tmp_path) is first  # a run that goes on isn't changed under way
    inspect_functions([(ref, Where())], tmp_path)
    assert (first(), load_callable(ref, tmp_path)()) == (1, 2)
