"""Actions drawn at the nodes of base episodes: what is asked, what it costs, what it is worth."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.models.engine import Reply, Request
from masflow.models.scripted import ScriptedEngine
from masflow.passes.node_sampling import NodeSampling
from masflow.rl.batch import Batch, build_batch
from masflow.rl.nodes import Credited, credit_actions
from masflow.rl.score import score
from masflow.runtime.nodes import Drawn, NodeSampler
from masflow.runtime.player import Player
from masflow.spec.experiment import Algorithm
from masflow.spec.mapping import Optimizer
from masflow.trace import EpisodeKey

Compile = Callable[..., Plan]
REWARD = """
def paid(first, second):
    return {"00": 0.0, "01": 1.0, "10": 3.0, "11": 0.5}[first + second]

def own(said):
    return float(said)
"""
TWO = """
    name: two
    roles: {a: {prompt: "speak first"}, b: {prompt: "after {{ one.text }}"}}
    nodes: {one: {role: a}, two: {role: b}}
    edges: [start -> one -> two -> end]
    rewards:
      - {name: paid, use: "table.py:paid", args: {first: "{{ one.text }}", second: "{{ two.text }}"}}
      - {name: own, use: "table.py:own", level: turn, args: {said: "{{ result.text }}"}, weight: 1}
"""
LIKELY = {"speak first": 0.5, "after 0": 0.25, "after 1": 0.75}
"""Prompt → probability of the reply 1."""


def chain(length: int) -> str:
    nodes = ", ".join(f"n{i}: {{role: a}}" for i in range(length))
    path = " -> ".join(f"n{i}" for i in range(length))
    return f"""
    name: chain
    roles: {{a: {{prompt: "speak {{{{ visit }}}}"}}}}
    nodes: {{{nodes}}}
    edges: [start -> {path} -> end]
    rewards:
      - {{name: own, use: "table.py:own", level: turn, args: {{said: "{{{{ result.text }}}}"}}}}
      - {{name: last, use: "table.py:own", args: {{said: "{{{{ n{length - 1}.text }}}}"}}, otherwise: 0}}
    """


def sampling(plan: Plan, advantage: str = "leave_one_out", **settings: Any) -> Plan:
    """The plan with one trained policy and its nodes sampled."""
    policy = PolicyIR("policy", "policy", None, tuple(plan.policy_of), True, Optimizer())
    model = ModelIR("policy", None, "", "full", (policy,))
    algorithm = Algorithm(advantage=advantage)  # type: ignore[arg-type]
    return NodeSampling(**settings).apply(replace(plan, models=(model,), algorithm=algorithm))


def states(player: Player, number: int, task: Mapping[str, Any] | None = None) -> list[Any]:
    return [player.start(dict(task or {}), EpisodeKey(1, "train", 1, n, f"t{n}", 0)) for n in range(number)]


def drawn(plan: Plan, generate: Any, number: int = 1, task: Mapping[str, Any] | None = None) -> Drawn:
    player = Player(plan)
    return NodeSampler(plan, player, generate).sample(states(player, number, task))


def learnt(plan: Plan, found: Drawn, number: int) -> tuple[Credited, Batch]:
    bases = score(plan, found.bases)
    local = plan.sampler.options["credit"] == "local"
    credited = credit_actions(plan, bases, found.continuations, local)
    return credited, build_batch(plan, bases, number * plan.sampler.samples, 1, credited.entrants)


def coin(request: Request) -> str:
    """A tabular policy: 1 with the prompt's probability."""
    likely = LIKELY.get(request.messages[-1].content, 0.5)
    return str(int(random.Random(request.seed).random() < likely))


def coins(plan: Plan) -> ScriptedEngine:
    return ScriptedEngine({"*": coin})


@pytest.mark.parametrize(("samples", "continuations", "length"), [(5, 1, 6), (3, 2, 4), (2, 3, 3)])
def test_a_chain_costs_what_the_formula_says(
    compiled: Compile, samples: int, continuations: int, length: int
):
    plan = sampling(
        compiled(chain(length), {"table.py": REWARD}), samples=samples, continuations=continuations
    )
    engine = coins(plan)
    found = drawn(plan, engine.generate, 2)
    actions, suffixes = samples * length, samples * continuations * length * (length - 1) // 2
    own = length * (length - 1) // 2  # the base's turns are the suffixes of its own actions
    assert len(engine.requests) == 2 * (actions + suffixes - own)
    assert len({request.turn_id for request in engine.requests}) == len(engine.requests)
    assert found.counts == {
        "base_turns": 2 * length,
        "contexts": 2 * length,
        "sibling_turns": 2 * (samples - 1) * length,
        "suffix_turns": 2 * (suffixes - own),
        "reused_turns": 0,
    }
    behind = [sum(t.superstep > 1 + depth for t in way.trajectory.turns)
              for depth in range(length) for way in found.continuations
              if way.trajectory.turns[depth].id == way.action]  # fmt: skip
    assert sum(behind) == 2 * suffixes
    credited, _ = learnt(plan, found, 2)
    assert len(credited.entrants) == 2 * actions


def test_local_credit_plays_nothing_behind_an_action(compiled: Compile):
    plan = sampling(compiled(chain(6), {"table.py": REWARD}), samples=5, credit="local")
    engine = coins(plan)
    found = drawn(plan, engine.generate, 3)
    assert len(engine.requests) == 3 * 5 * 6
    credited, batch = learnt(plan, found, 3)
    assert len(credited.entrants) == 90 and credited.num_lost == 0
    assert all(e.total == float(e.turn.text) for e in credited.entrants)
    assert batch.stats["groups"] == 18


def test_all_forks_of_a_barrier_are_one_batch(compiled: Compile):
    plan = sampling(compiled(chain(4), {"table.py": REWARD}), samples=3)
    sizes: list[int] = []
    engine = coins(plan)

    def generate(requests: Sequence[Request]) -> list[Reply]:
        sizes.append(len(requests))
        return engine.generate(requests)

    drawn(plan, generate, 2)
    # Of a task: the base's turn, its 2 siblings, and 2 suffixes for each context before.
    assert sizes == [2 * (3 + 2 * before) for before in range(4)]


def worth_of(credited: Credited, *, siblings_only: bool = False) -> dict[str, list[float]]:
    """`prompt reply` → what actions that said so are worth."""
    worth: dict[str, list[float]] = defaultdict(list)
    for e in credited.entrants:
        if not (siblings_only and e.episode.endswith("/0")):
            worth[f"{e.turn.messages[-1].content} {e.turn.text}"].append(e.total)
    return worth


def near(worth: Mapping[str, list[float]], values: Mapping[str, float]) -> None:
    """Means are the values, within four standard errors."""
    for name, value in values.items():
        spread = float(np.std(worth[name])) / len(worth[name]) ** 0.5
        assert abs(float(np.mean(worth[name])) - value) <= 4 * spread + 1e-9, name


# credit: own: each action's own reward (what it said) and the episode's.
# first 0: 0 + .75·0 + .25·1 = .25; first 1: 1 + .25·3 + .75·.5 = 2.125
EXACT = {
    "speak first 0": 0.25,
    "speak first 1": 2.125,
    "after 0 0": 0.0,
    "after 0 1": 2.0,
    "after 1 0": 3.0,
    "after 1 1": 1.5,
}


@pytest.mark.parametrize("settings", [{"continuations": 1}, {"continuations": 2}, {"credit": "splice"}])
def test_rollout_and_splice_give_the_exact_action_values_and_gradient(
    compiled: Compile, settings: dict[str, Any]
):
    plan = sampling(compiled(TWO, {"table.py": REWARD}), samples=4, **settings)
    number = 200
    found = drawn(plan, coins(plan).generate, number)
    credited, batch = learnt(plan, found, number)
    near(worth_of(credited), EXACT)
    said = {e.turn.id: (e.turn.messages[-1].content, e.turn.text) for e in credited.entrants}
    gradient: dict[str, float] = defaultdict(float)
    for row in batch.rows["policy"]:
        prompt, text = said[row.turn_id]
        gradient[prompt] += row.advantage * row.token_weight * (float(text) - LIKELY[prompt])
    # dJ/dlogit = P(context) · p · (1 - p) · (Q(1) - Q(0)).
    slopes = {"speak first": 0.25 * 1.875, "after 0": 0.5 * 0.1875 * 2.0, "after 1": 0.5 * 0.1875 * -1.5}
    assert {prompt: pytest.approx(slope, abs=0.06) for prompt, slope in slopes.items()} == gradient


def test_splice_draws_only_behind_prompts_that_the_base_never_saw(compiled: Compile):
    plan = sampling(compiled(TWO, {"table.py": REWARD}), samples=4, credit="splice")
    found = drawn(plan, coins(plan).generate, 50)
    first = {base.key.slot: base.turns[0].text for base in found.bases}
    others = [
        way.trajectory
        for way in found.continuations
        if way.sibling and way.trajectory.turns[0].id == way.action
    ]
    differ = sum(one.turns[0].text != first[one.key.slot] for one in others)
    assert 0 < differ < 150
    assert (found.counts["suffix_turns"], found.counts["reused_turns"]) == (differ, 150 - differ)


TALK = """
    name: talk
    roles:
      a: {prompt: "speak first"}
      b: {prompt: "say so", next_prompt: "after {{ one.text }}", conversation: role}
    nodes: {one: {role: a}, two: {role: b}, three: {role: b}}
    edges: [start -> one -> two -> three -> end]
    rewards:
      - {name: own, use: "table.py:own", level: turn, args: {said: "{{ result.text }}"}}
"""


def test_a_conversation_goes_on_from_the_row_that_was_drawn(compiled: Compile):
    plan = sampling(compiled(TALK, {"table.py": REWARD}), samples=4, credit="splice")
    engine = coins(plan)
    found = drawn(plan, engine.generate, 20)
    assert found.counts["reused_turns"] > 60 and found.counts["suffix_turns"] > 10
    asked = {request.turn_id for request in engine.requests}
    spoken = {m.turn_id for request in engine.requests for m in request.messages if m.role == "assistant"}
    assert {request.parent for request in engine.requests} - {None} == spoken <= asked


def test_a_fixed_suffix_is_biased_by_what_the_base_would_have_answered(compiled: Compile):
    plan = sampling(compiled(TWO, {"table.py": REWARD}), samples=4, credit="fixed_suffix")
    found = drawn(plan, coins(plan).generate, 200)
    assert (found.counts["suffix_turns"], found.counts["reused_turns"]) == (0, 600)
    worth = worth_of(learnt(plan, found, 200)[0], siblings_only=True)
    # The base's second reply is 1 with .5·.25 + .5·.75 = .5, whatever the sibling said:
    # 0 + .5·0 + .5·1 = .5 instead of .25, and 1 + .5·3 + .5·.5 = 2.75 instead of 2.125.
    near(worth, {"speak first 0": 0.5, "speak first 1": 2.75})


def test_local_credit_misses_what_an_action_does_to_later_turns(compiled: Compile):
    plan = sampling(compiled(TWO, {"table.py": REWARD}), samples=4, credit="local")
    found = drawn(plan, coins(plan).generate, 50)
    credited, _ = learnt(plan, found, 50)
    worth = {e.turn.text: e.total for e in credited.entrants if e.turn.node == "one"}
    # Its own reward alone: 0 and 1. The exact values are 0.25 and 2.125, so the bias is -0.25 and -1.125.
    assert worth == {"0": 0.0, "1": 1.0}


SHAPES = """
    name: shapes
    task: {words: [str]}
    state: {heard: {type: [str], default: [], merge: append}}
    tools: {count: {use: "table.py:Count", scope: episode}}
    roles:
      caller: {prompt: "call {{ visit }} {{ range(9) | shuffle | join('') }}", conversation: role}
      reader: {prompt: "read {{ part }}"}
      voter: {prompt: "vote {{ me }}", copies: 2}
      user: {prompt: "use it", tools: [count], max_calls: 2}
    nodes:
      call: {role: caller}
      read: {role: reader, foreach: words, as: part, write: {heard: "{{ result.text }}"}}
      vote: {role: voter}
      use: {role: user}
      meet: {set: {}, join: any}
      ask: {workflow: inner.yaml, args: {word: "{{ call.text }}"}}
    edges:
      - start -> call -> read & vote & use -> meet
      - meet -> call when visits.call < 2
      - meet -> ask -> end
    rewards:
      - {name: own, use: "table.py:own", level: turn, otherwise: 0, args: {said: "{{ result.text or 0 }}"}}
"""
INNER = """
    name: inner
    task: {word: str}
    roles: {worker: {prompt: "work on {{ word }}"}}
    nodes: {work: {role: worker}, more: {role: worker}}
    edges: [start -> work -> more -> end]
    output: {text: "{{ more.text }}"}
"""
COUNT = """
class Count:
    def __init__(self):
        self.number = 0

    def __call__(self):
        self.number += 1
        return self.number
"""


def speaks(request: Request) -> str:
    """A coin, or a tool call where tools are offered; at random."""
    calls = request.tools and random.Random(request.seed).random() < 0.6
    return '<tool_call>{"name": "count", "arguments": {}}</tool_call>' if calls else coin(request)


@pytest.mark.parametrize("settings", [{}, {"continuations": 2}])
def test_forks_begun_with_their_base_equal_those_made_when_it_is_over(
    compiled: Compile, settings: dict[str, Any]
):
    files = {"table.py": REWARD + COUNT, "inner.yaml": INNER}
    plan, task = compiled(SHAPES, files), {"words": ["x", "y"]}
    found = []
    for most in (None, 99):
        engine = ScriptedEngine({"*": speaks})
        whole = sampling(plan, samples=3, max_nodes=most, **settings)
        found.append(drawn(whole, engine.generate, 3, task))
        ids = [request.turn_id for request in engine.requests]
        assert len(ids) == len(set(ids))  # a turn beside a fork is asked once for all that need it
    early, late = ({(w.action, w.trajectory.id): w.trajectory for w in one.continuations} for one in found)
    assert found[0].bases == found[1].bases
    assert early == late and len(early) > 100


def test_a_local_action_is_played_to_the_end_of_the_visit_that_pays_it(compiled: Compile):
    plan = compiled(SHAPES, {"table.py": REWARD + COUNT, "inner.yaml": INNER})
    plan = sampling(plan, samples=3, credit="local")
    engine = ScriptedEngine({"*": speaks})
    found = drawn(plan, engine.generate, 4, {"words": ["x", "y"]})
    known = {turn.id for base in found.bases for turn in base.turns}
    for way in found.continuations:
        [turn] = [t for t in way.trajectory.turns if t.id == way.action]
        assert {t.path[0][:3] for t in way.trajectory.turns if t.id not in known} <= {turn.path[0][:3]}
    credited, batch = learnt(plan, found, 4)
    assert credited.num_lost == 0 and batch.trainable_members.keys() == set(plan.policy_of)


def test_only_some_nodes_are_drawn_and_weigh_for_all(compiled: Compile):
    plan = sampling(compiled(chain(6), {"table.py": REWARD}), samples=3, max_nodes=2)
    found = drawn(plan, coins(plan).generate, 40)
    _, batch = learnt(plan, found, 40)
    contexts = [(way.trajectory.key.slot, way.action) for way in found.continuations if not way.sibling]
    assert len(contexts) == 80
    assert found.counts["sibling_turns"] == 160
    # E = 40 x 3 episodes; each of the 2 contexts stands for 3 of the 6 turns; one token a turn.
    assert {row.token_weight for row in batch.rows["policy"]} == {3 / 120}


@pytest.mark.parametrize("weight", ["token_mean", "episode_mean"])
@pytest.mark.parametrize("most", [2, None])
def test_means_over_tokens_stay_means_where_some_nodes_weigh_for_all(
    compiled: Compile, weight: str, most: int | None
):
    plan = sampling(compiled(chain(6), {"table.py": REWARD}), samples=3, max_nodes=most)
    algorithm = plan.algorithm.model_copy(update={"weight": weight, "entropy": 0.1})  # all rows stay
    _, batch = learnt(replace(plan, algorithm=algorithm), drawn(plan, coins(plan).generate, 40), 40)
    rows = batch.rows["policy"]  # one token each
    assert len(rows) == 40 * 3 * (most or 6)
    assert sum(row.token_weight for row in rows) == pytest.approx(1.0)


def test_a_sibling_without_a_reply_or_a_reward_leaves_its_baseline(compiled: Compile):
    plan = sampling(compiled(chain(2), {"table.py": REWARD}), samples=4)

    def breaks(request: Request) -> str | Reply:
        number = random.Random(request.seed).randrange(5)
        return Reply("", "", "error") if number == 0 else "words" if number == 1 else coin(request)

    found = drawn(plan, ScriptedEngine({"*": breaks}).generate, 30)
    credited, batch = learnt(plan, found, 30)
    assert credited.num_lost > 0
    assert len(credited.entrants) < len({way.action for way in found.continuations})
    assert {e.turn.text for e in credited.entrants} <= {"0", "1"}
    assert all(row.turn_id in {e.turn.id for e in credited.entrants} for row in batch.rows["policy"])


def test_a_queue_that_answers_in_any_order_gives_the_same(compiled: Compile):
    plan = compiled(SHAPES, {"table.py": REWARD + COUNT, "inner.yaml": INNER})
    plan, task = sampling(plan, samples=3, continuations=2), {"words": ["x", "y"]}

    class Late:
        """Answers a few of those that wait, in random order."""

        def __init__(self) -> None:
            self.open: list[Request] = []
            self.rng = random.Random(3)

        def submit(self, requests: Sequence[Request]) -> None:
            self.open += requests

        def collect(self) -> list[Reply]:
            self.rng.shuffle(self.open)
            taken, self.open = self.open[:5], self.open[5:]
            return ScriptedEngine({"*": speaks}).generate(taken)

        def clear(self) -> None:
            assert not self.open

    free, strict = (drawn(plan, how, 2, task) for how in (Late(), ScriptedEngine({"*": speaks}).generate))
    ways = [{(w.action, w.trajectory.id): w.trajectory for w in one.continuations} for one in (free, strict)]
    assert ways[0] == ways[1]


PROGRAM = """
    from masflow import gather, workflow


    @workflow(
        task={"words": ["str"]},
        roles={"lead": {"prompt": "lead {{ what }}", "conversation": "role"},
               "scout": {"prompt": "scout {{ what }}", "tools": ["count"], "max_calls": 2}},
        tools={"count": {"use": "table.py:Count", "scope": "episode"}},
        rewards=[{"name": "own", "use": "table.py:own", "level": "turn", "otherwise": 0,
                  "args": {"said": "{{ result.text or 0 }}"}}],
    )
    async def main(task, agents, ctx):
        first = await agents.lead(what="once")
        found = await gather(*[agents.scout(what=word, key=word) for word in task.words])
        while first.text == "1" and ctx.rng.random() < 0.5:
            first = await agents.lead(what=found[0].text)
        return (await agents.lead(what="at last")).text
"""


def test_a_function_is_branched_like_a_graph(planned: Callable[..., Plan]):
    files = {"table.py": REWARD + COUNT, "main.py": PROGRAM}
    plan, task = planned("main.py:main", files), {"words": ["x", "y"]}
    found = []
    for most in (None, 99):
        whole = sampling(plan, samples=3, continuations=2, max_nodes=most)
        found.append(drawn(whole, ScriptedEngine({"*": speaks}).generate, 4, task))
    early, late = ({(w.action, w.trajectory.id): w.trajectory for w in one.continuations} for one in found)
    assert early == late and len(early) > 60
    local = sampling(plan, samples=3, credit="local")
    engine = ScriptedEngine({"*": speaks})
    ways = drawn(local, engine.generate, 4, task)
    credited, _ = learnt(local, ways, 4)
    known = {turn.id for base in ways.bases for turn in base.turns}
    for way in ways.continuations:
        [turn] = [t for t in way.trajectory.turns if t.id == way.action]
        assert {t.path[0][:4] for t in way.trajectory.turns if t.id not in known} <= {turn.path[0][:4]}
    assert credited.num_lost == 0
