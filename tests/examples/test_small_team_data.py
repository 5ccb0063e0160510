"""The data of `examples/small/{math_team,reflective_code}`: what the scripts write, and what is in it."""

import gzip
import json
import runpy
from pathlib import Path

import pytest

SMALL = Path(__file__).parents[2] / "examples" / "small"
NAMES = ("math_team", "reflective_code")


def text_of(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("ascii")


def rows_of(name: str, file: str) -> list[dict]:
    return [json.loads(line) for line in text_of(SMALL / name / file).splitlines()]


MATH, CODE = (runpy.run_path(str(SMALL / name / "make_data.py")) for name in NAMES)
MEANING = {word: op for op, words in CODE["WORDS"].items() for word in words}
MEANING |= dict.fromkeys(MATH["GAINS"], "+") | dict.fromkeys(MATH["LOSSES"], "-")


def key(question: str) -> tuple[str, ...]:
    """A task apart from its wording: operations and numbers, in order."""
    return tuple(MEANING.get(w, w) for w in question.split() if w in MEANING or w.isdigit())


@pytest.mark.parametrize("name", NAMES)
def test_the_script_writes_the_shipped_files(name, tmp_path):
    runpy.run_path(str(SMALL / name / "make_data.py"))["main"](tmp_path)
    made = {path.name: text_of(path) for path in tmp_path.iterdir()}
    shipped = {path.name: text_of(path) for path in (SMALL / name).glob("*.jsonl*")}
    assert made == shipped
    assert all(path.stat().st_size < 300_000 for path in (SMALL / name).iterdir() if path.is_file())


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_task_is_trained_or_demonstrated_in_any_wording(name):
    held_out = {key(row["question"]) for row in rows_of(name, "eval.jsonl")}
    assert len(held_out) == len(rows_of(name, "eval.jsonl")) >= 200
    assert not held_out & {key(row["question"]) for row in rows_of(name, "train.jsonl")}
    for demos in ("demos.jsonl.gz", "demos_single.jsonl.gz"):
        assert not held_out & {key(row["task"]["question"]) for row in rows_of(name, demos)}


def test_answers_of_word_problems_are_right():
    for row in rows_of("math_team", "eval.jsonl"):
        a, first, b, second, c = key(row["question"])
        middle = int(a) + (int(b) if first == "+" else -int(b))
        assert str(middle + (int(c) if second == "+" else -int(c))) == row["answer"]


def test_values_of_programs_are_right():
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for row in rows_of("reflective_code", "eval.jsonl"):
        first, a, second, b = key(row["question"])
        for test in row["tests"]:
            assert apply[second](apply[first](int(test["x"]), int(a)), int(b)) == test["y"]


@pytest.mark.parametrize(("name", "node"), [("math_team", "solve"), ("reflective_code", "code")])
def test_both_teams_are_shown_the_same_tasks(name, node):
    team, alone = rows_of(name, "demos.jsonl.gz"), rows_of(name, "demos_single.jsonl.gz")
    assert [row["task"] for row in team] == [row["task"] for row in alone]
    assert {turn["node"] for row in alone for turn in row["turns"]} == {node}
