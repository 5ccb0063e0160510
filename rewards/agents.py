"""A master and its specialists: is the answer right, was the right agent asked, was more said than needed?

JoyAgents-R1 (arXiv 2506.19846) pays accuracy + format - efficiency and gives no formulas; these are ours.
"""

from collections import Counter
from typing import Any

from .calls import made_match
from .numbers import final_number
from .qa import token_f1


def answered(
    trajectory: Any, kind: str, answer: str, answers: list[str], node: str, gold: list[dict[str, Any]] | None
) -> float:
    """Whether a task of several kinds is done: a `text` by token F1, a `number` by its value, `calls` by the
    calls that were made at `node`, whatever is said of them."""
    if kind == "calls":
        return made_match(trajectory, node, gold)
    return final_number(answer, answers[0]) if kind == "number" else token_f1(answer, answers)


def routing(asked: dict[str, int], needs: list[str]) -> float:
    """F1 of the agents that were asked, each as often as it was, against those that the task needs; 1 where
    none is needed and none was asked.

    Args:
        asked: how often each agent was asked, by its name.
        needs: names; one that is needed twice stands twice.
    """
    gave, want = Counter(asked), Counter(needs)
    if not gave.total() and not want.total():
        return 1.0
    return 2 * (gave & want).total() / (gave.total() + want.total())


def overhead(trajectory: Any, role: str, needed: int, most: int) -> float:
    """Minus the share of a role's turns beyond those that the task needs, at least -1: with `most` allowed,
    -(turns - needed) / (most - needed). 0 where it needed no more."""
    turns = sum(turn.role == role for turn in trajectory.turns)
    return -min(1.0, max(0, turns - needed) / max(1, most - needed))
