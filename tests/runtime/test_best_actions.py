"""Episodes that go on with the best of the actions drawn at each turn (AT-GRPO): which is taken, what is
asked behind it, what is compared and trained on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import pytest

from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.errors import SpecError
from masflow.models.engine import Reply, Request
from masflow.models.scripted import ScriptedEngine
from masflow.passes.node_sampling import NodeSampling
from masflow.rl.batch import build_batch
from masflow.rl.nodes import Continuation, credit_actions, value_actions
from masflow.rl.score import score
from masflow.runtime.nodes import Drawn, NodeSampler
from masflow.runtime.player import Player
from masflow.spec.experiment import Algorithm
from masflow.spec.mapping import Optimizer
from masflow.trace import EpisodeKey, Scored
from tests.runtime import test_nodes as shapes

Compile = Callable[..., Plan]
REWARD = """
def own(said):
    return float(said.split()[-1])
"""
OWN = '{name: own, use: "table.py:own", level: turn, args: {said: "{{ result.text }}"}, otherwise: 0}'
CHAIN = f"""
    name: chain
    roles: {{a: {{prompt: "speak first"}}, b: {{prompt: "after {{{{ one.text }}}}"}}}}
    nodes: {{one: {{role: a}}, two: {{role: b}}}}
    edges: [start -> one -> two -> end]
    rewards: [{OWN}]
"""
PAIR = f"""
    name: pair
    roles:
      a: {{prompt: "on the left"}}
      b: {{prompt: "on the right"}}
      c: {{prompt: "{{{{ one.text }}}} {{{{ two.text }}}}"}}
    nodes: {{one: {{role: a}}, two: {{role: b}}, three: {{role: c}}}}
    edges: [start -> one & two -> three -> end]
    rewards: [{OWN}]
"""
TALK = f"""
    name: talk
    roles: {{a: {{prompt: "go on", next_prompt: "and now", conversation: role}}}}
    nodes: {{one: {{role: a}}, two: {{role: a}}}}
    edges: [start -> one -> two -> end]
    rewards: [{OWN}]
"""
LISTED = f"""
    name: listed
    task: {{words: [str]}}
    roles:
      a: {{prompt: "say {{{{ w }}}}"}}
      b: {{prompt: "{{{{ each.text | join(' ') }}}}"}}
    nodes: {{each: {{role: a, foreach: words, as: w}}, end_: {{role: b}}}}
    edges: [start -> each -> end_ -> end]
    rewards: [{OWN}]
"""
TRIES = """
    name: tries
    roles:
      a: {prompt: "say it", reply: {regex: "good (?P<n>[0-9]+)", on_malformed: {retry: 1}}}
    nodes: {one: {role: a}, two: {role: a}}
    edges: [start -> one -> two -> end]
    rewards:
      - {name: own, use: "table.py:own", level: turn, args: {said: "x {{ result.n }}"}, otherwise: 0}
"""


def best_of(plan: Plan, samples: int = 4, trained: Sequence[str] | None = None) -> Plan:
    roles = tuple(trained or plan.policy_of)
    others = tuple(set(plan.policy_of) - set(roles))
    policies = (
        PolicyIR("policy", "policy", None, roles, True, Optimizer()),
        *((PolicyIR("fixed", "fixed", None, others, False, Optimizer()),) if others else ()),
    )
    models = tuple(ModelIR(p.name, None, "", "full" if p.train else "frozen", (p,)) for p in policies)
    policy_of = {role: p.name for p in policies for role in p.roles}
    changed = replace(plan, models=models, policy_of=policy_of, algorithm=Algorithm(use="at_grpo"))
    return NodeSampling(samples=samples, credit="local", advance="best").apply(changed)


def numbers(request: Request) -> str:
    """Some number from 0 to 9, by the request's seed."""
    return str(random.Random(request.seed).randrange(10))


def drawn(plan: Plan, engine: Any, tasks: int = 1, task: Mapping[str, Any] | None = None) -> Drawn:
    player = Player(plan)
    states = [player.start(dict(task or {}), EpisodeKey(1, "train", 1, n, f"t{n}", 0)) for n in range(tasks)]
    return NodeSampler(plan, player, engine.generate, partial(value_actions, plan)).sample(states)


def contexts(found: Drawn) -> dict[tuple[int, str], list[Continuation]]:
    """(task, prompt) → the actions drawn there."""
    by_prompt: dict[tuple[int, str], list[Continuation]] = {}
    for way in found.continuations:
        turn = next(t for t in way.trajectory.turns if t.id == way.action)
        by_prompt.setdefault((way.trajectory.key.slot, turn.messages[-1].content), []).append(way)
    return by_prompt


def said(way: Continuation) -> str:
    return next(t.text for t in way.trajectory.turns if t.id == way.action)


@pytest.mark.parametrize("seed", range(3))
def test_an_episode_goes_on_with_the_best_action_and_the_next_one_is_asked_behind_it(
    compiled: Compile, seed: int
):
    plan = best_of(compiled(CHAIN, {"table.py": REWARD}))
    engine = ScriptedEngine({"*": lambda r: str(random.Random(r.seed + seed).randrange(10))})
    found = drawn(plan, engine, 3)
    assert len(engine.requests) == 3 * 2 * 4 and found.counts["contexts"] == 6
    there = contexts(found)
    for slot, base in enumerate(found.bases):
        first, second = base.turns
        firsts = [int(said(way)) for way in there[slot, "speak first"]]
        assert len(firsts) == 4 and int(first.text) == max(firsts)
        seconds = [int(said(way)) for way in there[slot, f"after {first.text}"]]
        assert len(seconds) == 4 and int(second.text) == max(seconds)
        # The turns of the episode are the very actions that were drawn, rows and all.
        assert {first.id, second.id} < {way.action for way in found.continuations}
        assert base.id == EpisodeKey(1, "train", 1, slot, f"t{slot}", 0).episode_id
        assert base.outcome == "ok" and not base.key.fork


def test_at_ties_the_episodes_own_action_stands(compiled: Compile):
    plan = best_of(compiled(CHAIN, {"table.py": REWARD}))
    found = drawn(plan, ScriptedEngine({"*": "5"}))
    own = [way.action for way in found.continuations if way.sibling == 0]
    assert [turn.id for turn in found.bases[0].turns] == own


def test_groups_are_the_candidates_of_one_agent_at_one_turn(compiled: Compile):
    plan = best_of(compiled(CHAIN, {"table.py": REWARD}), samples=5)
    found = drawn(plan, ScriptedEngine({"*": numbers}), 4)
    bases = score(plan, found.bases)
    credited = credit_actions(plan, bases, found.continuations, True)
    batch = build_batch(plan, bases, 4 * 5, 1, credited.entrants)
    assert [len(g.turns) for g in batch.groups] == [5] * 8 and credited.num_lost == 0
    texts = {e.turn.id: e.turn.text for e in credited.entrants}
    for group in batch.groups:
        paid = [float(texts[turn]) for turn in group.turns]
        assert list(group.rewards) == paid
        wanted = [(x - fmean(paid)) / (stdev(paid) + 1e-6) if stdev(paid) else 0.0 for x in paid]
        assert group.advantages == pytest.approx(wanted, abs=1e-12)
    assert {row.token_weight * texts_len for row in batch.rows["policy"] for texts_len in (20,)} == {1.0}


def test_rewards_of_candidates_are_asked_for_once(compiled: Compile):
    plan = best_of(compiled(CHAIN, {"table.py": REWARD}))
    batches: list[int] = []

    def value(ways: Sequence[Continuation]) -> list[Scored]:
        batches.append(len(ways))
        return value_actions(plan, ways)

    player = Player(plan)
    states = [player.start({}, EpisodeKey(1, "train", 1, n, f"t{n}", 0)) for n in range(3)]
    found = NodeSampler(plan, player, ScriptedEngine({"*": numbers}).generate, value).sample(states)
    assert batches == [12, 12]  # all tasks together, a turn at a time
    assert all(way.scored is not None for way in found.continuations)


def test_agents_that_speak_at_once_each_go_on_with_their_best(compiled: Compile):
    plan = best_of(compiled(PAIR, {"table.py": REWARD}))
    found = drawn(plan, ScriptedEngine({"*": numbers}), 5)
    there = contexts(found)
    for slot, base in enumerate(found.bases):
        texts = {turn.node: turn.text for turn in base.turns}
        for node, prompt in (("one", "on the left"), ("two", "on the right")):
            assert int(texts[node]) == max(int(said(way)) for way in there[slot, prompt])
        assert len(there[slot, f"{texts['one']} {texts['two']}"]) == 4


def test_a_conversation_continues_the_best_reply(compiled: Compile):
    plan = best_of(compiled(TALK, {"table.py": REWARD}))
    engine = ScriptedEngine({"*": numbers})
    found = drawn(plan, engine, 6)
    changed = 0
    for base in found.bases:
        first, second = base.turns
        own = next(
            w for w in found.continuations if w.sibling == 0 and w.trajectory.key.slot == base.key.slot
        )
        changed += first.id != own.action
        assert second.parent == first.id
        assert [m.content for m in second.messages][-2:] == [first.text, "and now"]
        assert [m.turn_id for m in second.messages if m.role == "assistant"] == [first.id]
    assert changed


def test_items_of_a_list_each_go_on_with_their_best(compiled: Compile):
    plan = best_of(compiled(LISTED, {"table.py": REWARD}), samples=3)
    found = drawn(plan, ScriptedEngine({"*": numbers}), 3, {"words": ["x", "y"]})
    there = contexts(found)
    for slot, base in enumerate(found.bases):
        *each, last = base.turns
        assert last.messages[-1].content == " ".join(turn.text for turn in each)
        for turn, word in zip(each, "xy", strict=True):
            assert int(turn.text) == max(int(said(way)) for way in there[slot, f"say {word}"])


def test_what_follows_within_the_visit_is_drawn_anew_behind_the_chosen_action(compiled: Compile):
    """A fork's retry has had a part in its being chosen: the episode draws another."""
    plan = best_of(compiled(TRIES, {"table.py": REWARD}), samples=3)
    replies = {}

    def reply(request: Request) -> str:
        rng = random.Random(request.seed)
        text = f"good {rng.randrange(10)}" if rng.random() < 0.5 else "bad"
        assert request.turn_id not in replies
        replies[request.turn_id] = text
        return text

    found = drawn(plan, ScriptedEngine({"*": reply}), 8)
    tried = [base for base in found.bases if any(t.step.attempt for t in base.turns)]
    assert tried
    actions = {way.action for way in found.continuations}
    for base in found.bases:
        assert {turn.id for turn in base.turns} <= actions
        assert all(replies[turn.id] == turn.text for turn in base.turns)


def test_frozen_roles_are_asked_once_and_an_error_is_never_the_best(compiled: Compile):
    plan = best_of(compiled(CHAIN, {"table.py": REWARD}), trained=["a"])
    engine = ScriptedEngine({"*": numbers})
    broken: list[str] = []

    class Breaks:
        def generate(self, requests: Sequence[Request]) -> list[Reply]:
            replies = engine.generate(requests)
            if not broken:
                broken.extend(r.turn_id for r in replies[1:3])
                return [replace(r, text="", finish="error") if r.turn_id in broken else r for r in replies]
            return replies

    found = drawn(plan, Breaks())
    assert len(engine.requests) == 4 + 1
    (base,) = found.bases
    alive = [way for way in found.continuations if way.action not in broken]
    assert int(base.turns[0].text) == max(int(said(way)) for way in alive)
    credited = credit_actions(plan, score(plan, found.bases), found.continuations, True)
    assert credited.num_lost == 2 and len(credited.entrants) == 2


def test_the_trace_holds_every_turn_once(compiled: Compile):
    plan = best_of(compiled(CHAIN, {"table.py": REWARD}))
    engine = ScriptedEngine({"*": numbers})
    found = drawn(plan, engine, 3)
    bases = score(plan, found.bases)
    credited = credit_actions(plan, bases, found.continuations, True)
    ids = [turn.id for one in (*bases, *credited.forks) for turn in one.trajectory.turns]
    assert sorted(ids) == sorted({request.turn_id for request in engine.requests})


def test_two_runs_draw_the_same_whatever_the_order_of_replies(compiled: Compile):
    plan = best_of(compiled(PAIR, {"table.py": REWARD}))

    class Shuffled:
        def __init__(self, seed: int) -> None:
            self.engine, self.random, self.left = ScriptedEngine({"*": numbers}), random.Random(seed), []

        def submit(self, requests: Sequence[Request]) -> None:
            self.left += requests

        def collect(self) -> list[Reply]:
            if not self.left:
                return []
            return self.engine.generate([self.left.pop(self.random.randrange(len(self.left)))])

        def clear(self) -> None:
            self.left.clear()

    def play(engine: Any) -> Drawn:
        player = Player(plan)
        states = [player.start({}, EpisodeKey(1, "train", 1, n, f"t{n}", 0)) for n in range(3)]
        return NodeSampler(plan, player, engine, partial(value_actions, plan)).sample(states)

    together = play(ScriptedEngine({"*": numbers}).generate)
    for seed in (1, 2):
        apart = play(Shuffled(seed))
        assert apart.bases == together.bases
        assert [w.action for w in apart.continuations] == [w.action for w in together.continuations]


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"credit": "rollout"}, "write credit: local"),
        ({"credit": "local", "max_nodes": 1}, "remove max_nodes"),
    ],
)
def test_the_best_has_to_be_known_before_the_episode_goes_on(
    compiled: Compile, settings: dict[str, Any], fix: str
):
    plan = compiled(CHAIN, {"table.py": REWARD})
    with pytest.raises(SpecError) as caught:
        NodeSampling(samples=3, advance="best", **settings).apply(plan)
    (problem,) = caught.value.problems
    assert problem.code == "wrong-pair" and problem.fix.startswith(fix)


@pytest.mark.parametrize("kind", ["graph", "function"])
def test_of_any_shape_every_turn_of_the_episode_is_the_best_of_its_context(
    planned: Callable[..., Plan], kind: str
):
    """Loops, lists, copies, tools with a state, conversations, calls of workflows; a function with chance."""
    files = {"table.py": shapes.REWARD + shapes.COUNT, "inner.yaml": shapes.INNER,
             "main.yaml": shapes.SHAPES, "main.py": shapes.PROGRAM}  # fmt: skip
    plan = best_of(planned("main.yaml" if kind == "graph" else "main.py:main", files), samples=3)
    engine = ScriptedEngine({"*": shapes.speaks})
    found = drawn(plan, engine, 6, {"words": ["x", "y"]})
    assert len({request.turn_id for request in engine.requests}) == len(engine.requests)
    credited = credit_actions(plan, score(plan, found.bases), found.continuations, True)
    actions = {way.action for way in found.continuations}
    groups: dict[Any, list[Any]] = {}
    for entrant in credited.entrants:
        groups.setdefault(entrant.key, []).append(entrant)
    assert max(map(len, groups.values())) == 3
    compared = 0
    for base in found.bases:
        assert {turn.id for turn in base.turns} <= actions and base.outcome == "ok"
        for turn in base.turns:
            key = (base.key.slot, base.key.task_id, turn.member, turn.path)
            totals = {e.turn.id: e.total for e in groups.get(key, ())}
            compared += len(set(totals.values())) > 1
            assert turn.id not in totals or totals[turn.id] == max(totals.values())
    assert compared > 20
