"""Many episodes at barriers: the order of requests, of endings, and what must not happen."""

from collections.abc import Callable, Sequence

import pytest

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.engine import Reply, Request
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

Compile = Callable[..., Plan]
WORKFLOW = """
    name: rounds
    task: {rounds: int}
    roles: {a: {prompt: "say {{ rounds }}"}, b: {prompt: "say b"}}
    nodes: {say: {role: a}, side: {role: b}, meet: {set: {n: "{{ visits.meet }}"}}}
    state: {n: {type: int, default: 0}}
    edges:
      - start -> say & side
      - say -> meet
      - side -> meet
      - meet -> more when visits.more < rounds
      - meet -> end
      - more -> meet
    limits: {visits: 9}
""".replace("meet: {set", "more: {role: a}, meet: {set")


def key(slot: int, sample: int) -> EpisodeKey:
    return EpisodeKey(0, "train", 1, slot, f"task{slot}", sample)


def test_requests_come_in_one_fixed_order_and_episodes_end_by_barrier(compiled: Compile):
    batches: list[list[tuple[str, str]]] = []
    ended: list[tuple[int, int]] = []

    def generate(requests: Sequence[Request]) -> list[Reply]:
        batches.append([(r.turn_id, r.node) for r in requests])
        return [Reply(r.turn_id, "x") for r in requests]

    player = Player(compiled(WORKFLOW))
    keys = [(1, 0, 0), (0, 1, 2), (0, 0, 1)]
    states = [player.start({"rounds": rounds}, key(slot, sample)) for slot, sample, rounds in keys]
    found = play(player, states, generate, lambda t: ended.append((t.key.slot, t.key.sample)))
    assert [(t.key.slot, t.key.sample) for t in found] == [(1, 0), (0, 1), (0, 0)]  # as given
    assert [[node for _, node in batch] for batch in batches] == [
        ["say", "side"] * 3,
        ["more", "more"],
        ["more"],
    ]
    first = {turn.id: t.key for t in found for turn in t.turns}
    assert [(first[id_].slot, first[id_].sample) for id_, _ in batches[0]] == [
        (0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0),
    ]  # fmt: skip
    assert ended == [(1, 0), (0, 0), (0, 1)]


def test_nothing_to_play_gives_nothing(compiled: Compile):
    player = Player(compiled(WORKFLOW))
    assert play(player, [], lambda requests: []) == []


def test_a_state_whose_requests_are_out_elsewhere_is_refused(compiled: Compile):
    player = Player(compiled(WORKFLOW))
    state = player.start({"rounds": 0}, key(0, 0))
    assert len(player.advance(state)) == 2
    with pytest.raises(RunError, match="nobody was asked"):
        play(player, [state], lambda requests: [])


def test_an_engine_that_gives_too_few_replies_is_noticed(compiled: Compile):
    player = Player(compiled(WORKFLOW))
    with pytest.raises(ValueError, match="shorter"):
        play(player, [player.start({"rounds": 0}, key(0, 0))], lambda requests: [])
