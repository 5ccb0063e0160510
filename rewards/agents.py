"""A master and its specialists: was the right one asked, and how much more than needed was said?

JoyAgents-R1 (arXiv 2506.19846) pays accuracy + format - efficiency and gives no formulas; these are ours.
"""

from collections import Counter
from typing import Any


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
