"""Write word problems of two steps, and sloppy demonstrations for a team of four and for one role alone.

    python examples/small/math_team/make_data.py [OUT]

Standard library only, seeded; the same bytes on every run. A problem is three numbers and two operations in
words; which problems are held out hangs on these alone, so that no other wording of one is in training.
"""

import gzip
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent

GAINS = ("finds", "buys", "wins", "gets", "picks", "makes")
LOSSES = ("loses", "eats", "sells", "drops", "lends", "breaks")
NAMES = ("anna", "ben", "carla", "david", "emma", "frank", "greta", "hugo")
MOST = 6
"""Numbers of a problem are 1 to 6; what comes out in between is 0 to 18."""

TRAIN_ROWS, EVAL_ROWS, DEMOS = 1200, 200, 2500
BAD_STEPS_FRAC, STOPS_FRAC = 0.55, 0.6
"""How often a demonstrated solution is wrong, and how often that is because it stops after its first step;
else it turns the second operation round."""
BAD_VERDICT_FRAC = 0.3
BAD_COPY_FRAC = 0.5
"""How often the final number is that of the first step."""


def problems() -> list[tuple[int, str, int, str, int]]:
    """(a, op, b, op, c), nothing negative on the way."""
    numbers = range(1, MOST + 1)
    return [
        (a, first, b, second, c)
        for a in numbers
        for first in "+-"
        for b in numbers
        for second in "+-"
        for c in numbers
        if step(a, first, b) >= 0 and step(step(a, first, b), second, c) >= 0
    ]


def step(left: int, op: str, right: int) -> int:
    return left + right if op == "+" else left - right


def task(problem: tuple[int, str, int, str, int], rng: random.Random) -> dict:
    """A problem in words, and its answer."""
    a, first, b, second, c = problem
    verbs = [rng.choice(GAINS if op == "+" else LOSSES) for op in (first, second)]
    words = f"{rng.choice(NAMES)} has {a} {verbs[0]} {b} {verbs[1]} {c}"
    return {"question": words, "answer": str(step(step(a, first, b), second, c))}


def steps(problem: tuple[int, str, int, str, int], rng: random.Random) -> str:
    """A solution, wrong as often as `BAD_STEPS_FRAC` says; its sums are always right."""
    a, first, b, second, c = problem
    middle = step(a, first, b)
    done = f"{a} {first} {b} = {middle}"
    if rng.random() < BAD_STEPS_FRAC:
        turned = "-" if second == "+" else "+"
        if rng.random() < STOPS_FRAC or step(middle, turned, c) < 0:
            return done
        second = turned
    return f"{done} then {middle} {second} {c} = {step(middle, second, c)}"


def final(solution: str, rng: random.Random) -> str:
    """The number that a solution ends with, or the first step's."""
    results = [part.split()[-1] for part in solution.split(" then ")]
    return results[0] if rng.random() < BAD_COPY_FRAC else results[-1]


def team(problem: tuple[int, str, int, str, int], given: dict, rng: random.Random) -> dict:
    solution = steps(problem, rng)
    right = solution.split()[-1] == given["answer"]
    verdict = "right" if right != (rng.random() < BAD_VERDICT_FRAC) else "wrong"
    turns = [{"node": "solve", "reply": solution}, {"node": "verify", "reply": verdict}]
    if verdict == "wrong":
        solution = steps(problem, rng)
        turns.append({"node": "refine", "reply": solution})
    turns.append({"node": "final", "reply": final(solution, rng)})
    return {"task": given, "turns": turns}


def alone(problem: tuple[int, str, int, str, int], given: dict, rng: random.Random) -> dict:
    solution = steps(problem, rng)
    reply = f"{solution} answer {final(solution, rng)}"
    return {"task": given, "turns": [{"node": "solve", "reply": reply}]}


def write(path: Path, rows: list[dict]) -> int:
    """JSON Lines, one object a row, packed if the name ends in `.gz`; returns the number of rows."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return len(rows)


def main(out: Path = HERE) -> dict[str, int]:
    """Write every file into `out`; returns the rows of each."""
    rng = random.Random("math_team")
    every = problems()
    rng.shuffle(every)
    held_out, known = every[:EVAL_ROWS], every[EVAL_ROWS:]
    rows = [(problem, task(problem, rng)) for problem in rng.choices(known, k=TRAIN_ROWS)]
    shown = [(problem, task(problem, rng)) for problem in rng.choices(known, k=DEMOS)]
    words = ["has then answer right wrong solution verdict again number + - ="]
    words += [" ".join(group) for group in (GAINS, LOSSES, NAMES, map(str, range(3 * MOST + 1)))]
    return {
        "train": write(out / "train.jsonl", [given for _, given in rows]),
        "eval": write(out / "eval.jsonl", [task(problem, rng) for problem in held_out]),
        "demos": write(out / "demos.jsonl.gz", [team(p, given, rng) for p, given in shown]),
        "demos_single": write(out / "demos_single.jsonl.gz", [alone(p, given, rng) for p, given in shown]),
        "vocab": write(out / "vocab.jsonl", [{"text": text} for text in words]),
    }


if __name__ == "__main__":
    for name, count in main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE).items():
        print(f"{name:12} {count:5}")
