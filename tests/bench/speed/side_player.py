"""How many nodes a second masflow's player goes through where every node is a Python function: no model.

    python -m tests.bench.speed.side_player (chain|loop) (untraced|traced)

`traced` writes every episode to a trace.sqlite on the disk.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path

from masflow.compiler import compile_workflow
from masflow.compiler.plan import Plan
from masflow.models.engine import Reply
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.runtime.tracedb import TraceDb
from masflow.spec.runtime import Runtime
from masflow.trace import EpisodeKey, Scored
from tests.bench.speed.meter import Meter, pin

NODES, EPISODES, STEPS = 20, 200, 4
FUNCTION = """
def step(x: int) -> int:
    return x + 1
"""
CHAIN = """
name: chain
task: {{x: int}}
nodes:
{nodes}
edges: [start -> {chain} -> end]
output: {{x: "{{{{ n{last} }}}}"}}
"""
LOOP = """
name: loop
task: {{x: int}}
state: {{y: {{type: int, default: 0}}}}
nodes:
  step: {{call: "steps.py:step", args: {{x: "{{{{ state.y }}}}"}}, set: {{y: "{{{{ result }}}}"}}}}
edges:
  - start -> step
  - step -> step when state.y < {count}
  - step -> end
limits: {{visits: {count}, turns: {count}}}
output: {{x: "{{{{ state.y }}}}"}}
"""


def plan_of(shape: str, folder: Path) -> Plan:
    (folder / "steps.py").write_text(FUNCTION)
    file = folder / "workflow.yaml"
    before = ["x", *(f"n{i}" for i in range(NODES - 1))]
    call = '  n{i}: {{call: "steps.py:step", args: {{x: "{{{{ {x} }}}}"}}}}'
    nodes = "\n".join(call.format(i=i, x=x) for i, x in enumerate(before))
    chain = " -> ".join(f"n{i}" for i in range(NODES))
    texts = {
        "chain": CHAIN.format(nodes=nodes, chain=chain, last=NODES - 1),
        "loop": LOOP.format(count=NODES),
    }
    file.write_text(texts[shape])
    root, graphs = compile_workflow(file)
    return Plan(root, graphs, (), {}, runtime=Runtime(), root_dir=str(folder))


def nobody(requests: object) -> list[Reply]:
    raise AssertionError(f"no node has a model: {requests}")


def main() -> None:
    pin()
    shape, way = sys.argv[1:3]
    meter = Meter(NODES * EPISODES, STEPS)
    with tempfile.TemporaryDirectory(prefix="masflow-") as name:
        folder = Path(name)
        player = Player(plan_of(shape, folder), mode="train")
        trace = TraceDb(folder / "trace.sqlite") if way == "traced" else None
        gc.freeze()  # as masflow's commands do once everything is loaded; the other side does it too
        meter.loaded()
        for number in range(STEPS + 1):
            keys = [EpisodeKey(0, "train", number, i, f"t{i}", 0) for i in range(EPISODES)]
            found = play(player, [player.start({"x": 0}, key) for key in keys], nobody)
            assert [one.output["x"] for one in found if one.output] == [NODES] * EPISODES
            if trace is not None:
                trace.add_trajectories(number, "train", [Scored(one, {}, {}, {}, ()) for one in found])
            meter.step()
        if trace is not None:
            trace.close()
    meter.tell()


if __name__ == "__main__":
    main()
