"""Write the small question answering world: its facts, tasks and sloppy demonstrations.

    python examples/small/qa/make_data.py [OUT]

Made-up people and clubs have a colour, a home, a pet, a job and a dish, and people a club, told in one
sentence each. `pair` tasks ask for two facts of two people (`qd_answer`, `qd_evidence`), `hop` tasks for a
fact of somebody's club (`m_ask`). Standard library only, and the same bytes on every run. Knows nothing of
masflow.
"""

import gzip
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent

VALUES = {
    "colour": "red blue green yellow purple orange brown black white grey pink teal amber ivory gold",
    "home": "paris rome oslo cairo lima tokyo delhi quito dublin madrid vienna athens seoul hanoi dakar",
    "pet": "cat dog parrot rabbit hamster turtle goat pony lizard canary ferret gecko hedgehog newt duck",
    "job": "baker pilot nurse farmer lawyer singer tailor plumber dentist painter miner judge sailor cook",
    "dish": "soup pasta salad rice curry pizza stew bread cheese noodles pancakes beans fish pie tacos",
}
SENTENCES = ("the {r} of {p} is {v}", "{p} has the {r} {v}")
PAIR_QUESTIONS = ("what are the {r} of {p} and the {s} of {q}", "tell the {r} of {p} and the {s} of {q}")
HOP_QUESTIONS = ("what is the {r} of the club of {p}", "tell the {r} of the club of {p}")
FORMS = (
    "question queries search answer query found evidence it is none",
    '{"queries": [" a ", " b "], "answer": ""}',
    '{"queries": [], "answer": " a "}',
    "<answer> a </answer> <evidence> b </evidence>",
)
"""Words of prompts and replies, for the tokenizer."""
NUM_PEOPLE, NUM_HELD = 320, 80
NUM_CLUBS, NUM_HELD_CLUBS = 120, 30
"""People, and how many of them are asked about in held-out tasks alone; the same of clubs. Held-out people
are in held-out clubs."""
NUM_TRAIN, NUM_EVAL, NUM_DEMOS, NUM_HOP_DEMOS = 1500, 200, 2400, 2000
SLOPPY_FRAC = {"pair query": 0.6, "hop query": 0.5, "answer": 0.5, "evidence": 0.3}
"""Share of the demonstrated replies with a flaw, drawn for each reply by itself."""


@dataclass(frozen=True)
class Fact:
    """One sentence of the world: `value` is the `relation` of `person`."""

    person: str
    relation: str
    value: str
    text: str


def chooser(*name: object) -> random.Random:
    """A generator of its own for the thing of that name, so that no choice moves another one."""
    return random.Random("/".join(map(str, name)))


def draw_names() -> tuple[list[str], list[str]]:
    """Names of people and of clubs: two syllables and an ending, no two alike."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    names = [a + b + end for a in syllables for b in syllables if a != b for end in ("", "n", "s")]
    drawn = chooser("names").sample(names, NUM_PEOPLE + NUM_CLUBS)
    return drawn[:NUM_PEOPLE], drawn[NUM_PEOPLE:]


def world(people: list[str], clubs: list[str]) -> dict[tuple[str, str], Fact]:
    """Every (name, relation) with its fact."""
    facts = {}
    for name in (*people, *clubs):
        rng = chooser("facts", name)
        values = {relation: rng.choice(words.split()) for relation, words in VALUES.items()}
        if name in people:
            held = people.index(name) < NUM_HELD
            values["club"] = rng.choice(clubs[:NUM_HELD_CLUBS] if held else clubs[NUM_HELD_CLUBS:])
        for relation, value in values.items():
            text = rng.choice(SENTENCES).format(r=relation, p=name, v=value)
            facts[name, relation] = Fact(name, relation, value, text)
    return facts


def pair_tasks(facts: dict, side: list[str], number: int, split: str) -> list[tuple[Fact, Fact, dict]]:
    """Two facts of two people, the question for both values, and what answers it; no question twice."""
    rng, rows = chooser("pair", split), {}
    while len(rows) < number:
        first, second = (facts[p, rng.choice(tuple(VALUES))] for p in rng.sample(side, 2))
        question = rng.choice(PAIR_QUESTIONS).format(
            r=first.relation, p=first.person, s=second.relation, q=second.person
        )
        task = {"question": question, "answers": [f"{first.value} {second.value}"]}
        rows[question] = (first, second, task)
    return list(rows.values())


def hop_tasks(facts: dict, side: list[str], number: int, split: str) -> list[tuple[Fact, Fact, dict]]:
    """What club somebody is in, and a fact of that club; no question twice."""
    rng, rows = chooser("hop", split), {}
    while len(rows) < number:
        first = facts[rng.choice(side), "club"]
        second = facts[first.value, rng.choice(tuple(VALUES))]
        question = rng.choice(HOP_QUESTIONS).format(r=second.relation, p=first.person)
        rows[question] = (first, second, {"question": question, "answers": [second.value]})
    return list(rows.values())


def altered(fact: Fact, words: list[str], rng: random.Random, **changes: str) -> Fact:
    """The fact with another value: what can't be remembered has to be read."""
    fact = replace(fact, **{"value": rng.choice(words), **changes})
    return replace(fact, text=rng.choice(SENTENCES).format(r=fact.relation, p=fact.person, v=fact.value))


def query_of(fact: Fact, kind: str, rng: random.Random) -> str:
    """What finds the fact, or, sloppily, half of it."""
    if rng.random() >= SLOPPY_FRAC[kind]:
        return f"{fact.relation} {fact.person}"
    return fact.person if rng.random() < 0.8 else fact.relation


def said(kind: str, good: str, bad: Iterable[str], rng: random.Random) -> str:
    """The right reply, or, sloppily, one of the wrong ones."""
    return good if rng.random() >= SLOPPY_FRAC[kind] else rng.choice(list(bad))


def queries_of(pair: tuple[Fact, Fact], rng: random.Random) -> list[str]:
    """A query for each fact; blanks inside the quotes keep a word's token the same wherever it stands."""
    return [f" {query_of(fact, 'pair query', rng)} " for fact in pair]


def pair_answer(first: Fact, second: Fact, rng: random.Random) -> str:
    """Both values, or wordy, or only one of them."""
    both = f"{first.value} {second.value}"
    wordy = f"it is {both}"
    return said("answer", both, (wordy, wordy, wordy, second.value), rng)


def pair_demos(tasks: list, words: list[str], facts: dict, extract: bool) -> list[tuple[dict, dict]]:
    """A demonstration of each task, as `alone` by one role too.

    The answer comes from one passage a query, or by way of an extractor from two.
    """
    rows = []
    for first, second, task in tasks:
        rng = chooser("pair demo", extract, task["question"])
        read = [altered(fact, words, rng) for fact in (first, second)]
        queries, found, extracted = queries_of((first, second), rng), [], []
        for fact in read:
            texts = [fact.text]
            if extract:
                relation = rng.choice([r for r in VALUES if r != fact.relation])
                other = altered(facts[fact.person, relation], words, rng)
                texts = [fact.text, other.text] if rng.random() < 0.7 else [other.text, fact.text]
                evidence = said(
                    "evidence", fact.value, (fact.person, f"{fact.relation} {fact.person}", "none"), rng
                )
                extracted.append({"node": "extract", "reply": f"<evidence> {evidence} </evidence>"})
            found.append({"node": "search", "value": {"text": " . ".join(texts)}})
        answer = pair_answer(read[0], read[1], rng)
        split = {"node": "split", "reply": json.dumps({"queries": queries})}
        end = {"node": "answer", "reply": f"<answer> {answer} </answer>"}
        team = {"task": task, "turns": [split, *found, *extracted, end]}
        split = {"node": "split", "reply": json.dumps({"queries": queries, "answer": ""})}
        end = {"node": "answer", "reply": json.dumps({"queries": [], "answer": f" {answer} "})}
        rows.append((team, {"task": task, "turns": [split, *found, end]}))
    return rows


def hop_demos(tasks: list, words: list[str], clubs: list[str]) -> list[tuple[dict, dict]]:
    """A demonstration of each task, as `alone` by one role too: the club is looked up, then the fact.

    What a role got wrong goes on into the next turns, as it would in an episode.
    """
    rows = []
    for first, second, task in tasks:
        rng = chooser("hop demo", task["question"])
        turns = [{"node": "plan", "reply": f"club {first.person} ; none"}]
        alone, subject, gave_up = [], first.person, rng.random() < 0.15
        evidence = answer = ""
        for number, relation in enumerate(("club", second.relation), 1):
            value = rng.choice(clubs if relation == "club" else words)
            fact = altered(Fact(subject, relation, "", ""), words, rng, value=value)
            query = query_of(fact, "hop query", rng)
            evidence = said("evidence", fact.value, (f"{relation} {fact.value}",), rng)
            subject = fact.value
            answer = said("answer", fact.value, (f"it is {fact.value}",), rng) if number == 2 else "none"
            turns += [
                {"node": "search", "reply": f"search {query}"},
                {"node": "retrieve", "value": {"text": fact.text}},
                {"node": "summarise", "reply": evidence},
                {"node": "update", "reply": f"{number} {query} ; {evidence}"},
                {"node": "answer", "reply": answer},
            ]
            alone += [
                {"node": "ask", "reply": f"search {query}"},
                {"node": "retrieve", "value": {"text": fact.text}},
            ]
            if gave_up:
                turns.append({"node": "search", "reply": "stop"})
                break
        alone.append({"node": "ask", "reply": f"answer {evidence if gave_up else answer}"})
        rows.append(({"task": task, "turns": turns}, {"task": task, "turns": alone}))
    return rows


def write(path: Path, rows: Iterable[dict]) -> int:
    """JSON Lines, gzipped where the name says so (without a date); returns the number of rows."""
    lines = [json.dumps(r) for r in rows]
    data = "".join(line + "\n" for line in lines).encode("ascii")
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)
    return len(lines)


def main(out: Path) -> dict[str, int]:
    """Write everything; returns the number of rows by file."""
    people, clubs = draw_names()
    held, known = people[:NUM_HELD], people[NUM_HELD:]
    facts = world(people, clubs)
    clubs = clubs[NUM_HELD_CLUBS:]
    words = sorted({w for values in VALUES.values() for w in values.split()}) + known + clubs
    rows: dict[str, list[dict]] = {
        "corpus.jsonl": [{"id": f"f{i:04d}", "text": fact.text} for i, fact in enumerate(facts.values())],
        "vocab.jsonl": [{"text": fact.text} for fact in facts.values()],
    }
    frames = (*PAIR_QUESTIONS, *HOP_QUESTIONS, *SENTENCES)
    rows["vocab.jsonl"] += [
        {"text": " ".join(f.format(r="", s="", p="", q="", v="").split())} for f in frames
    ]
    rows["vocab.jsonl"] += [{"text": text} for text in FORMS]
    rows["pair_train.jsonl"] = [task for *_, task in pair_tasks(facts, known, NUM_TRAIN, "train")]
    rows["pair_eval.jsonl"] = [task for *_, task in pair_tasks(facts, held, NUM_EVAL, "eval")]
    shown = pair_tasks(facts, known, NUM_DEMOS, "demos")
    for name in ("qd_answer", "qd_evidence"):
        team, alone = zip(*pair_demos(shown, words, facts, extract=name == "qd_evidence"), strict=True)
        rows[f"{name}_demos.jsonl.gz"], rows[f"single_{name}_demos.jsonl.gz"] = list(team), list(alone)
    rows["hop_train.jsonl"] = [task for *_, task in hop_tasks(facts, known, NUM_TRAIN, "train")]
    rows["hop_eval.jsonl"] = [task for *_, task in hop_tasks(facts, held, NUM_EVAL, "eval")]
    shown = hop_tasks(facts, known, NUM_HOP_DEMOS, "demos")
    team, alone = zip(*hop_demos(shown, words, clubs), strict=True)
    rows["m_ask_demos.jsonl.gz"], rows["single_m_ask_demos.jsonl.gz"] = list(team), list(alone)
    return {name: write(out / name, lines) for name, lines in rows.items()}


if __name__ == "__main__":
    for name, number in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).items():
        print(f"{name:34} {number:6}")
