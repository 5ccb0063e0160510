"""What a node without a model costs, beside the least that any player would do for it in Python."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable

import pytest

from masflow.compiler.plan import Plan
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

NODES, EPISODES = 20, 50
NAMES = [f"n{i}" for i in range(NODES)]
CALLS = "\n".join(
    f'      {name}: {{call: "fns.py:step", args: {{x: "{{{{ {before} }}}}"}}}}'
    for before, name in zip(["x", *NAMES], NAMES, strict=False)
)
CHAIN = f"""
    name: chain
    task: {{x: int}}
    nodes:
{CALLS}
    edges: [start -> {" -> ".join(NAMES)} -> end]
    output: {{x: "{{{{ {NAMES[-1]} }}}}"}}
"""


def step(x: int) -> int:
    return x + 1


def best_s(work: Callable[[], None]) -> float:
    """CPU seconds; the machine may be busy with something else."""
    found = []
    for _ in range(7):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def least() -> None:
    """Per node: the arguments copied, the function called, the state replaced, one record kept."""
    for _ in range(EPISODES):
        state, records = {"x": 0}, {}
        for name in NAMES:
            value = step(**copy.deepcopy(state))
            state = {**state, "x": value}
            records[json.dumps([["", name, 1, None, 0, 0]])] = {"value": value, "args": state}


@pytest.mark.slow
def test_a_call_node_costs_a_few_times_the_least_that_any_player_would_do(compiled: Callable[..., Plan]):
    player = Player(compiled(CHAIN, {"fns.py": "def step(x: int) -> int:\n    return x + 1\n"}))

    def play() -> None:
        for i in range(EPISODES):
            state = player.start({"x": 0}, EpisodeKey(0, "train", 1, i, "t", 0))
            player.advance(state)
            assert player.trajectory(state).output == {"x": NODES}

    assert best_s(play) <= 8 * best_s(least)
