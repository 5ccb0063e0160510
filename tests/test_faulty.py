"""Every faulty file is refused with the message that stands in its first lines.

Format: the first lines of a document are `# expect: CODE | FRAGMENT | LINE` (LINE may be empty; FRAGMENT is
looked for in the message and the fix; several lines for several problems). A case that needs more files is a
folder whose `main.yaml` is checked. Where a file can't begin with a comment, its expectations stand in
`NAME.expect`.
"""

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
