"""Write small programming tasks, and sloppy demonstrations for a team of three and for one role alone.

    python examples/small/reflective_code/make_data.py [OUT]

Standard library only, seeded; the same bytes on every run. A task is two operations in words, its program one
expression in x; which tasks are held out hangs on the operations and their numbers alone.
"""

import gzip
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent

WORDS = {"+": ("add", "gain", "join"), "-": ("cut", "drop", "lose"), "*": ("times", "fold", "scale")}
Program = tuple[tuple[str, int], tuple[str, int]]
"""Two operations on x, in order, each with its number."""

EVAL_ROWS, DEMOS, TESTS, ROUNDS = 200, 4000, 4, 2
BAD_PLAN_FRAC = 0.6
"""How often a demonstrated plan has one of its operations wrong."""
BAD_CODE_FRAC, STOPS_FRAC = 0.6, 0.5
"""How often demonstrated code is wrong, and how much of that stops after the first operation; the rest leaves
the brackets out."""
BAD_REASON_FRAC = 0.4
"""How often a demonstrated reflection names the operation that was right."""


def programs() -> list[Program]:
    single = [(op, n) for op in WORDS for n in range(2, 10)]
    return [(first, second) for first in single for second in single]


def value(code: str, x: int) -> int:
    """What code of this script's own making is worth at x."""
    return eval(code, {"__builtins__": {}}, {"x": x})


def right_code(program: Program) -> str:
    (first, a), (second, b) = program
    return f"( x {first} {a} ) {second} {b}"


def task(program: Program, rng: random.Random) -> dict:
    (first, a), (second, b) = program
    words = f"{rng.choice(WORDS[first])} {a} then {rng.choice(WORDS[second])} {b}"
    xs = rng.sample(range(10), TESTS)
    return {"question": words, "tests": [{"x": str(x), "y": value(right_code(program), x)} for x in xs]}


def planned(program: Program, rng: random.Random) -> Program:
    """The program, or one with another operation in one place."""
    if rng.random() >= BAD_PLAN_FRAC:
        return program
    place = rng.randrange(2)
    op, number = program[place]
    wrong = (rng.choice([other for other in WORDS if other != op]), number)
    return (wrong, program[1]) if place == 0 else (program[0], wrong)


def plan_text(program: Program) -> str:
    (first, a), (second, b) = program
    return f"{first} {a} then {second} {b}"


def coded(program: Program, rng: random.Random) -> str:
    (first, a), (second, b) = program
    if rng.random() >= BAD_CODE_FRAC:
        return right_code(program)
    start = f"x {first} {a}"
    return start if rng.random() < STOPS_FRAC else f"{start} {second} {b}"


def reason(program: Program, plan: Program, rng: random.Random) -> str:
    """Which operation is to be mended, and what it should be."""
    place = 0 if plan[0] != program[0] else 1
    if rng.random() < BAD_REASON_FRAC:
        place = 1 - place
    op, number = program[place]
    return f"{('first', 'second')[place]} {op} {number}"


def solved(code: str, given: dict) -> bool:
    return all(value(code, int(test["x"])) == test["y"] for test in given["tests"])


def team(program: Program, given: dict, rng: random.Random) -> dict:
    turns = []
    for number in range(1, ROUNDS + 1):
        plan = planned(program, rng)
        code = coded(plan, rng)
        turns += [{"node": "plan", "reply": plan_text(plan)}, {"node": "code", "reply": code}]
        if solved(code, given) or number == ROUNDS:
            return {"task": given, "turns": turns}
        turns.append({"node": "reflect", "reply": reason(program, plan, rng)})
    raise AssertionError("the last round returns")


def alone(program: Program, given: dict, rng: random.Random) -> dict:
    turns = []
    for _ in range(ROUNDS):
        code = coded(planned(program, rng), rng)
        turns.append({"node": "code", "reply": code})
        if solved(code, given):
            break
    return {"task": given, "turns": turns}


def write(path: Path, rows: list[dict]) -> int:
    """JSON Lines, one object a row, packed if the name ends in `.gz`; returns the number of rows."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return len(rows)


def main(out: Path = HERE) -> dict[str, int]:
    """Write every file into `out`; returns the rows of each."""
    rng = random.Random("reflective_code")
    every = programs()
    rng.shuffle(every)
    held_out, known = every[:EVAL_ROWS], every[EVAL_ROWS:]
    shown = [(program, task(program, rng)) for program in rng.choices(known, k=DEMOS)]
    words = ["task plan code not because first second then x ( ) + - *", " ".join(map(str, range(10)))]
    words += [" ".join(group) for group in WORDS.values()]
    return {
        "train": write(out / "train.jsonl", [task(program, rng) for program in known * 2]),
        "eval": write(out / "eval.jsonl", [task(program, rng) for program in held_out]),
        "demos": write(out / "demos.jsonl.gz", [team(p, given, rng) for p, given in shown]),
        "demos_single": write(out / "demos_single.jsonl.gz", [alone(p, given, rng) for p, given in shown]),
        "vocab": write(out / "vocab.jsonl", [{"text": text} for text in words]),
    }


if __name__ == "__main__":
    for name, count in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).items():
        print(f"{name:12} {count:5}")
