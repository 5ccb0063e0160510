"""The same chain and loop of Python functions on LangGraph.

    python -m tests.bench.speed.side_langgraph (chain|loop) (untraced|traced)

`traced` keeps every step with its own checkpointer, in memory, which is its fastest: a thread an episode.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import sys
from typing import Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from tests.bench.speed.meter import Meter, pin

NODES, EPISODES, STEPS = 20, 50, 2


class State(TypedDict):
    x: int


def step(state: State) -> dict[str, int]:
    return {"x": state["x"] + 1}


def goes_on(state: State) -> str:
    return "step" if state["x"] < NODES else END


def graph_of(shape: str, saver: Any) -> Any:
    graph = StateGraph(State)
    if shape == "loop":
        graph.add_node("step", step)
        graph.add_edge(START, "step")
        graph.add_conditional_edges("step", goes_on, ["step", END])
        return graph.compile(checkpointer=saver)
    names = [f"n{i}" for i in range(NODES)]
    for name in names:
        graph.add_node(name, step)
    for before, after in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(before, after)
    return graph.compile(checkpointer=saver)


def main() -> None:
    pin()
    shape, way = sys.argv[1:3]
    meter = Meter(NODES * EPISODES, STEPS)
    graph = graph_of(shape, InMemorySaver() if way == "traced" else None)
    gc.freeze()  # to its advantage, and as the other side does
    meter.loaded()
    for number in range(STEPS + 1):
        for episode in range(EPISODES):
            config = {"recursion_limit": 2 * NODES, "configurable": {"thread_id": f"{number}-{episode}"}}
            assert graph.invoke({"x": 0}, config)["x"] == NODES
        meter.step()
    meter.tell()


if __name__ == "__main__":
    main()
