"""Every faulty file is refused with the message that stands in its first lines.

Format: the first lines of a document are `# expect: CODE | FRAGMENT | LINE` (LINE may be empty; FRAGMENT is
looked for in the message and the fix; several lines for several problems). A case that needs more files is a
folder whose `main.yaml` is checked. Where a file can't begin with a comment, its expectations stand in
`NAME.expect`.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from masflow.compiler import check

FAULTY = Path(__file__).parent / "faulty"


@dataclass(frozen=True)
class Expected:
    code: str
    fragment: str
    line: int | None


def expectations(path: Path) -> list[Expected]:
    beside = path.with_suffix(".expect")
    text = (beside if beside.exists() else path).read_bytes().decode("utf-8", errors="replace")
    found = []
    for row in text.splitlines():
        if not row.startswith("# expect:"):
            break
        code, fragment, line = (part.strip() for part in row.removeprefix("# expect:").rsplit("|", 2))
        found.append(Expected(code, fragment, int(line) if line else None))
    return found


CASES = [path for path in sorted(FAULTY.rglob("*.yaml")) if expectations(path)]


def name(path: Path) -> str:
    return str(path.relative_to(FAULTY).with_suffix(""))


@pytest.mark.parametrize("path", CASES, ids=name)
def test_a_faulty_file_is_refused_with_its_message_line_and_fix(path):
    problems = check(path)
    shown = "\n".join(f"[{p.code}] {p}" for p in problems) or "(nothing found)"
    for expected in expectations(path):
        matches = [
            p
            for p in problems
            if p.code == expected.code
            and expected.fragment in f"{p.message}\n{p.fix}"
            and expected.line in (None, p.line)
        ]
        assert matches, f"{expected} isn't among\n{shown}"
    assert all(p.fix and p.message and p.code and p.file for p in problems), shown


@pytest.mark.parametrize("path", [p for p in CASES if p.is_relative_to(FAULTY / "spec")], ids=name)
def test_nothing_but_the_expected_is_reported_about_a_document(path):
    expected = expectations(path)
    extra = [
        p for p in check(path) if not any(e.code == p.code and e.line in (None, p.line) for e in expected)
    ]
    assert not extra, "\n".join(f"[{p.code}] {p}" for p in extra)


IGNORED = (
    "graph/option_without_effect/main.yaml",
    "graph/top_p_in_training/main.yaml",
    "graph/greedy_in_training/main.yaml",
    "graph/more_updates_than_tasks/main.yaml",
    "graph/shards_for_one_trainer/main.yaml",
    "graph/colocated_shards/main.yaml",
    "spec/unknown_backend.yaml",
    "spec/frozen_with_optimizer.yaml",
    "spec/adapters_without_lora.yaml",
)


@pytest.mark.parametrize("place", IGNORED)
def test_silent__a_backend_silently_ignores_an_option__it_is_a_compile_error(place):
    """Row of FIELD_PROBLEMS, Silent failures: a backend silently ignores an option."""
    assert any(not problem.code.startswith("warn-") for problem in check(FAULTY / place))


def test_there_are_at_least_eighty_faulty_files_and_none_without_an_expectation():
    lonely = [
        name(p)
        for p in FAULTY.rglob("*.yaml")
        if p not in CASES and (p.name == "main.yaml" or not (p.parent / "main.yaml").exists())
    ]
    assert not lonely
    assert len(CASES) >= 80


ROOT = Path(__file__).parents[1]
HYPHENATED = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+\Z")
NO_CODES = {"all-linear", "masflow-user-code", "retry-after", "site-packages", "utf-8", "utf-8-sig"}
"""Words of the package that look like a problem's code and name something else."""


def codes_of(source: str) -> set[str]:
    """The codes that a module gives: `code=…`, the second argument of `Problem.at`, `unknown-KIND` of what is
    looked up, and every other text that is spelt like a code.
    """
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    given = [k.value for call in calls for k in call.keywords if k.arg == "code"]
    given += [call.args[1] for call in calls if ast.unparse(call.func) == "Problem.at" and len(call.args) > 1]
    found = texts(given) | {text for text in texts(nodes) if HYPHENATED.match(text)} - NO_CODES
    for call in calls:
        if ast.unparse(call.func) in ("unknown", "unknown_word") and all(
            k.arg != "code" for k in call.keywords
        ):
            kind = call.args[0 if ast.unparse(call.func) == "unknown_word" else 1]
            found |= {f"unknown-{text.replace(' ', '-')}" for text in texts([kind])}
    return found


def texts(nodes: Iterable[ast.AST]) -> set[str]:
    """The literals that are text, not empty; of a choice between two, both."""
    arms = [arm for n in nodes for arm in ((n.body, n.orelse) if isinstance(n, ast.IfExp) else (n,))]
    return {
        arm.value
        for arm in arms
        if isinstance(arm, ast.Constant) and isinstance(arm.value, str) and arm.value
    }


def test_every_code_of_a_problem_stands_in_a_test():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "masflow").rglob("*.py")]
    codes = set().union(*map(codes_of, sources))
    tried = {e.code for path in CASES for e in expectations(path)}
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    tried |= set(re.findall(r"(?<![\w-])[a-z0-9]+(?:-[a-z0-9]+)*(?![\w-])", tests))
    assert len(codes) > 150
    assert not sorted(codes - tried)


def test_a_code_is_found_however_it_is_given():
    source = """
        yield Fault(message, code="one" if wide else "two", fix=fix)
        Problem.at(where, "three", message)
        self._problem("four-of", message)
        found = unknown(where, "data file", name, known), unknown_word("key", key, known, path=("utf-8",))
    """
    code = f"def f():{source}"
    assert codes_of(code) == {"one", "two", "three", "four-of", "unknown-data-file", "unknown-key"}
