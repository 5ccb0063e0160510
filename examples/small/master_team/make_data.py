"""Write the small world of a master and its three agents: tasks, and sloppy demonstrations.

    python examples/small/master_team/make_data.py [OUT]

Made-up towns have a height, an age and a size, told in one sentence each; made-up goods have a price or a
stock that only a function knows, and may be ordered. A task asks for one of these, for a sum, or for a number
that one agent finds and another goes on from. Standard library only, and the same bytes on every run. Knows
nothing of masflow.
"""

import gzip
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent

RELATIONS = ("height", "age", "size")
FUNCTIONS = ("price", "stock", "order")
MOST, STEP = 20, 9
"""Numbers that are found are 1 to MOST; what is added or taken away is 1 to STEP."""
KINDS = ("look", "fetch", "order", "reckon", "look and reckon", "fetch and reckon", "look and order")
NUM_TOWNS, NUM_GOODS, HELD_FRAC = 320, 320, 0.25
"""Towns and goods, and the share of them that only held-out tasks name."""
NUM_TRAIN, NUM_EVAL, NUM_DEMOS = 1400, 200, 2800
SLOPPY_FRAC = {"early": 0.4, "route": 0.25, "query": 0.4, "call": 0.35, "sum": 0.4, "copy": 0.25}
"""Of demonstrated replies, each drawn by itself: a master that finishes before the second agent or asks the
wrong first one, a query or call that names the wrong thing, a sum turned round, a number of somebody else."""
FORMS = (
    '<tool_call>{"name": "wiki", "arguments": {"query": " height "}}</tool_call>',
    '<tool_call>{"name": "call", "arguments": {"name": " price ", "arguments": {"item": " a "}}}</tool_call>',
    '<tool_call>{"name": "calculator", "arguments": {"expression": " 1 + 2 - 3 "}}</tool_call>',
    "You may call a tool, one in a reply, by writing",
    '<tool_call>{"name": "TOOL", "arguments": {"PARAMETER": "VALUE"}}</tool_call>',
    "Tools:",
    '{"name": "wiki", "description": "Look up.", "parameters": {"type": "object", "properties": {"query": '
    '{"type": "string"}}, "required": ["query"]}}',
    '{"name": "call", "description": "Call.", "parameters": {"type": "object", "properties": {"name": '
    '{"type": "string"}, "arguments": {"type": "object"}}, "required": ["name", "arguments"]}}',
    '{"name": "calculator", "description": "Work out.", "parameters": {"type": "object", "properties": '
    '{"expression": {"type": "string"}}, "required": ["expression"]}}',
    "(No tool calls are left: give the final answer now.)",
    '{"value": 1} {"value": "done"} {"error": "nothing is recorded for these arguments"} done none nothing',
    "qa function math finish next look call reckon known order plus minus what is the of has a .",
)
"""Texts of prompts and replies, for the tokenizer."""

Row = dict


def chooser(*name: object) -> random.Random:
    """A generator of its own for the thing of that name, so that no choice moves another one."""
    return random.Random("/".join(map(str, name)))


def draw_names() -> tuple[list[str], list[str]]:
    """Names of towns and of goods, no two alike."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    names = [a + b + end for a in syllables for b in syllables if a != b for end in ("", "l", "r")]
    drawn = chooser("names").sample(names, NUM_TOWNS + NUM_GOODS)
    return drawn[:NUM_TOWNS], drawn[NUM_TOWNS:]


def halves(names: list[str]) -> tuple[list[str], list[str]]:
    """Held out, and known in training."""
    held = int(len(names) * HELD_FRAC)
    return names[:held], names[held:]


def height_of(town: str, relation: str) -> int:
    return chooser("fact", town, relation).randint(1, MOST)


def sentence(town: str, relation: str, value: int) -> str:
    return f"the {relation} of {town} is {value}"


def shown_functions(needed: str | None, rng: random.Random) -> list[Row]:
    """Two functions, the needed one among them; every task has some: their being there tells nothing."""
    names = [needed] if needed else []
    names += rng.sample([name for name in FUNCTIONS if name not in names], 2 - len(names))
    shape = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    return [{"name": name, "description": name, "parameters": shape} for name in sorted(names)]


def draw(towns: list[str], goods: list[str], rng: random.Random) -> Row:
    """A task, and under `_` what its demonstration needs."""
    kind, town, good = rng.choice(KINDS), rng.choice(towns), rng.choice(goods)
    relation, function = rng.choice(RELATIONS), rng.choice(FUNCTIONS[:2])
    first = height_of(town, relation) if kind.startswith("look") else rng.randint(1, MOST)
    by = rng.randint(1, STEP)
    op = "+" if first <= by or rng.random() < 0.5 else "-"
    total = first + by if op == "+" else first - by
    word = "plus" if op == "+" else "minus"
    asked = {"look": f"{relation} of {town}", "fetch": f"{function} of {good}", "reckon": f"what is {first}"}
    needs = {"look": "qa", "fetch": "function", "order": "function", "reckon": "math"}
    words = kind.split(" and ")
    question = f"order {good}" if words[0] == "order" else asked[words[0]]
    if "reckon" in words:
        question += f" {word} {by}"
    if kind == "look and order":  # as many as the number that is looked up
        question += f" order {good}"
    gold: list[Row] = []
    if words[0] == "fetch":
        gold = [{function: {"item": [good]}}]
    elif "order" in words:
        function = "order"
        gold = [{"order": {"item": [good]}}]
    answer = total if "reckon" in words else first
    returned = first if words[0] == "fetch" else "done"
    return {
        "question": question,
        "kind": "calls" if "order" in words else "number",
        "needs": [needs[one] for one in words],
        "parts": {"qa": [str(first)], "math": str(total), "function": gold},
        "functions": shown_functions(function if gold else None, rng),
        "answers": [] if "order" in words else [str(answer)],
        "returns": [{"call": call, "value": returned} for call in gold],
        "_": {
            "town": town, "good": good, "relation": relation, "function": function, "first": first, "by": by,
            "op": op,
        },
    }  # fmt: skip


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def qa_turns(made: Row, rng: random.Random) -> tuple[list[Row], str]:
    """The agent's turns and what it reports. Demonstrated values aren't the corpus's: they are to be read."""
    town, relation, value = made["town"], made["relation"], rng.randint(1, MOST)
    asked = relation
    if rng.random() < SLOPPY_FRAC["query"]:
        asked = rng.choice([one for one in RELATIONS if one != relation])
    found = {"text": sentence(town, asked, value)}
    turns = [{"reply": call("wiki", query=f" {asked} {town} ")}, {"value": found}, {"reply": str(value)}]
    return [{"node": "qa", **turn} for turn in turns], str(value)


def function_turns(task: Row, made: Row, rng: random.Random) -> tuple[list[Row], str]:
    name, value = made["function"], made["first"]
    if rng.random() < SLOPPY_FRAC["call"]:
        name = next(one["name"] for one in task["functions"] if one["name"] != name)
    right = name == made["function"]
    what = ("done" if name == "order" else value) if right else None
    found = {"value": what} if right else {"error": "nothing is recorded for these arguments"}
    said = str(what) if right else "none"
    item = f" {made['good']} "
    turns = [{"reply": call("call", name=f" {name} ", arguments={"item": item})}, {"value": found}]
    return [{"node": "function", **turn} for turn in (*turns, {"reply": said})], said


def math_turns(first: str, made: Row, rng: random.Random) -> tuple[list[Row], str]:
    left = int(first) if first.isdigit() else 0
    op = made["op"]
    if rng.random() < SLOPPY_FRAC["sum"]:
        op = "-" if op == "+" else "+"
    total = left + made["by"] if op == "+" else left - made["by"]
    turns = [
        {"reply": call("calculator", expression=f" {left} {op} {made['by']} ")},
        {"value": total},
        {"reply": str(total)},
    ]
    return [{"node": "math", **turn} for turn in turns], str(total)


def demonstration(task: Row, rng: random.Random) -> Row:
    """One episode by rule; what somebody got wrong goes on into the next turns."""
    made, needs, turns, said = task["_"], list(task["needs"]), [], []
    if rng.random() < SLOPPY_FRAC["route"]:
        needs[0] = rng.choice([one for one in ("qa", "function", "math") if one != needs[0]])
    if len(needs) > 1 and rng.random() < SLOPPY_FRAC["early"]:
        needs.pop()
    for agent in needs:
        turns.append({"node": "decide", "reply": agent})
        if agent == "qa":
            more, report = qa_turns(made, rng)
        elif agent == "function":
            more, report = function_turns(task, made, rng)
        else:
            first = said[-1] if said else str(made["first"]) if task["needs"][0] == "math" else "0"
            more, report = math_turns(first, made, rng)
        turns += more
        said.append(report)
    copied = str(made["by"]) if rng.random() < SLOPPY_FRAC["copy"] else said[-1]
    turns.append({"node": "decide", "reply": f"finish {copied}"})
    return {"task": bare(task), "turns": turns}


def bare(task: Row) -> Row:
    return {key: value for key, value in task.items() if key != "_"}


def write(path: Path, rows: list[Row]) -> int:
    """JSON Lines, gzipped where the name says so (without a date); returns the number of rows."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)
    return len(rows)


def distinct(number: int, towns: list[str], goods: list[str], split: str) -> list[Row]:
    """Tasks of which no question stands twice."""
    rng, rows = chooser("tasks", split), {}
    while len(rows) < number:
        task = draw(towns, goods, rng)
        rows.setdefault(task["question"], task)
    return list(rows.values())


def main(out: Path = HERE) -> dict[str, int]:
    """Write every file into `out`; returns the rows of each."""
    (held_towns, towns), (held_goods, goods) = map(halves, draw_names())
    facts = [(t, r, height_of(t, r)) for t in (*held_towns, *towns) for r in RELATIONS]
    vocabulary = [*FORMS, " ".join(FUNCTIONS), " ".join(map(str, range(-STEP, MOST + STEP + 1)))]
    vocabulary += [sentence(*fact) for fact in facts] + [" ".join(group) for group in (held_goods, goods)]
    shown = distinct(NUM_DEMOS, towns, goods, "demos")
    demos = [demonstration(task, chooser("demo", task["question"])) for task in shown]
    train, held = (
        distinct(NUM_TRAIN, towns, goods, "train"),
        distinct(NUM_EVAL, held_towns, held_goods, "eval"),
    )
    corpus = [{"id": f"f{i:03d}", "text": sentence(*fact)} for i, fact in enumerate(facts)]
    return {
        "corpus.jsonl": write(out / "corpus.jsonl", corpus),
        "vocab.jsonl": write(out / "vocab.jsonl", [{"text": text} for text in vocabulary]),
        "train.jsonl.gz": write(out / "train.jsonl.gz", [bare(task) for task in train]),
        "eval.jsonl.gz": write(out / "eval.jsonl.gz", [bare(task) for task in held]),
        "demos.jsonl.gz": write(out / "demos.jsonl.gz", demos),
    }


if __name__ == "__main__":
    for name, number in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).items():
        print(f"{name:16} {number:5}")
