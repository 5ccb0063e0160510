"""Writes the training tasks and demonstrations of `examples/nq_rag.yaml`, out of the passages of its corpus.

Natural Questions' rows there are for evaluation only. So questions are made from what passages say of
their titles ("… directed by NAME" → "who directed …"), and from the rows of other sets that are for
training. No passage is used that holds the answer of an evaluation row, of whatever set.

A demonstration's query is the question's keywords; it stays only if BM25 finds its passage with it. Its
reply is the answer as the passage writes it. Everything is drawn with one seed: the same data give the
same bytes.

    python examples/nq_rag/make_data.py            # reads ${MASFLOW_DATA}, writes data/nq_rag/

The files are parts of Wikipedia (CC BY-SA 4.0): they stay out of the repository.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from masflow.spec.tools import Bm25Settings
from masflow.tools.search import Search

ROOT = Path(__file__).resolve().parents[2]
NUM = {"made": 200, "train": 1200, "demos": 1200}
"""Questions of each file; no passage is in two of them. `made` is held out."""
WORDS = 50
"""Of a passage, as `params.words` of the workflow has it: the answer has to be among them."""
SHARE = 0.09
"""Of all questions, that one kind may be at most."""
MAX_ANSWER_WORDS = 6

SEARCH: dict[str, Any] = {"top_k": 2, "k1": 0.9, "b": 0.4, "title_field": "title", "unique_terms": True}
"""As the workflow's tool has it."""

_STOP = """
a an and are as at be by did do does for from had has have how in into is it its made many much of on or that
the their there this to was were what when where which who whom whose why will with year date
"""
STOP = frozenset(_STOP.split())
"""Words that a search query leaves out."""


@dataclass(frozen=True)
class Kind:
    """What a passage says about its title, with the answer in the pattern's group, and how people ask for
    it; `{}` is the title."""

    name: str
    pattern: re.Pattern[str]
    ways: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """One question with its answers and the passage that holds them."""

    kind: str
    question: str
    answers: tuple[str, ...]
    passage: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    data = os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(data))
    parser.add_argument("--to", type=Path, default=ROOT / "data" / "nq_rag")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    if not (words.data / "wiki_corpus" / "passages.jsonl.gz").is_file():
        raise SystemExit(f"no wiki_corpus/passages.jsonl.gz in {words.data}; set MASFLOW_DATA")
    for name, num in write(words.data, words.to, words.seed).items():
        print(f"{num:6,} {words.to / name}")


def write(data: Path, to: Path, seed: int = 0) -> dict[str, int]:
    """Write the files; the rows of each by its name."""
    rng = random.Random(seed)
    settings = Bm25Settings(corpus=str(data / "wiki_corpus" / "passages.jsonl.gz"), **SEARCH)
    search = Search(settings)
    passages = {p["id"]: p for p in search.index.passages}
    rows = list(read(data / "wiki_corpus" / "qa.jsonl.gz"))
    barred = {p for row in rows if row["split"] != "train" for p in row["gold_ids"]}
    free = [p for p in passages.values() if p["id"] not in barred]
    asked = [*told(free, rng), *trained(data, rows, passages, barred)]
    found = [one for one in asked if findable(one, search)]
    rng.shuffle(found)
    parts = split(balanced(found))
    to.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, part in parts.items():
        lines = [demonstration(one, search) if name == "demos" else task(one) for one in part]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (to / f"{name}.jsonl").write_text(text, encoding="utf-8")
        counts[f"{name}.jsonl"] = len(lines)
    return counts


def read(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


# -- questions -----------------------------------------------------------------------------------


def kinds() -> list[Kind]:
    """The rows of `kinds.tsv`; those whose name stands in angle brackets are parts of the others."""
    lines = (Path(__file__).with_name("kinds.tsv")).read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    parts = [(name, pattern) for name, pattern, _ in rows if name.startswith("<")]
    found = []
    for name, pattern, ways in rows:
        if not name.startswith("<"):
            for part, meant in parts:
                pattern = pattern.replace(part, meant)
            found.append(Kind(name, re.compile(pattern), tuple(ways.split(" | "))))
    return found


def told(passages: Iterable[dict[str, Any]], rng: random.Random) -> Iterator[Asked]:
    """At most two questions a passage, of kinds drawn at random."""
    known = kinds()
    for passage in passages:
        text = cut(re.sub(r"\( +", "(", re.sub(r"\s+", " ", passage["text"])))
        title = re.sub(r" \([^()]*\)$", "", passage["title"])
        if len(title) < 4 or title.split()[0].lower() not in text.lower():
            continue
        made = [one for kind in known if (one := asked_of(kind, title, text, passage, rng))]
        yield from rng.sample(made, min(2, len(made)))


def asked_of(kind: Kind, title: str, text: str, passage: dict[str, Any], rng: random.Random) -> Asked | None:
    match = kind.pattern.search(text)
    if match is None:
        return None
    answers = [match[1].strip()]
    if kind.name == "cast":
        answers = re.split(r",? (?:and|&) |, ", answers[0])
    answers = [a for a in answers if a.lower() not in title.lower() and len(a.split()) <= MAX_ANSWER_WORDS]
    if not answers:
        return None
    return Asked(kind.name, rng.choice(kind.ways).format(title).lower(), tuple(answers), passage)


def trained(
    data: Path, rows: list[dict[str, Any]], passages: dict[str, dict[str, Any]], barred: set[str]
) -> Iterator[Asked]:
    """Rows for training: questions of HotpotQA, single steps of MuSiQue, each with a gold passage that has
    the answer among its first words."""
    steps = {row["id"]: row for row in read(data / "musique" / "train_with_paragraphs.jsonl.gz")}
    for row in rows:
        if row["split"] != "train":
            continue
        asked = [(row["question"], tuple(row["answers"]))]
        if row["id"] in steps:
            asked = list(single_steps(steps[row["id"]]["decomposition"]))
        for question, answers in asked:
            golds = [passages[g] for g in row["gold_ids"] if g not in barred]
            gold = next((g for g in golds if holds(g, answers)), None)
            if gold is not None and answers[0].lower() not in ("yes", "no"):
                yield Asked("row", question.rstrip("? ").lower(), answers, gold)


def single_steps(steps: list[dict[str, str]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each step of a decomposition with the earlier answers put in for `#1`, `#2`, …"""
    for step in steps:
        question = re.sub(r"#(\d+)", lambda m: steps[int(m[1]) - 1]["answer"], step["question"])
        subject, arrow, relation = question.partition(" >> ")
        yield (f"what is the {relation} of {subject}" if arrow else question), (step["answer"],)


def holds(passage: dict[str, Any], answers: Iterable[str]) -> bool:
    text = plain(cut(passage["text"]))
    return any(f" {plain(answer).strip()} " in text for answer in answers)


def plain(text: str) -> str:
    words = " ".join(re.findall(r"\w+", text.lower()))
    return f" {words} "


def cut(text: str) -> str:
    return " ".join(text.split()[:WORDS])


# -- choosing ------------------------------------------------------------------------------------


def keywords(question: str) -> str:
    """The question without the words that every question has."""
    kept = [word for word in question.split() if word.strip("',.") not in STOP]
    return " ".join(kept or question.split())


def findable(one: Asked, search: Search) -> bool:
    return one.passage["id"] in search(keywords(one.question))["ids"]


def balanced(asked: list[Asked]) -> list[Asked]:
    """No kind has more than its share, no question stands twice."""
    most, seen, num = int(SHARE * sum(NUM.values())), set(), Counter()
    kept = []
    for one in asked:
        if one.question not in seen and num[one.kind] < most:
            seen.add(one.question)
            num[one.kind] += 1
            kept.append(one)
    return kept


def split(asked: list[Asked]) -> dict[str, list[Asked]]:
    """Files by name; all questions about one passage are in the same one."""
    together: dict[str, list[Asked]] = defaultdict(list)
    for one in asked:
        together[one.passage["id"]].append(one)
    parts: dict[str, list[Asked]] = {name: [] for name in NUM}
    for group in together.values():
        name = next((n for n, num in NUM.items() if len(parts[n]) + len(group) <= num), None)
        if name is not None:
            parts[name] += group
    return parts


# -- rows ----------------------------------------------------------------------------------------


def task(one: Asked) -> dict[str, Any]:
    """A row as the evaluation's files have it."""
    gold = {"id": one.passage["id"], "title": one.passage["title"], "text": one.passage["text"], "gold": True}
    return {"question": one.question, "answers": list(one.answers), "paragraphs": [gold], "kind": one.kind}


def demonstration(one: Asked, search: Search) -> dict[str, Any]:
    query = keywords(one.question)
    turns = [
        {"node": "plan", "reply": query},
        {"node": "find", "value": search(query)},
        {"node": "answer", "reply": one.answers[0]},
    ]
    return {"task": task(one), "turns": turns}


if __name__ == "__main__":
    main()
