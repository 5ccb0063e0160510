"""What the Natural Questions team trains on: made from passages, apart from everything it is evaluated on.

The generator runs on a made-up corpus everywhere, and on the real one where it is there.
"""

import gzip
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.spec.tools import Bm25Settings
from masflow.tools.search import Search

ROOT = Path(__file__).parents[2]
FILES = ["made", "train", "demos"]


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("nq_rag_make_data", ROOT / "examples/nq_rag/make_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def passage(number, title, text):
    return {"id": f"p{number}", "title": title, "text": text, "sources": ["made up"]}


FILMS = [
    passage(i, f"{name} (film)", f"{name} is a {1950 + i} Danish drama film directed by {by}.")
    for i, (name, by) in enumerate(
        [
            ("Salt Harbour", "Asta Holm"),
            ("The Ninth Bell", "Viggo Lund"),
            ("Grey Orchard", "Tove Dahl"),
            ("Winter Ferry", "Aksel Berg"),
        ]
    )
]
BARRED = passage(8, "Amber Road", "Amber Road is a 1999 Danish drama film directed by Nils Krogh.")
STEP = passage(9, "Tove Dahl", "Tove Dahl (born 3 May 1921) was a Danish painter who lived in Ribe, Denmark.")
ROWS = [
    {"id": "nq-1", "dataset": "nq", "split": "dev", "question": "who directed amber road"}
    | {"answers": ["Nils Krogh"], "gold_ids": ["p8"]},
    {
        "id": "m-1",
        "dataset": "musique",
        "split": "train",
        "question": "Where did Grey Orchard's director live?",
    }
    | {"answers": ["Ribe"], "gold_ids": ["p2", "p9"]},
]
STEPS = [
    {"question": "Grey Orchard >> director", "answer": "Tove Dahl"},
    {"question": "Where did #1 live?", "answer": "Ribe"},
]


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def data(tmp_path):
    write_lines(tmp_path / "wiki_corpus/passages.jsonl.gz", [*FILMS, BARRED, STEP])
    write_lines(tmp_path / "wiki_corpus/qa.jsonl.gz", ROWS)
    steps = [{"id": "m-1", "decomposition": STEPS}]
    write_lines(tmp_path / "musique/train_with_paragraphs.jsonl.gz", steps)
    return tmp_path


def tasks(folder, name):
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [row.get("task", row) for row in rows]


def test_questions_come_from_passages_that_answer_no_evaluated_row(maker, data, tmp_path):
    maker.SHARE = 1.0
    counts = maker.write(data, tmp_path / "out")
    asked = {t["question"]: t for name in FILES for t in tasks(tmp_path / "out", name)}
    assert sum(counts.values()) == len(asked)
    assert not [q for q in asked if "amber road" in q]
    directors = {tuple(t["answers"]) for t in asked.values() if t["kind"] == "director"}
    assert directors <= {("Asta Holm",), ("Viggo Lund",), ("Tove Dahl",), ("Aksel Berg",)} and directors
    years = {t["paragraphs"][0]["id"]: t["answers"] for t in asked.values() if t["kind"] == "year"}
    assert years and all(answers == [str(1950 + int(p[1:]))] for p, answers in years.items())
    assert asked["what is the director of grey orchard"]["answers"] == ["Tove Dahl"]  # steps of a train row
    assert asked["where did tove dahl live"]["paragraphs"][0]["id"] == "p9"


def test_the_same_seed_writes_the_same_bytes(maker, data, tmp_path):
    for out in ("a", "b"):
        maker.write(data, tmp_path / out)
    for name in FILES:
        assert (tmp_path / f"a/{name}.jsonl").read_bytes() == (tmp_path / f"b/{name}.jsonl").read_bytes()


def test_the_generator_and_the_workflow_search_and_cut_alike(maker, needs):
    needs(ROOT / "examples/nq_rag.yaml")
    plan = compile_experiment(ROOT / "examples/nq_rag.yaml")
    settings = dict(next(tool for tool in plan.graph.tools if tool.name == "search").settings)
    assert Bm25Settings(**{**settings, "corpus": "c"}) == Bm25Settings(corpus="c", **maker.SEARCH)
    assert "[:params.words]" in (ROOT / "workflows/nq_rag/answerer.md").read_text()
    assert f"words: {maker.WORDS}" in (ROOT / "workflows/nq_rag.yaml").read_text()


def test_the_real_files_are_apart_from_each_other_and_from_every_evaluated_row(maker, needs):
    needs(ROOT / "examples/nq_rag.yaml")
    shared = Path(os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared" / "data")
    evaluated = [r for r in maker.read(shared / "wiki_corpus/qa.jsonl.gz") if r["split"] != "train"]
    barred = {p for row in evaluated for p in row["gold_ids"]}
    questions = {row["question"].lower().rstrip("? ") for row in evaluated}
    seen: set[str] = set()
    for name in FILES:
        mine = tasks(ROOT / "data/nq_rag", name)
        golds = {t["paragraphs"][0]["id"] for t in mine}
        assert len(mine) == maker.NUM[name] and not golds & (barred | seen)
        assert not {t["question"] for t in mine} & questions
        seen |= golds


def test_a_demonstration_s_query_finds_its_passage_and_its_answer_stands_in_it(maker, needs):
    needs(ROOT / "examples/nq_rag.yaml")
    lines = (ROOT / "data/nq_rag/demos.jsonl").read_text().splitlines()
    shared = Path(os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared" / "data")
    search = Search(Bm25Settings(corpus=str(shared / "wiki_corpus/passages.jsonl.gz"), **maker.SEARCH))
    for row in map(json.loads, lines[::20]):
        plan, find, answer = row["turns"]
        gold = row["task"]["paragraphs"][0]
        assert search(plan["reply"]) == find["value"] and gold["id"] in find["value"]["ids"]
        assert answer["reply"] in row["task"]["answers"]
        assert maker.plain(answer["reply"]).strip() in maker.plain(maker.cut(gold["text"]))
