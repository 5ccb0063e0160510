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

EVAL_ROWS, DEMOS, TESTS, ROUNDS = 200, 2000, 4, 2
BAD_PLAN_FRAC = 0.5
"""How often a demonstrated plan has its second operation wrong, always in the same way: what is wrong in many
ways would be drawn seldom at a low temperature."""
BAD_CODE_FRAC = 0.45
"""How often demonstrated code leaves the brackets out where that matters, else the second operation."""
BAD_REASON_FRAC = 0.4
"""How often a demonstrated reflection names the first operation."""


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


def bad_plan(program: Program) -> Program:
    (second, number) = program[1]
    return program[0], ({"+": "-", "-": "*", "*": "+"}[second], number)


def planned(program: Program, rng: random.Random) -> Program:
    """The program, or one whose second operation is another."""
    return bad_plan(program) if rng.random() < BAD_PLAN_FRAC else program


def plan_text(program: Program) -> str:
    (first, a), (second, b) = program
    return f"{first} {a} then {second} {b}"


def bad_code(program: Program) -> str:
    (first, a), (second, b) = program
    start = f"x {first} {a}"
    return f"{start} {second} {b}" if second == "*" and first != "*" else start


def coded(program: Program, rng: random.Random) -> str:
    return bad_code(program) if rng.random() < BAD_CODE_FRAC else right_code(program)


def reason(program: Program, rng: random.Random) -> str:
    """What the second operation should be, or the first again, which was right."""
    place = 0 if rng.random() < BAD_REASON_FRAC else 1
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
        turns.append({"node": "reflect", "reply": reason(program, rng)})
    raise AssertionError("the last round returns")


def alone(program: Program, given: dict, rng: random.Random) -> dict:
    """Right as often as a round of the team; else with both of its mistakes, again always in the same way."""
    turns = []
    for _ in range(ROUNDS):
        is_right = rng.random() < (1 - BAD_PLAN_FRAC) * (1 - BAD_CODE_FRAC)
        code = right_code(program) if is_right else bad_code(bad_plan(program))
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
