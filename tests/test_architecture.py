"""The walls of the codebase: sizes, the direction of imports, and what `masflow check` may import."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "masflow").rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

# Each part may import itself and what stands before it. `rl` and `models` know nothing of `runtime`.
FOUNDATION = {
    "errors",
    "trace",
    "spec",
    "project",
    "functions",
    "library",
    "timelimit",
    "decorators",
    "servers",
    "isolation",
    "isolated",
}
ALLOWED = {
    "errors": set(),
    "trace": {"errors"},
    "timelimit": set(),
    "descriptors": set(),
    "servers": {"errors"},
    "isolated": {"errors", "probe"},
    "isolation": {"errors", "isolated", "descriptors"},
    "decorators": set(),
    "spec": {"errors", "trace"},
    "project": {"errors", "spec", "library", "decorators"},
    "library": {"errors", "spec", "decorators"},
    "probe": {"errors"},
    "functions": FOUNDATION | {"compiler", "probe"},
    "dsl": FOUNDATION | {"as_data"},
    "as_data": {"errors"},
    "program": {"errors", "as_data", "decorators"},
    "algorithms": {"errors", "trace", "spec"},
    "compiler": FOUNDATION | {"passes", "algorithms"},
    "passes": FOUNDATION | {"compiler", "memory"},
    "tools": FOUNDATION | {"compiler", "descriptors"},
    "memory": {"errors", "trace"},
    "rl": FOUNDATION | {"compiler", "passes", "algorithms"},
    "models": FOUNDATION | {"compiler", "rl", "algorithms"},
    "runtime": FOUNDATION | {"compiler", "passes", "algorithms", "rl", "models", "tools", "memory"},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT / "masflow")
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Every module imported anywhere in a file, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            if node.module == "masflow":
                found |= {f"masflow.{alias.name}" for alias in node.names}
    return found


def test_no_file_is_longer_than_the_wall():
    long = {
        str(p.relative_to(ROOT)): n
        for p in SOURCES
        if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_no_function_is_longer_than_the_wall():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long


def test_folders_are_at_most_two_levels_deep_and_names_say_what_they_hold():
    assert all(len(p.relative_to(ROOT / "masflow").parts) <= 2 for p in SOURCES)
    assert not [p for p in SOURCES if p.stem in VAGUE_NAMES]


def test_imports_point_one_way():
    wrong = []
    for path in SOURCES:
        part = part_of(path)
        allowed = ALLOWED.get(part)
        if allowed is None:
            continue
        for name in imports_of(path):
            if name.startswith("masflow.") and name.split(".")[1] not in allowed | {part}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_every_part_of_the_package_has_a_place_in_the_import_rule():
    free = {"__init__", "__main__", "cli", "view", "_library"}
    assert {part_of(p) for p in SOURCES} - free <= set(ALLOWED)


def test_only_the_cluster_module_imports_ray():
    assert not [
        p
        for p in SOURCES
        if p != ROOT / "masflow" / "runtime" / "cluster.py"
        and any(n.split(".")[0] == "ray" for n in imports_of(p))
    ]


def test_the_broad_except_stands_only_in_the_boundary():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
        )
    ]
    assert [place.split(":")[0] for place in found] == ["masflow/errors.py"]


def test_content_folders_are_not_packages():
    folders = ("workflows", "rewards", "mappings", "runtime", "examples")
    assert not [p for folder in folders for p in (ROOT / folder).rglob("__init__.py")]


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'ray', 'transformers', 'peft', 'accelerate'}:
            raise ImportError('blocked: ' + name)
sys.meta_path.insert(0, Block())
from masflow.cli import main
sys.argv = ['masflow', *sys.argv[1:]]
main()
"""


def test_check_works_where_torch_and_ray_are_absent(absent):
    files = sorted(
        str(p)
        for folder in ("workflows", "mappings", "runtime", "examples")
        for p in (ROOT / folder).glob("*.yaml")
        if not absent(p)
    )
    assert files
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, "check", *files], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
