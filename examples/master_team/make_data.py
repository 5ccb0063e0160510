"""Writes the data of `examples/master_team.yaml`: questions for one agent, and for two.

One agent: questions made from passages (`examples/nq_rag/make_data.py` makes them first) and, held out,
Natural Questions; function calls of the Berkeley leaderboard; word problems of GSM8K. Two agents: tasks made
here, of which a search or a function call finds a number and arithmetic or another call goes on from it.
What a function returns is recorded beside its task.

    python examples/nq_rag/make_data.py        # once
    python examples/master_team/make_data.py   # reads ${MASFLOW_DATA}, writes data/master_team/

The files hold parts of Wikipedia and of the sets (their own licences): they stay out of the repository.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BORN = re.compile(r"\(born (?:[A-Z][a-z]+ \d{1,2}, |\d{1,2} [A-Z][a-z]+ )?(\d{4})\)")
HELD_FRAC = 0.2
"""Of the leaderboard's rows and of the tasks made here: which are held out hangs on their names alone."""
EACH_TRAIN, EACH_EVAL = 400, 50
"""Rows of each kind at most."""
SHOPS = ("shop.price", "market.price", "catalogue.price_of")
ITEMS = ("lamp", "chair", "kettle", "bicycle", "tent", "guitar", "jacket", "pillow", "ladder", "mirror")

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def is_held(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) < HELD_FRAC * (1 << 32)


def task(question: str, kind: str, needs: list[str], parts: Row, **more: Any) -> Row:
    usual: Row = {"functions": [], "answers": [], "returns": []}
    return {"question": question, "kind": kind, "needs": needs, "parts": parts, **usual, **more}


def lookup(row: Row) -> Row:
    return task(row["question"], "text", ["qa"], {"qa": row["answers"]}, answers=row["answers"])


def word_problem(row: Row) -> Row:
    return task(row["question"], "number", ["math"], {"math": row["answer"]}, answers=[row["answer"]])


def calls(row: Row) -> Row:
    """A row of the leaderboard; every right call is answered, the leaderboard records nothing more."""
    gold = row["ground_truth"] or []
    words = " ".join(message["content"] for turn in row["question"] for message in turn)
    returns = [{"call": call, "value": "done"} for call in gold]
    needs = ["function"] if gold else []
    return task(words, "calls", needs, {"function": gold}, functions=row["function"], returns=returns)


def function(name: str, what: str, /, **properties: str) -> Row:
    """A function as the leaderboard describes one: all its parameters are required."""
    fields = {key: {"type": kind} for key, kind in properties.items()}
    shape = {"type": "dict", "properties": fields, "required": list(fields)}
    return {"name": name, "description": what, "parameters": shape}


def shopping(rng: random.Random) -> Row:
    """A price by a function, and arithmetic with it."""
    name, item = rng.choice(SHOPS), rng.choice(ITEMS)
    price, amount, extra = rng.randrange(3, 90), rng.randrange(2, 9), rng.randrange(1, 20)
    question = rng.choice(
        (
            f"What do {amount} {item}s cost, with {extra} euros for delivery?",
            f"Somebody buys {amount} {item}s and pays {extra} euros to have them sent. What does it come to?",
        )
    )
    gold = {name: {"item": [item, f"{item}s"]}}
    answer = str(price * amount + extra)
    return task(
        question, "number", ["function", "math"], {"function": [gold], "math": answer}, answers=[answer],
        functions=[function(name, "The price of one item, in euros.", item="string")],
        returns=[{"call": gold, "value": price}],
    )  # fmt: skip


def births(rng: random.Random, known: list[tuple[str, int]]) -> Iterator[Row]:
    """A year that a search finds: reckoned with, or handed to a function."""
    for name, year in known:
        age = rng.randrange(18, 60)
        parts: Row = {"qa": [str(year)], "math": str(year + age)}
        question = f"In which year did {name} turn {age}?"
        yield task(question, "number", ["qa", "math"], parts, answers=[str(year + age)])
        gold = {"register.add": {"name": [name], "year": [year]}}
        add = function("register.add", "Enter a person's year of birth.", name="string", year="integer")
        yield task(
            f"Enter {name} with the year of birth into the register.", "calls", ["qa", "function"],
            {"qa": [str(year)], "function": [gold]}, functions=[add],
            returns=[{"call": gold, "value": "entered"}],
        )  # fmt: skip


def people(data: Path) -> list[tuple[str, int]]:
    """(name, year of birth) of passages that no question of the sets is about."""
    gold = {one for row in read(data / "wiki_corpus/qa.jsonl.gz") for one in row["gold_ids"]}
    found = {}
    for passage in read(data / "wiki_corpus/passages.jsonl.gz"):
        born = BORN.search(passage["text"][:200])
        plain = re.fullmatch(r"[A-Z][\w'.-]*( [A-Z][\w'.-]*)+", passage["title"])
        if born and plain and passage["id"] not in gold:
            found[passage["title"]] = int(born[1])
    return sorted(found.items())


def write(path: Path, rows: Iterable[Row]) -> int:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def mixed(kinds: dict[str, list[Row]], each: int, rng: random.Random, barred: set[str]) -> list[Row]:
    """At most `each` rows of a kind, shuffled; none whose question is barred, no question twice."""
    chosen: dict[str, Row] = {}
    for rows in kinds.values():
        fit = list({row["question"]: row for row in rows if row["question"] not in barred}.values())
        chosen |= {row["question"]: row for row in rng.sample(fit, min(each, len(fit)))}
    found = list(chosen.values())
    rng.shuffle(found)
    return found


def main(data: Path, made: Path, out: Path) -> dict[str, int]:
    rng = random.Random("master_team")
    berkeley = [row for path in sorted((data / "bfcl").glob("*.jsonl.gz")) for row in read(path)]
    known = people(data)
    shops = [shopping(rng) for _ in range(2 * EACH_TRAIN)]
    train: dict[str, list[Row]] = {
        "lookup": [lookup(row) for row in read(made)],
        "calls": [calls(row) for row in berkeley if not is_held(row["id"])],
        "word problem": [word_problem(row) for row in read(data / "gsm8k/train.jsonl.gz")],
        "shopping": [row for row in shops if not is_held(row["question"])],
        "births": list(births(rng, [one for one in known if not is_held(one[0])])),
    }
    held: dict[str, list[Row]] = {
        "lookup": [lookup(row) for row in read(data / "nq_gold/with_paragraphs.jsonl.gz")],
        "calls": [calls(row) for row in berkeley if is_held(row["id"])],
        "word problem": [word_problem(row) for row in read(data / "gsm8k/test.jsonl.gz")],
        "shopping": [row for row in shops if is_held(row["question"])],
        "births": list(births(rng, [one for one in known if is_held(one[0])])),
    }
    asked = {row["question"] for rows in held.values() for row in rows}  # the leaderboard has some twice
    return {
        "train": write(out / "train.jsonl", mixed(train, EACH_TRAIN, rng, asked)),
        "eval": write(out / "eval.jsonl", mixed(held, EACH_EVAL, rng, set())),
    }


if __name__ == "__main__":
    root = Path(os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared/data")
    questions = ROOT / "data/nq_rag/train.jsonl"
    for needed, how in ((root, "set MASFLOW_DATA"), (questions, "run examples/nq_rag/make_data.py first")):
        if not needed.exists():
            raise SystemExit(f"{needed} isn't there: {how}")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data/master_team"
    for name, count in main(root, questions, target).items():
        print(f"{target / name}.jsonl: {count} rows")
