"""Tools run beside each other, and nothing shows it: values, effects and requests stand as one after
another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from masflow.compiler import check, compile_workflow
from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.errors import RunError
from masflow.functions import load_callable
from masflow.models.engine import Reply, Request
from masflow.models.scripted import ScriptedEngine
from masflow.passes.node_sampling import NodeSampling
from masflow.runtime.episodes import play
from masflow.runtime.nodes import Drawn, NodeSampler
from masflow.runtime.player import Player
from masflow.spec.experiment import Algorithm
from masflow.spec.mapping import Optimizer
from masflow.trace import EpisodeKey, Trajectory, path_json

Compile = Callable[..., Plan]

FNS = '''
import asyncio, threading, time

meeting = threading.Barrier(MEET, timeout=TIMEOUT)
turns = {i: threading.Event() for i in range(9)}
calls, now, most = [], [], []

def meets(x):
    """Returns only when as many calls as are to meet are there."""
    meeting.wait()
    return {"text": f"<{x}>"}

async def awaits(x):
    while meeting.n_waiting < 0:
        await asyncio.sleep(0)
    meeting.wait()
    return {"text": f"<{x}>"}

def last_first(x):
    """Call 2 is over first, then 1, then 0."""
    calls.append(x)
    if x < 2:
        turns[x + 1].wait(10)
    turns[x].set()
    return {"text": f"<{x}>"}

def odd_breaks(x):
    calls.append(x)
    if x == 3:
        time.sleep(60)
    if x % 2:
        raise ValueError(f"odd {x}")
    return {"text": f"<{x}>"}

def counts(x):
    now.append(x)
    most.append(len(now))
    time.sleep(0.005)
    now.remove(x)
    return {"text": ""}

class Slow:
    made = []
    def __init__(self, word="w"):
        Slow.made.append(1)
        time.sleep(0.05)
        self.word = word
    def __call__(self, x):
        return {"text": f"{self.word}{x}"}
'''
EACH = """
    name: each
    task: {numbers: [int]}
    roles: {speaker: {prompt: "{{ found.text | join }}"}}
    tools: {tool: {use: "fns.py:TOOL", SETTINGS}}
    nodes:
      found: {tool: tool, foreach: numbers, as: n, args: {x: "{{ n }}"}}
      say: {role: speaker}
    edges: [start -> found -> say -> end]
    output: {found: "{{ found.text }}", ok: "{{ ok.found }}"}
"""


def fns(meet: int = 3, timeout: float = 20) -> dict[str, str]:
    return {"fns.py": FNS.replace("MEET", str(meet)).replace("TIMEOUT", str(timeout))}


def each(compiled: Compile, tool: str, settings: str = "summary: s", **barrier: float) -> Plan:
    text = EACH.replace("TOOL", tool).replace("SETTINGS", settings)
    return compiled(text, fns(**barrier))  # type: ignore[arg-type]


def key(slot: int = 0) -> EpisodeKey:
    return EpisodeKey(7, "train", 3, slot, f"task{slot}", 0)


def run(plan: Plan, task: dict[str, Any], script: Any = None) -> Trajectory:
    player = Player(plan)
    engine = ScriptedEngine(script or {"*": ["yes"]})
    [trajectory] = play(player, [player.start(task, key())], engine.generate)
    return trajectory


def of(plan: Plan, name: str) -> Any:
    """A global of the plan's functions."""
    return load_callable(f"{plan.root_dir}/fns.py:meets", plan.root_dir).__globals__[name]


@pytest.mark.parametrize("tool", ["meets", "awaits"])
def test_the_items_of_a_foreach_run_beside_each_other(compiled: Compile, tool: str):
    one = run(each(compiled, tool), {"numbers": [0, 1, 2]})
    assert (one.outcome, one.output["found"]) == ("ok", ["<0>", "<1>", "<2>"])


def test_at_once_1_runs_them_one_after_another(compiled: Compile):
    one = run(each(compiled, "meets", "at_once: 1", timeout=0.1), {"numbers": [0, 1, 2]})
    assert one.outcome == "tool_error" and "BrokenBarrier" in one.detail


def test_values_and_effects_stand_in_the_order_of_the_items(compiled: Compile):
    plan = each(compiled, "last_first")
    one = run(plan, {"numbers": [0, 1, 2]})
    assert one.output["found"] == ["<0>", "<1>", "<2>"]
    assert [(e.path[-1].item, e.args["x"], e.superstep) for e in one.effects] == [(i, i, 0) for i in range(3)]
    assert sorted(of(plan, "calls")) == [0, 1, 2]


@pytest.mark.parametrize("numbers", [[], [2], [0, 1, 2], [2, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_beside_each_other_and_one_after_another_give_equal_trajectories(compiled: Compile, numbers: Any):
    def played(at_once: int) -> tuple[Trajectory, list[int]]:
        plan = each(compiled, "odd_breaks", f"at_once: {at_once}, timeout_s: 0.2")
        of(plan, "calls").clear()
        return run(plan, {"numbers": numbers}), sorted(of(plan, "calls"))

    together, alone = played(3), played(1)
    assert together == alone
    assert together[1] == numbers
    if 3 in numbers:
        assert "timeout" in "".join(e.error or "" for e in together[0].effects)
    if 1 in numbers:
        assert together[0].outcome == "tool_error" and "ValueError: odd 1" in together[0].detail


def test_no_more_than_at_once(compiled: Compile):
    plan = each(compiled, "counts", "at_once: 2")
    run(plan, {"numbers": list(range(12))})
    assert max(of(plan, "most")) <= 2


def test_a_class_is_made_once_however_many_call_it_first(compiled: Compile):
    plan = each(compiled, "Slow", "word: a")
    assert run(plan, {"numbers": [0, 1, 2]}).output["found"] == ["a0", "a1", "a2"]
    assert of(plan, "Slow").made == [1]


BRANCHES = """
    name: branches
    roles: {speaker: {prompt: "say hm"}}
    tools: {tool: {use: "fns.py:meets"}}
    nodes:
      a: {tool: tool, args: {x: 1}}
      b: {tool: tool, args: {x: 2}}
      talk: {role: speaker}
      both: {set: {}}
    edges: [start -> a & b & talk, a & b & talk -> both, both -> end]
    output: {found: "{{ a.text ~ b.text ~ talk.text }}"}
"""


def test_branches_run_beside_each_other(compiled: Compile):
    assert run(compiled(BRANCHES, fns(2)), {}).output == {"found": "<1><2>yes"}


class Queue:
    """An engine that answers as it likes: the latest request first, one at a time."""

    def __init__(self) -> None:
        self.open: list[Request] = []

    def submit(self, requests: Any) -> None:
        self.open += requests

    def collect(self) -> list[Reply]:
        return [Reply(self.open.pop().turn_id, "yes")] if self.open else []

    def clear(self) -> None:
        self.open = []


@pytest.mark.parametrize("engine", [ScriptedEngine({"*": ["yes"]}).generate, Queue()])
def test_episodes_run_beside_each_other_in_barriers_and_freely(compiled: Compile, engine: Any):
    plan = each(compiled, "meets", meet=4)  # one call of each of four episodes
    player = Player(plan)
    states = [player.start({"numbers": [i]}, key(i)) for i in range(4)]
    found = play(player, states, engine)
    assert [one.output["found"] for one in found] == [[f"<{i}>"] for i in range(4)]
    assert [one.outcome for one in found] == ["ok"] * 4


def test_requests_are_made_in_the_order_of_episodes_whichever_tool_is_over_first(compiled: Compile):
    plan = each(compiled, "last_first")
    player, engine = Player(plan), ScriptedEngine({"*": ["yes"]})
    finished: list[int] = []
    states = [player.start({"numbers": [i]}, key(i)) for i in range(3)]
    play(player, states, engine.generate, lambda one: finished.append(one.key.slot))
    assert [r.messages[-1].content for r in engine.requests] == ["<0>", "<1>", "<2>"]
    assert finished == [0, 1, 2]


SAMPLED = """
    name: sampled
    roles: {a: {prompt: "speak first"}, b: {prompt: "after {{ found.text }}"}}
    tools: {tool: {use: "fns.py:TOOL", SETTINGS}}
    nodes: {one: {role: a}, found: {tool: tool, args: {x: "{{ one.text }}"}}, two: {role: b}}
    edges: [start -> one -> found -> two -> end]
"""


def sampled(compiled: Compile, tool: str, settings: str, tasks: int) -> Drawn:
    """Four actions at each turn of each task's base episode."""
    plan = compiled(SAMPLED.replace("TOOL", tool).replace("SETTINGS", settings), fns(4 * tasks))
    policy = PolicyIR("policy", "policy", None, ("a", "b"), True, Optimizer())
    plan = replace(
        plan,
        models=(ModelIR("policy", None, "", "full", (policy,)),),
        algorithm=Algorithm(advantage="leave_one_out"),  # type: ignore[arg-type]
    )
    player = Player(NodeSampling(samples=4).apply(plan))
    engine = ScriptedEngine({"*": lambda request: str(request.seed % 97)})
    sampler = NodeSampler(player.plan, player, engine.generate)
    return sampler.sample([player.start({}, key(i)) for i in range(tasks)])


def test_the_tools_of_sampled_actions_run_beside_each_other(compiled: Compile):
    drawn = sampled(compiled, "meets", "at_once: 8", 2)  # eight first turns are answered in one batch
    assert [one.outcome for one in drawn.bases] == ["ok", "ok"]
    assert {way.trajectory.outcome for way in drawn.continuations} == {"ok"}
    assert drawn.counts["contexts"] == 4


def test_sampled_actions_are_the_same_as_with_tools_one_after_another(compiled: Compile):
    together, alone = (sampled(compiled, "counts", f"at_once: {n}", 2) for n in (8, 1))
    assert together == alone
    assert len(together.continuations) == 2 * (4 + 4)


REACT = """
    name: react
    roles:
      worker: {copies: 2, prompt: "do it", tools: [tool], max_calls: 2}
    tools: {tool: {use: "fns.py:meets", summary: s, parameters: {x: int}}}
    nodes: {work: {role: worker}}
    edges: [start -> work -> end]
    output: {said: "{{ work.text }}"}
"""


def test_the_tools_of_copies_of_a_role_run_beside_each_other(compiled: Compile):
    def says(request: Request) -> str:
        last = request.messages[-1]
        if last.role == "tool":
            return last.content.split("\n")[0]
        return '<tool_call>{"name": "tool", "arguments": {"x": 5}}</tool_call>'

    one = run(compiled(REACT, fns(2)), {}, {"*": says})
    assert (one.outcome, one.output["said"]) == ("ok", ["<5>", "<5>"])


PROGRAM = """
from masflow import gather, workflow

@workflow(tools={"tool": {"use": "fns.py:meets"}})
async def main(task, agents, ctx):
    found = await gather(*(ctx.tool("tool", x=i) for i in range(3)))
    return {"found": [one["text"] for one in found]}
"""


def test_tools_that_a_function_gathers_run_beside_each_other(planned: Callable[..., Plan]):
    one = run(planned("main.py:main", {"main.py": PROGRAM, **fns(3)}), {})
    assert one.output == {"found": ["<0>", "<1>", "<2>"]}


def test_a_copy_and_a_fork_call_no_tool_again(compiled: Compile):
    plan = each(compiled, "last_first")
    player, engine = Player(plan), ScriptedEngine({"*": ["yes"]})
    state = player.start({"numbers": [0, 1, 2]}, key())
    [request] = player.advance(state)
    copy = state.copy()
    player.deliver(copy, engine.generate([request])[0])
    assert player.advance(copy) == []
    fork = player.fork(copy, request.turn_id, (path_json(player.trajectory(copy).turns[0].path), 1, 0))
    [again] = player.advance(fork)
    assert again.turn_id != request.turn_id and again.messages == request.messages
    assert sorted(of(plan, "calls")) == [0, 1, 2]


def test_what_stops_the_run_stops_it_from_a_thread_too(compiled: Compile, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    text = EACH.replace('"fns.py:TOOL", SETTINGS', 'http, urls: "http://127.0.0.1:9/", key_env: NO_SUCH_KEY')
    plan = compiled(text.replace("{x:", "{query:").replace("[int]", "[str]"))
    with pytest.raises(RunError, match="NO_SUCH_KEY holds the key"):
        run(plan, {"numbers": ["a", "b"]})


@pytest.mark.parametrize(
    ("use", "at_once"),
    [
        ("fns.py:meets", 8),
        ("fns.py:meets, at_once: 3", 3),
        ("calculator", 1),
        ("calculator, at_once: 2", 2),
        ('http, urls: "http://h/"', 8),
        ('http, urls: "http://h/", max_concurrent: 30', 30),
        ('http, urls: "http://h/", at_once: 2', 2),
        ("fns.py:counts, scope: episode", 1),
    ],
)
def test_how_many_at_once_stands_in_the_plan(tmp_path, use: str, at_once: int):
    (tmp_path / "fns.py").write_text(fns()["fns.py"])
    file = tmp_path / "w.yaml"
    file.write_text(f"name: w\ntools: {{t: {{use: {_quoted(use)}}}}}\nnodes: {{a: {{set: {{}}}}}}\n"
                    "edges: [start -> a -> end]\n")  # fmt: skip
    _, graphs = compile_workflow(file)
    assert graphs["w"].tools[0].at_once == at_once


def _quoted(use: str) -> str:
    name, _, rest = use.partition(", ")
    return f'"{name}", {rest}' if rest else f'"{name}"'


def test_a_tool_with_a_state_has_no_calls_at_once(tmp_path):
    (tmp_path / "fns.py").write_text(fns()["fns.py"])
    file = tmp_path / "w.yaml"
    file.write_text('name: w\ntools: {t: {use: "fns.py:counts", scope: episode, at_once: 2}}\n'
                    "nodes: {a: {set: {}}}\nedges: [start -> a -> end]\n")  # fmt: skip
    (problem,) = check(file)
    assert (problem.code, problem.fix) == ("useless-key", "remove 'at_once'")
