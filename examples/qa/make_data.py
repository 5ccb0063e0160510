"""Writes what `examples/{qd_answer,qd_evidence,m_ask}.yaml` are trained on, out of HotpotQA and MuSiQue.

Rows of the sets' own training splits are trained on: all of HotpotQA's, and MuSiQue's without its last
`NUM_HELD`, which are held out, for the sample has no other. HotpotQA's dev rows are for evaluation only, and
so are Natural Questions, which the experiments read in place.

A demonstration is played by rule on the paragraphs that come with its row, the answer's among them: queries
are the question's content words and a name in it, evidence is the sentence that holds the answer.

    python examples/qa/make_data.py            # reads ${MASFLOW_DATA}, writes data/qa/

The files are parts of Wikipedia (CC BY-SA 4.0): they stay out of the repository.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_HELD = 30
MAX_ANSWER_WORDS = 6
MAX_PASSAGE_WORDS = 60

_STOP = """
a an and are as at be been by did do does for from had has have how in into is it its made many much name of
on or that the their there this to was were what when where which who whom whose why will with year
"""
STOP = frozenset(_STOP.split())
"""Words that a query leaves out."""

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def task_of(row: Row) -> Row:
    """What the workflows' tasks have."""
    return {"question": row["question"], "answers": row["answers"]}


def keywords(question: str) -> str:
    """The question without the words that every question has."""
    words = re.findall(r"[\w'.-]+", question)
    return " ".join(w.strip(".") for w in words if w.lower().strip(".'") not in STOP)


def names(question: str) -> list[str]:
    """Runs of capitalised words after the first one, longest first."""
    found = re.findall(r"(?<!^)\b[A-Z][\w'-]*(?: [A-Z][\w'-]*)*", question)
    return sorted(dict.fromkeys(found), key=len, reverse=True)


def passage_of(paragraph: Row) -> str:
    """As the search shows it: title, and the first words of the text."""
    return f"{paragraph['title']}: " + " ".join(paragraph["text"].split()[:MAX_PASSAGE_WORDS])


def sentence_with(text: str, answer: str) -> str | None:
    """The first sentence of a text that holds the answer."""
    parts = re.split(r"(?<=[.!?]) +", text)
    return next((part for part in parts if answer.lower() in part.lower()), None)


def gold_pair(row: Row) -> tuple[Row, Row] | None:
    """Two gold paragraphs, the second one holding the answer among its first words."""
    gold = [p for p in row["paragraphs"] if p["gold"]]
    answer = row["answers"][0]
    last = next((p for p in gold if answer.lower() in passage_of(p).lower()), None)
    first = next((p for p in gold if p is not last), None)
    return None if last is None or first is None else (first, last)


def queries_of(question: str) -> list[str]:
    """The question's content words, and its longest name where it has one."""
    return [keywords(question), *names(question)[:1]]


def split_turns(row: Row, first: Row, last: Row, extract: bool) -> list[Row]:
    """Of qd_answer, or, with an extractor, of qd_evidence."""
    answer, queries = row["answers"][0], queries_of(row["question"])
    shown = [last, first][: len(queries)]
    turns: list[Row] = [{"node": "split", "reply": json.dumps({"queries": queries}, ensure_ascii=False)}]
    turns += [{"node": "search", "value": {"text": passage_of(p)}} for p in shown]
    for paragraph in shown if extract else ():
        evidence = sentence_with(passage_of(paragraph), answer) or "none"
        turns.append({"node": "extract", "reply": f"<evidence>{evidence}</evidence>"})
    return [*turns, {"node": "answer", "reply": f"<answer>{answer}</answer>"}]


def m_ask_turns(row: Row, first: Row, last: Row) -> list[Row]:
    """A plan that knows nothing, one round that finds the answer, and a stop."""
    answer, question = row["answers"][0], row["question"]
    plan = {"steps": [{"question": question, "answer": "unknown"}], "answer": "unknown"}
    evidence = sentence_with(passage_of(last), answer)
    change = {"step": 1, "question": question, "answer": answer}
    replies = {
        "plan": json.dumps(plan, ensure_ascii=False),
        "search": f"<action>search</action><query>{keywords(question)}</query>",
        "summarise": f"<evidence>{evidence}</evidence>",
        "update": json.dumps(change, ensure_ascii=False),
        "answer": f"<answer>{answer}</answer>",
    }
    turns: list[Row] = [{"node": node, "reply": reply} for node, reply in replies.items()]
    turns.insert(2, {"node": "retrieve", "value": {"text": "\n".join(map(passage_of, (last, first)))}})
    return [*turns, {"node": "search", "reply": "<action>stop</action>"}]


def demonstrations(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """By experiment; a row whose answer is long or stands in no gold paragraph shows nothing."""
    made: dict[str, list[Row]] = {"qd_answer": [], "qd_evidence": [], "m_ask": []}
    for row in rows:
        pair = gold_pair(row)
        if pair is None or len(row["answers"][0].split()) > MAX_ANSWER_WORDS:
            continue
        for name, turns in (
            ("qd_answer", split_turns(row, *pair, extract=False)),
            ("qd_evidence", split_turns(row, *pair, extract=True)),
            ("m_ask", m_ask_turns(row, *pair)),
        ):
            made[name].append({"task": task_of(row), "turns": turns})
    return made


def main(data: Path, out: Path) -> dict[str, int]:
    """Write everything; returns the number of rows by file."""
    hotpot = read(data / "hotpotqa" / "with_paragraphs.jsonl.gz")
    musique = read(data / "musique" / "train_with_paragraphs.jsonl.gz")
    train = [row for row in hotpot if row["split"] == "train"] + musique[:-NUM_HELD]
    files = {
        "train": [task_of(row) for row in train],
        "hotpotqa": [task_of(row) for row in hotpot if row["split"] == "dev"],
        "musique": [task_of(row) for row in musique[-NUM_HELD:]],
    }
    files |= {f"{name}_demos": rows for name, rows in demonstrations(train).items()}
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: len(rows) for name, rows in files.items()}


if __name__ == "__main__":
    source = Path(os.environ.get("MASFLOW_DATA", ROOT.parent / "shared" / "data"))
    for name, number in main(
        source, Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "qa"
    ).items():
        print(f"{name:18} {number:5}")
