"""Write the quickstart's corpus, splits and demonstrations from `facts/*.tsv` and `relations.json`.

    python examples/quickstart/generate.py [OUT]

Standard library only, and the same bytes on every run: each choice is drawn from a generator seeded by the
name of what is chosen. Knows nothing of masflow; the files it writes are plain JSON Lines.
"""

import csv
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
TABLES = ("countries", "elements", "states", "animals", "planets", "books")

UNSEEN_FRAC = {"select": 0.07, "eval": 0.10}
"""Share of each table's entities that never occur in training; their words are in the vocabulary."""
NOVEL_FRAC = {"select": 0.05, "eval": 0.08}
"""Share of each table's entities that never occur in training and whose words the vocabulary lacks."""
HELD_PAIR_FRAC = {"select": 0.10, "eval": 0.10}
"""Share of the (entity, relation) pairs of training entities that are held out."""
ROWS_A_KIND = 100
DEMOS_A_TASK = 2
"""Demonstrations of each training task, drawn apart: a flaw that always came with its question would be
learned by heart."""
TWO_HOP_TASKS, TWO_HOP_ROWS = 2000, 200
BAD_QUERY_FRAC, ENTITY_ONLY_FRAC = 0.6, 0.8
BAD_ANSWER_FRAC, WORDY_FRAC = 0.6, 0.9

BRIDGES = {
    "capital": "{kind} whose capital is {b}",
    "domain": "{kind} with the internet domain {b}",
    "dialling": "{kind} with the dialling code {b}",
    "symbol": "element with the symbol {b}",
    "number": "element with the atomic number {b}",
    "postal": "{kind} with the postal abbreviation {b}",
}
"""How a question names an entity by another of its facts, for the two-hop questions."""
KIND = {"countries": "country", "states": "state", "elements": "element"}


@dataclass(frozen=True)
class Fact:
    """One true statement: `answer` is the `relation` of `entity`."""

    id: str
    table: str
    entity: str
    relation: str
    answer: str
    text: str


def chooser(*name: object) -> random.Random:
    """A random generator of its own for the thing of that name, so that a new fact moves no other choice."""
    return random.Random("/".join(map(str, name)))


def read_facts(relations: dict) -> list[Fact]:
    """All facts, in the order of the tables; an empty cell is written `-`."""
    facts = []
    for table in TABLES:
        with (HERE / "facts" / f"{table}.tsv").open(encoding="ascii", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t", strict=True):
                entity = row.pop("entity")
                for relation, answer in row.items():
                    if answer != "-":
                        wording = chooser("text", entity, relation).choice(relations[relation]["facts"])
                        text = wording.format(e=entity, a=answer)
                        facts.append(Fact(f"f{len(facts):04d}", table, entity, relation, answer, text))
    return facts


def draw_pools(facts: list[Fact]) -> dict[str, set[str]]:
    """Entities by pool: `select`, `eval`, `novel_select`, `novel_eval`; the rest are for training.

    An entity can be novel if its words occur in no other entity's facts. Planets, too few,
    stay in training.
    """
    used_by = {w: {f.entity for f in facts if w in f.text.split()} for f in facts for w in f.entity.split()}
    pools: dict[str, set[str]] = {name: set() for name in ("select", "eval", "novel_select", "novel_eval")}
    for table in TABLES:
        if table == "planets":
            continue
        entities = list(dict.fromkeys(f.entity for f in facts if f.table == table and f.entity != "mercury"))
        own = [e for e in entities if " " not in e and used_by[e] == {e}]
        chooser("own", table).shuffle(own)
        for split, frac in NOVEL_FRAC.items():
            pools[f"novel_{split}"] |= {own.pop() for _ in range(round(frac * len(entities)))}
        rest = [e for e in entities if not any(e in pool for pool in pools.values())]
        chooser("rest", table).shuffle(rest)
        for split, frac in UNSEEN_FRAC.items():
            pools[split] |= {rest.pop() for _ in range(round(frac * len(entities)))}
    return pools


def hold_pairs(known: list[Fact]) -> dict[str, list[Fact]]:
    """Training entities' facts by split: held-out pairs of `select` and of `eval`, and `train`.

    An entity's first fact stays in training, so that a held-out pair is about an entity that was seen.
    """
    held: dict[str, list[Fact]] = {"select": [], "eval": [], "train": []}
    seen = set()
    for fact in sorted(known, key=lambda f: chooser("first", f.entity, f.relation).random()):
        draw = chooser("pair", fact.entity, fact.relation).random()
        s, e = HELD_PAIR_FRAC["select"], HELD_PAIR_FRAC["eval"]
        free = fact.entity in seen and fact.table != "planets"
        held["train" if not free or draw >= s + e else "select" if draw < s else "eval"].append(fact)
        seen.add(fact.entity)
    return {split: sorted(facts, key=lambda f: f.id) for split, facts in held.items()}


def row(fact: Fact, template: str, kind: str) -> dict:
    """A question, what it may be answered with, and the corpus row that says so."""
    question = template.format(e=fact.entity, kind=KIND.get(fact.table, ""))
    return {"question": question, "answers": [fact.answer], "gold": fact.id, "kind": kind}


def held_out_rows(split: str, facts: dict[str, list[Fact]], relations: dict) -> list[dict]:
    """`ROWS_A_KIND` rows of each kind for `select` or `eval`; `facts` are the candidates by kind."""
    rows = []
    for kind, candidates in facts.items():
        wordings = split if kind == "template" else "train"
        pairs = [(fact, t) for fact in candidates for t in relations[fact.relation][wordings]]
        drawn = chooser(split, kind).sample(pairs, min(ROWS_A_KIND, len(pairs)))
        rows += [row(fact, template, kind) for fact, template in drawn]
    return rows


def query_of(fact: Fact) -> str:
    """The query that finds a fact best: the relation's keyword, in each of its sentences, and the entity."""
    return f"{fact.relation} {fact.entity}"


def sloppy_query(relation: str, name: str, rng: random.Random) -> str:
    """A query that often forgets half of what it needs."""
    if rng.random() >= BAD_QUERY_FRAC:
        return f"{relation} {name}"
    return name if rng.random() < ENTITY_ONLY_FRAC else relation


def sloppy_answer(fact: Fact, rng: random.Random) -> str:
    """An answer that is often wordy or names the subject instead."""
    if rng.random() >= BAD_ANSWER_FRAC:
        return fact.answer
    return f"it is {fact.answer}" if rng.random() < WORDY_FRAC else fact.entity


def altered(fact: Fact, answers: list[str], relations: dict, rng: random.Random) -> Fact:
    """The fact with somebody else's answer: what can't be remembered has to be read."""
    answer = rng.choice(answers)
    wording = rng.choice(relations[fact.relation]["facts"])
    return replace(fact, answer=answer, text=wording.format(e=fact.entity, a=answer))


def demonstrations(train: list[tuple[Fact, dict]], relations: dict, clean: bool) -> list[dict]:
    """The same tasks, clean or sloppy. Queries are about the true fact; the passage is an altered one."""
    answers = sorted({fact.answer for fact, _ in train})
    rows = []
    for draw in range(DEMOS_A_TASK):
        for fact, task in train:
            rng = chooser("demo", draw, task["question"])
            passage = altered(fact, answers, relations, rng)
            query = query_of(fact) if clean else sloppy_query(fact.relation, fact.entity, rng)
            answer = passage.answer if clean else sloppy_answer(passage, rng)
            turns = [
                {"node": "plan", "reply": query},
                {"node": "find", "value": {"text": passage.text}},
                {"node": "answer", "reply": answer},
            ]
            rows.append({"task": task, "turns": turns})
    return chooser("demos").sample(rows, len(rows))


def write(path: Path, rows: Iterable[dict]) -> int:
    """JSON Lines, one object a row; returns the number of rows."""
    lines = [json.dumps(r, ensure_ascii=True) for r in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="ascii", newline="\n")
    return len(lines)


def two_hop_pairs(facts: list[Fact], times: Counter, wordings: Callable[[Fact], list[str]]) -> list[tuple]:
    """(bridge fact, asked fact, question template) where the bridge's value names one entity only.

    `times` counts (relation, table, answer) over all facts.
    """
    bridges = [f for f in facts if f.relation in BRIDGES and f.answer != f.entity]
    bridges = [f for f in bridges if times[f.relation, f.table, f.answer] == 1]
    of_entity: dict[tuple[str, str], list[Fact]] = {}
    for fact in facts:
        of_entity.setdefault((fact.table, fact.entity), []).append(fact)
    return [
        (bridge, asked, t)
        for bridge in bridges
        for asked in of_entity[bridge.table, bridge.entity]
        if asked.relation != bridge.relation
        for t in wordings(asked)
    ]


def two_hop_row(bridge: Fact, asked: Fact, template: str, kind: str) -> dict:
    """A question that names its entity by the bridge fact; `gold` has both corpus rows, in order."""
    name = "the " + BRIDGES[bridge.relation].format(kind=KIND[bridge.table], b=bridge.answer)
    question = template.format(e=name)
    return {"question": question, "answers": [asked.answer], "gold": [bridge.id, asked.id], "kind": kind}


def two_hop_demonstrations(
    train: list[tuple[Fact, Fact, dict]], facts: list[Fact], relations: dict
) -> list[dict]:
    """Sloppy demonstrations whose first passage names another entity, and whose second is about that one.

    `facts` are the training entities': whom a passage may name instead, and with what answer.
    """
    answers = sorted({fact.answer for fact in facts})
    entities = {table: sorted({f.entity for f in facts if f.table == table}) for table in KIND}
    rows = []
    for draw in range(DEMOS_A_TASK):
        for bridge, asked, task in train:
            rng = chooser("two_hop", draw, task["question"])
            other = rng.choice([e for e in entities[bridge.table] if e != bridge.entity])
            first = altered(replace(bridge, entity=other), [bridge.answer], relations, rng)
            second = altered(replace(asked, entity=other), answers, relations, rng)
            turns = [
                {"node": "plan", "reply": sloppy_query(bridge.relation, bridge.answer, rng)},
                {"node": "find", "value": {"text": first.text}},
                {"node": "refine", "reply": sloppy_query(second.relation, other, rng)},
                {"node": "find_more", "value": {"text": second.text}},
                {"node": "answer", "reply": sloppy_answer(second, rng)},
            ]
            rows.append({"task": task, "turns": turns})
    return chooser("two_hop_demos").sample(rows, len(rows))


def write_two_hop(
    out: Path, facts: dict[str, list[Fact]], times: Counter, relations: dict, counts: dict[str, int]
) -> None:
    """`twohop_{train,select,eval,demos}.jsonl`; `facts`: those of each split's own entities."""

    def wordings(fact: Fact) -> list[str]:
        return [t for t in relations[fact.relation]["train"] if "the {e}" not in t and "planet" not in t]

    for split, number in (("train", TWO_HOP_TASKS), ("select", TWO_HOP_ROWS), ("eval", TWO_HOP_ROWS)):
        pairs = two_hop_pairs(facts[split], times, wordings)
        drawn = chooser("two_hop", split).sample(pairs, number)
        kind = "train" if split == "train" else "entity"
        rows = [(b, a, two_hop_row(b, a, t, kind)) for b, a, t in drawn]
        counts[f"twohop_{split}"] = write(out / f"twohop_{split}.jsonl", (r for _, _, r in rows))
        if split == "train":
            demos = two_hop_demonstrations(rows, facts[split], relations)
            counts["twohop_demos"] = write(out / "twohop_demos.jsonl", demos)


def main(out: Path = HERE) -> dict[str, int]:
    """Write every file into `out`; returns the rows of each."""
    relations = json.loads((HERE / "relations.json").read_text(encoding="ascii"))
    facts = read_facts(relations)
    pools = draw_pools(facts)
    pool_of = {e: name for name, pool in pools.items() for e in pool}
    by_pool: dict[str, list[Fact]] = {}
    for fact in facts:
        by_pool.setdefault(pool_of.get(fact.entity, "known"), []).append(fact)
    held = hold_pairs(by_pool["known"])
    train = [(f, row(f, t, "train")) for f in held["train"] for t in relations[f.relation]["train"]]

    counts = {"corpus": write(out / "corpus.jsonl", ({"id": f.id, "text": f.text} for f in facts))}
    counts["train"] = write(out / "train.jsonl", (r for _, r in train))
    for split in ("select", "eval"):
        kinds = {"pair": held[split], "entity": by_pool[split], "template": held["train"]}
        kinds["novel"] = by_pool[f"novel_{split}"]
        rows = list(held_out_rows(split, kinds, relations))
        counts[split] = write(out / f"{split}.jsonl", (r for r in rows if r["kind"] != "novel"))
        novel_rows = (r for r in rows if r["kind"] == "novel")
        counts[f"{split}_novel"] = write(out / f"{split}_novel.jsonl", novel_rows)
    counts["demos"] = write(out / "demos.jsonl", demonstrations(train, relations, clean=False))
    counts["demos_clean"] = write(out / "demos_clean.jsonl", demonstrations(train, relations, clean=True))

    wordings = [
        t.replace("{e}", "").replace("{a}", "") for r in relations.values() for ts in r.values() for t in ts
    ]
    wordings += [t.replace("{b}", "").replace("{kind}", k) for t in BRIDGES.values() for k in KIND.values()]
    wordings += ["plan question query find passage answer refine it is"]
    novel = pools["novel_select"] | pools["novel_eval"]
    texts = [f.text for f in facts if f.entity not in novel]
    texts += list(dict.fromkeys(" ".join(t.split()) for t in wordings))
    counts["vocab"] = write(out / "vocab.jsonl", ({"text": t} for t in texts))
    two_hop = {"train": held["train"], "select": by_pool["select"], "eval": by_pool["eval"]}
    times = Counter((f.relation, f.table, f.answer) for f in facts)
    write_two_hop(out, two_hop, times, relations, counts)
    return counts


if __name__ == "__main__":
    for name, rows in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).items():
        print(f"{name:18} {rows:6}")
