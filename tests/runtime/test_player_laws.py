"""Laws of playing, over random workflows: loops, conditions, fan-outs, items, copies, sub-workflows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from masflow.compiler.graph import (
    END,
    Arrow,
    Graph,
    LimitsIR,
    Node,
    RewardIR,
    RoleIR,
    StateFieldIR,
    TaskFieldIR,
)
from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.models.engine import Reply, Request
from masflow.passes.node_sampling import NodeSampling
from masflow.runtime.episodes import play
from masflow.runtime.nodes import Drawn, NodeSampler
from masflow.runtime.player import Player
from masflow.runtime.state import EpisodeState
from masflow.spec.mapping import Optimizer
from masflow.spec.replies import Retry, TagReply
from masflow.spec.types import ANY, parse_type
from masflow.trace import EpisodeKey, Trajectory, path_json

LAWS = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MEMBERS = ("duo_0", "duo_1")
PROMPT = "{{ me or '' }} {{ visit }} {{ state.log | join(',') }} {{ range(9) | shuffle | join('') }}"
ROLES = (
    RoleIR("plain", PROMPT, reply=TagReply(tag="t", on_malformed="continue")),
    RoleIR("strict", PROMPT, reply=TagReply(tag="t")),
    RoleIR("stubborn", PROMPT, reply=TagReply(tag="t", on_malformed=Retry(retry=1), default={"t": "?"})),
    RoleIR("chatty", PROMPT, conversation="role", next_prompt="on {{ visit }}"),
    RoleIR("duo", PROMPT, conversation="node", members=MEMBERS),
)


@dataclass
class Builder:
    """Lowers a random program to a graph; every node's value goes through the rest of its block."""

    nodes: list[Node] = field(default_factory=list)

    def name(self, kind: str) -> str:
        self.nodes.append(Node(f"{kind}{len(self.nodes)}", "set"))
        return self.nodes[-1].name

    def put(self, name: str, **changes: Any) -> str:
        index = next(i for i, node in enumerate(self.nodes) if node.name == name)
        self.nodes[index] = replace(self.nodes[index], **changes)
        return name

    def block(self, program: list[Any], following: str) -> str:
        for statement in reversed(program):
            following = self.statement(statement, following)
        return following

    def statement(self, statement: Any, following: str) -> str:
        kind, *parts = statement
        to = (Arrow((following,)),)
        if kind == "say":
            role, items = parts
            name = self.name("say")
            changes: dict[str, Any] = {"kind": "role", "role": role, "arrows": to, "write": {"log": name}}
            if items is not None and role != "duo":
                changes |= {"foreach": str(list(range(items))), "as_name": "i", "write": {"log": "{{ i }}"}}
                changes["in_order"] = items == 3
            return self.put(name, **changes)
        if kind == "call":
            name = self.name("call")
            text = {"text": "{{ state.log | join }}"}
            return self.put(
                name, kind="call", call="textwrap:dedent", args=text, arrows=to, write={"log": "{{ result }}"}
            )
        if kind == "team":
            return self.put(
                self.name("team"), kind="workflow", workflow="team", arrows=to, args={"n": parts[0]}
            )
        if kind == "if":
            left, right = (self.block(part, following) for part in parts)
            name = self.name("if")
            when = "(state.log | length) % 2 == 0"
            return self.put(name, arrows=(Arrow((left,), when), Arrow((right,))), write={"log": name})
        if kind == "loop":
            body, times = parts
            name = self.name("loop")
            start = self.block(body, name)
            back = (Arrow((start,), f"visits.{name} < {times}"), *to)
            self.put(name, arrows=back, write={"log": name})
            return start
        branches, join = parts
        meet = self.put(self.name("join"), arrows=to, join=join, write={"log": "{{ visits.values() | sum }}"})
        starts = tuple(dict.fromkeys(self.block(branch, meet) for branch in branches))
        return self.put(self.name("fork"), arrows=(Arrow(starts, join=meet),))


def programs(leaves: int) -> st.SearchStrategy[list[Any]]:
    say = st.tuples(
        st.just("say"), st.sampled_from([r.name for r in ROLES]), st.sampled_from([None, None, 0, 2, 3])
    )
    leaf = st.one_of(say, say, st.just(("call",)), st.tuples(st.just("team"), st.integers(1, 3)))

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        block = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.tuples(st.just("if"), block, block),
            st.tuples(st.just("loop"), block, st.integers(1, 3)),
            st.tuples(
                st.just("fan"),
                st.lists(block, min_size=2, max_size=3),
                st.sampled_from(["all", "all", "any", 2]),
            ),
        )

    return st.lists(st.recursive(leaf, grow, max_leaves=leaves), min_size=1, max_size=4)


def graph_of(program: list[Any], name: str, limits: LimitsIR) -> Graph:
    builder = Builder()
    start = builder.block(program, END)
    log = StateFieldIR("log", parse_type(["any"]), [], merge="append")
    spoken = tuple(node.name for node in builder.nodes if node.kind == "role")
    measure = RewardIR("seen", None, level="turn", measure_after=spoken, measure_args={"x": "{{ result }}"})
    return Graph(
        name,
        task=(TaskFieldIR("n", ANY),),
        params={"me": None},
        state=(log,),
        roles=ROLES,
        nodes=tuple(builder.nodes),
        start=(Arrow((start,)),),
        output={"log": "{{ state.log }}", "order": "{{ range(9) | shuffle }}"},
        rewards=(measure,),
        limits=limits,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    limits = draw(st.sampled_from([LimitsIR(), LimitsIR(turns=7), LimitsIR(tokens=40)]))
    team = graph_of(draw(programs(2).filter(lambda p: "team" not in repr(p))), "team", LimitsIR(turns=9))
    main = graph_of(draw(programs(8)), "main", limits)
    members = {
        f"{call}{m}": "p" for call in ("", *team_calls(main)) for r in ROLES for m in r.members or (r.name,)
    }
    return Plan("main", {"main": main, "team": team}, policy_of=members)


def team_calls(graph: Graph) -> list[str]:
    return [f"{node.name}/" for node in graph.nodes if node.kind == "workflow"]


def key(sample: int = 0) -> EpisodeKey:
    return EpisodeKey(1, "train", 0, 0, "t", sample)


def speak(path: str, salt: str = "") -> Reply:
    """A reply that hangs on the turn's path alone; one in five is malformed."""
    number = int.from_bytes(hashlib.sha256(f"{salt}{path}".encode()).digest()[:4], "big")
    text = f"<t>{number % 97}</t>" if number % 5 else "nothing"
    finish = "error" if number % 101 == 0 else "length" if number % 19 == 0 else "stop"
    return Reply("", text, finish, prompt_tokens=3, reply_tokens=number % 4)


def answer(player: Player, state: EpisodeState, request: Request, salt: str = "") -> None:
    player.deliver(state, replace(speak(state.pending[request.turn_id], salt), turn_id=request.turn_id))


def run(player: Player, state: EpisodeState, salt: str = "") -> list[str]:
    """Play to the end; the paths that were asked for."""
    asked = []
    while requests := player.advance(state):
        for request in requests:
            asked.append(state.pending[request.turn_id])
            answer(player, state, request, salt)
    assert player.finished(state)
    return asked


def everything(one: Trajectory) -> tuple[Any, ...]:
    return one, one.names, one.moments, one.predecessors


@LAWS
@given(plans(), st.randoms(use_true_random=False))
def test_replies_may_arrive_in_any_order(plan: Plan, rng: random.Random):
    player = Player(plan)
    state, other = player.start({"n": 1}, key()), player.start({"n": 1}, key())
    run(player, state)
    waiting = player.advance(other)
    while waiting:
        answer(player, other, waiting.pop(rng.randrange(len(waiting))))
        if rng.random() < 0.7:
            waiting += player.advance(other)
        elif not waiting:
            waiting = player.advance(other)
    assert state == other
    assert everything(player.trajectory(state)) == everything(player.trajectory(other))


@LAWS
@given(plans(), st.data())
def test_fork_and_replay_equals_the_original_and_asks_only_for_what_came_after(
    plan: Plan, data: st.DataObject
):
    player = Player(plan)
    state = player.start({"n": 1}, key())
    run(player, state)
    original = player.trajectory(state)
    if not original.turns:
        return
    turn = data.draw(st.sampled_from(original.turns))
    again = player.fork(state, turn.id, ())
    asked = run(player, again)
    assert everything(player.trajectory(again)) == everything(original)
    assert again.replies == state.replies
    after = {turn.id}
    for other in original.turns:
        if after.intersection(original.predecessors[other.id]):
            after.add(other.id)
    paths = {path_json(other.path): other.id for other in original.turns}
    assert asked[0] == path_json(turn.path)
    assert after <= {paths[path] for path in asked if path in paths}
    if not any(other.outcome == "cancelled" for other in original.turns):
        assert {paths[path] for path in asked if path in paths} == after


@LAWS
@given(plans(), st.data())
def test_a_fork_keeps_ids_before_it_and_draws_new_seeds_after_it(plan: Plan, data: st.DataObject):
    player = Player(plan)
    state = player.start({"n": 1}, key())
    run(player, state)
    original = player.trajectory(state)
    if not original.turns:
        return
    turn = data.draw(st.sampled_from(original.turns))
    fork = player.fork(state, turn.id, ((("", turn.node, 1),), 2, 0))
    [first, *_] = [r for r in player.advance(fork) if fork.pending[r.turn_id] == path_json(turn.path)]
    assert first.messages == turn.messages
    assert first.turn_id != turn.id
    answer(player, fork, first, "another")
    run(player, fork, "another")
    one = player.trajectory(fork)
    mine, theirs = {t.id for t in one.turns}, {t.id for t in original.turns}
    if not any(
        t.outcome == "cancelled" for t in one.turns
    ):  # a choice of branches hangs on cancelled turns too
        new = [t for t in one.turns if t.id not in theirs | {first.turn_id}]
        assert all(set(one.predecessors[t.id]) & (mine - theirs) for t in new)
    if first.turn_id not in mine:  # the engine failed, so that there is no turn to fork at
        return
    twice = player.fork(fork, first.turn_id, ((("", turn.node, 1),), 3, 0))
    assert EpisodeState.from_json(twice.to_json()) == twice
    run(player, twice, "third")
    assert player.finished(EpisodeState.from_json(twice.to_json()))


@LAWS
@given(plans(), st.integers(0, 12))
def test_saving_and_loading_anywhere_changes_nothing(plan: Plan, after: int):
    player, other = Player(plan), Player(plan)
    state, straight = player.start({"n": 1}, key()), player.start({"n": 1}, key())
    run(player, straight)
    for _ in range(after):
        requests = player.advance(state)
        if not requests:
            break
        for request in requests[:1] if after % 2 else requests:
            answer(player, state, request)
        loaded = EpisodeState.from_json(state.to_json())
        assert loaded == state
        state = loaded
    run(other, state)
    assert state == straight
    assert everything(other.trajectory(state)) == everything(player.trajectory(straight))


@LAWS
@given(plans(), st.integers(0, 8))
def test_a_copy_and_its_original_do_not_touch_each_other(plan: Plan, after: int):
    player = Player(plan)
    state, straight = player.start({"n": 1}, key()), player.start({"n": 1}, key())
    run(player, straight)
    for _ in range(after):
        for request in player.advance(state):
            answer(player, state, request)
    out = player.advance(state)
    copy = state.copy()
    assert copy == state
    for request in out:
        answer(player, state, request, "other words")
    run(player, state, "other words")
    for request in out:
        answer(player, copy, request)
    run(player, copy)
    assert everything(player.trajectory(copy)) == everything(player.trajectory(straight))


@LAWS
@given(plans())
def test_time_follows_happened_before(plan: Plan):
    player = Player(plan)
    state = player.start({"n": 1}, key())
    run(player, state)
    one = player.trajectory(state)
    turns = {turn.id: turn for turn in one.turns}
    assert len(turns) == len(one.turns) == len({turn.path for turn in one.turns})
    for turn in one.turns:
        before = [turns[id_] for id_ in one.predecessors[turn.id]]
        assert turn.superstep == 1 + max((b.superstep for b in before), default=0)
        if turn.outcome != "cancelled":
            assert all(b.outcome != "cancelled" for b in before)
    assert [t.superstep for t in one.turns] == sorted(t.superstep for t in one.turns)
    limit = plan.graph.limits.turns
    assert (
        limit == 64
        or len([t for t in one.turns if len(t.path) == 1 and t.outcome != "cancelled"]) <= 3 * limit
    )


def speak_all(requests: Sequence[Request]) -> list[Reply]:
    return [replace(speak(f"{r.node} {r.item} {r.visit}"), turn_id=r.turn_id) for r in requests]


@LAWS
@given(plans())
def test_many_episodes_at_barriers_are_the_episodes_one_by_one(plan: Plan):
    player = Player(plan)
    states = [player.start({"n": i}, key(i)) for i in range(3)]
    told: list[Trajectory] = []
    together = play(player, states, speak_all, told.append)
    for i, one in enumerate(together):
        [alone] = play(player, [player.start({"n": i}, key(i))], speak_all)
        assert everything(alone) == everything(one)
    assert sorted(t.key.sample for t in told) == [0, 1, 2]


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.sampled_from([1, 2]))
def test_forks_begun_with_their_base_equal_those_made_when_it_is_over(plan: Plan, continuations: int):
    policy = PolicyIR("p", "p", None, tuple(plan.policy_of), True, Optimizer())
    plan = replace(plan, models=(ModelIR("p", None, "", "full", (policy,)),))
    found: list[Drawn] = []
    for most in (None, 999):
        sampling = NodeSampling(samples=3, continuations=continuations, max_nodes=most).apply(plan)
        asked: list[str] = []

        def generate(requests: Sequence[Request], asked: list[str] = asked) -> list[Reply]:
            asked += [request.turn_id for request in requests]
            return [replace(speak(str(request.seed)), turn_id=request.turn_id) for request in requests]

        player = Player(sampling)
        found.append(NodeSampler(sampling, player, generate).sample([player.start({"n": 1}, key())]))
        assert len(asked) == len(set(asked))
    assert found[0].bases == found[1].bases
    early, late = ({(w.action, w.trajectory.id): w.trajectory for w in one.continuations} for one in found)
    # Of a turn that the engine failed at nothing is known afterwards.
    turns = {path_json(turn.path) for turn in found[0].bases[0].turns}
    known = {k: t for k, t in early.items() if not t.key.fork or t.key.fork[0] in turns}
    assert known == late
