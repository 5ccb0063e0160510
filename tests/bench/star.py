"""How fast turns go through the star, and the player alone: no model, so that only masflow is measured.

    python -m tests.bench.star

Prints turns a second through Ray with a scripted engine that answers at once (barriers and as they come), and
milliseconds a node of the player with its trace written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from masflow.compiler import compile_workflow
from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.models.scripted import ScriptedEngine
from masflow.runtime import cluster
from masflow.runtime.episodes import answers_of, play
from masflow.runtime.player import Player
from masflow.runtime.team import Team
from masflow.runtime.tracedb import TraceDb
from masflow.spec.mapping import Optimizer
from masflow.spec.runtime import Place, RolloutWorkers, Runtime
from masflow.trace import EpisodeKey, Scored
from tests.runtime.ray.plain_actors import ScriptedWorker

CHAIN = """
name: chain
task: {{question: str}}
roles:
  speaker: {{prompt: "Answer the question: {{{{ question }}}}. Say what you know, step by step."}}
nodes:
{nodes}
edges: [start -> {chain} -> end]
output: {{answer: "{{{{ n{last}.text }}}}"}}
"""
WORKERS = 2


def chain_plan(folder: Path, nodes: int) -> Plan:
    """A chain of role nodes, as one plan of one frozen policy."""
    names = [f"n{i}" for i in range(nodes)]
    listed = "\n".join(f"  {name}: {{role: speaker}}" for name in names)
    (folder / "workflows").mkdir(exist_ok=True)
    file = folder / "workflows" / f"chain{nodes}.yaml"
    file.write_text(CHAIN.format(nodes=listed, chain=" -> ".join(names), last=nodes - 1))
    root, graphs = compile_workflow(file)
    policy = PolicyIR("m", "m", None, ("speaker",), False, Optimizer())
    place = Place(rollout=RolloutWorkers(workers=WORKERS))
    models = (ModelIR("m", None, "", "frozen", (policy,), place=place),)
    runtime = Runtime(backend="ray", deterministic=True)
    return Plan(root, graphs, models, {"speaker": "m"}, runtime=runtime, root_dir=str(folder))


def played(plan: Plan, answers: Any, episodes: int) -> tuple[int, list[Any]]:
    """(turns, trajectories) of so many episodes."""
    player = Player(plan, mode="train")
    states = [
        player.start({"question": f"what is number {i}"}, EpisodeKey(0, "train", 1, i, f"t{i}", 0))
        for i in range(episodes)
    ]
    found = play(player, states, answers)
    return sum(len(one.turns) for one in found), found


def best_of(measure: Callable[[], float], times: int = 3) -> float:
    return max(measure() for _ in range(times))


def through_ray(folder: Path, episodes: int, deterministic: bool) -> float:
    """Turns a second of a chain of four roles, played by the hub, answered through Ray."""
    plan = chain_plan(folder, 4)
    plan = replace(plan, runtime=plan.runtime.model_copy(update={"deterministic": deterministic}))
    team = Team(plan, folder / "run", worker=ScriptedWorker)
    played(plan, answers_of(team), 8)

    def measure() -> float:
        began = time.perf_counter()
        turns, _ = played(plan, answers_of(team), episodes)
        team.clear_rows()
        return turns / (time.perf_counter() - began)

    try:
        return best_of(measure)
    finally:
        team.close()


def player_ms(
    folder: Path, nodes: int, episodes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Milliseconds a node of the player, its trace on the disk, in this process.

    Args:
        clock: in seconds; `time.process_time` leaves out what other processes took of the machine.
    """
    plan = chain_plan(folder, nodes)
    engine = ScriptedEngine({"*": ["a short reply"]})

    def measure() -> float:
        trace = TraceDb(folder / f"trace{time.monotonic_ns()}.sqlite")
        began = clock()
        turns, found = played(plan, engine.generate, episodes)
        trace.add_trajectories(1, "train", [Scored(one, {}, {}, {}, ()) for one in found])
        seconds = clock() - began
        trace.close()
        return turns / seconds

    return 1000 / best_of(measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=512)
    episodes = parser.parse_args().episodes
    with tempfile.TemporaryDirectory(prefix="masflow-") as name:
        folder = Path(name)
        result = {
            "player_ms_a_node": round(player_ms(folder, 20, 100), 4),
            "player_cpu_ms_a_node": round(player_ms(folder, 20, 100, time.process_time), 4),
        }
        cluster.start(num_cpus=2)
        try:
            result["turns_a_second_at_barriers"] = round(through_ray(folder, episodes, True))
            result["turns_a_second_as_they_come"] = round(through_ray(folder, episodes, False))
        finally:
            cluster.stop()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
