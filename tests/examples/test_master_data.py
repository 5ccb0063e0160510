"""The data of `examples/master_team.yaml`: made of small made-up sets everywhere, and of the real ones where
they are."""

import gzip
import json
import os
import runpy
from pathlib import Path

import pytest

from masflow.compiler import compile_workflow
from masflow.compiler.rows import field_problem

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "examples/master_team/make_data.py"))
CALLS = runpy.run_path(str(ROOT / "rewards/calls.py"))
NAMES = ("Ada Berg", "Bo Dahl", "Cy Falk", "Di Holm", "Ed Lund", "Flo Moe", "Gus Ness", "Ida Rask", "Jon Vik")
SCHEMA = {"type": "dict", "properties": {"x": {"type": "float"}}, "required": ["x"]}


def put(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sets in small, and the questions that another script makes."""
    data = tmp_path_factory.mktemp("sets")
    question = {"question": "who wrote it", "answers": ["Ann"]}
    rows = []
    for i in range(40):
        words = [[{"role": "user", "content": f"Halve {i}."}]]
        gold = [{"f": {"x": [float(i)]}}] if i < 30 else None
        shown = [{"name": "f", "parameters": SCHEMA}]
        rows.append({"id": f"simple_{i}", "question": words, "function": shown, "ground_truth": gold})
    put(data / "bfcl/simple.jsonl.gz", rows)
    for split in ("train", "test"):
        put(data / f"gsm8k/{split}.jsonl.gz", [{"question": f"{split} sum", "answer": "4"}])
    passages = [
        {"id": f"p{i}", "title": name, "text": f"{name} (born 3 May {1950 + i}) is a baker."}
        for i, name in enumerate(NAMES)
    ]
    put(data / "wiki_corpus/passages.jsonl.gz", passages)
    put(data / "wiki_corpus/qa.jsonl.gz", [{"gold_ids": ["p0"]}])
    put(data / "nq_gold/with_paragraphs.jsonl.gz", [question])
    put(data / "made.jsonl", [{**question, "question": "who made it"}])
    return data


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def meant(right):
    """One of the right values; members of objects have lists of them, too."""
    if isinstance(right, dict):
        lists = {key: each if isinstance(each, list) else [each] for key, each in right.items()}
        return {key: meant(each[0]) for key, each in lists.items() if each[0] != ""}
    return [meant(each) for each in right] if isinstance(right, list) else right


def check(out: Path) -> tuple[list[dict], list[dict]]:
    """Every row fits the workflow, nothing is in both files, and what is right has been recorded."""
    _, graphs = compile_workflow(str(ROOT / "workflows/master_team.yaml"))
    fields = graphs["master_team"].task
    train, held = rows_of(out / "train.jsonl"), rows_of(out / "eval.jsonl")
    for row in train + held:
        assert field_problem(row, fields) is None
        assert {"qa", "math", "function"} >= set(row["needs"]) <= {*row["parts"]}
        for gold in row["parts"].get("function", []):
            [(name, values)] = gold.items()
            given = meant(values)
            answer = CALLS["recorded"](name, given, row["functions"], row["returns"])
            assert set(answer) == {"value"}, (row["question"], answer)
        if row["kind"] == "number":
            assert row["answers"] == [row["parts"]["math"]]
    assert not {row["question"] for row in train} & {row["question"] for row in held}
    return train, held


def test_the_small_sets_make_tasks_of_every_kind(small: Path, tmp_path: Path):
    counts = MADE["main"](small, small / "made.jsonl", tmp_path)
    train, held = check(tmp_path)
    assert counts == {"train": len(train), "eval": len(held)}
    kinds = {(row["kind"], *row["needs"]) for row in train + held}
    assert kinds == {
        ("text", "qa"), ("number", "math"), ("number", "function", "math"), ("number", "qa", "math"),
        ("calls", "function"), ("calls", "qa", "function"), ("calls",),
    }  # fmt: skip
    texts = " ".join(row["question"] for row in train + held)
    assert NAMES[0] not in texts  # a question of the sets is about this passage
    again = MADE["main"](small, small / "made.jsonl", tmp_path / "again")
    assert again == counts and rows_of(tmp_path / "again/train.jsonl") == train


def test_the_sums_and_years_are_right(small: Path, tmp_path: Path):
    MADE["main"](small, small / "made.jsonl", tmp_path)
    born = {name: 1950 + i for i, name in enumerate(NAMES)}
    for row in rows_of(tmp_path / "train.jsonl"):
        if row["needs"] == ["qa", "math"]:
            name, age = row["question"].removeprefix("In which year did ").removesuffix("?").split(" turn ")
            assert row["parts"] == {"qa": [str(born[name])], "math": str(born[name] + int(age))}
        if row["needs"] == ["function", "math"]:
            amount, extra = (int(word) for word in row["question"].split() if word.isdigit())
            [recorded] = row["returns"]
            assert row["answers"] == [str(recorded["value"] * amount + extra)]


def test_the_real_sets_make_tasks_too(tmp_path: Path):
    data = Path(os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared" / "data")
    made = ROOT / "data/nq_rag/train.jsonl"
    if not data.is_dir() or not made.is_file():
        pytest.skip("needs MASFLOW_DATA and data/nq_rag (examples/nq_rag/make_data.py)")
    counts = MADE["main"](data, made, tmp_path)
    train, held = check(tmp_path)
    assert counts == {"train": 5 * MADE["EACH_TRAIN"], "eval": 5 * MADE["EACH_EVAL"]}
    assert len(train) == counts["train"] and len(held) == counts["eval"]
