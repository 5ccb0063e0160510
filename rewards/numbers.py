"""Arithmetic: is the last number of a text the right one?"""

import math
import re

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?|(?<![\w.])[-+]?\.\d+")


def last_number(text: str) -> float | None:
    """The last number of the text, thousands' commas dropped; None when it has none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def final_number(prediction: str, answer: str | float) -> float:
    """1 when the prediction's last number equals the gold one (GSM8K writes it after `####`), else 0."""
    gold = last_number(str(answer))
    if gold is None:
        raise ValueError(f"the gold answer {answer!r} holds no number")
    said = last_number(prediction)
    return float(said is not None and math.isclose(said, gold, rel_tol=1e-9, abs_tol=1e-9))


def judged(verdict: str, solution: str, answer: str | float) -> float:
    """1 when a reviewer's verdict, right or wrong, is what `final_number` says of the solution, else 0."""
    return float((verdict == "right") == (final_number(solution, answer) == 1))


def number(value: float) -> float:
    """The number itself, for what a tool has measured already."""
    return value
