"""Plays many episodes at once: all of them advance to a barrier, one batch of requests is answered, and
again; or, where a run need not repeat, each goes on as soon as a reply is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from masflow.errors import RunError
from masflow.models.engine import Reply, Request, RolloutEngine
from masflow.runtime.player import Player
from masflow.runtime.state import EpisodeState
from masflow.trace import Trajectory

Generate = Callable[[Sequence[Request]], list[Reply]]


class Queue(Protocol):
    """Answers requests as they come (`runtime.stream.Stream`)."""

    def submit(self, requests: Sequence[Request]) -> None: ...
    def collect(self) -> list[Reply]: ...
    def clear(self) -> None: ...


def answers_of(engine: RolloutEngine) -> Generate | Queue:
    """How an engine is asked: as requests come where it has a queue (`stream`), else in batches."""
    return getattr(engine, "stream", None) or engine.generate


def play(
    player: Player,
    states: Sequence[EpisodeState],
    generate: Generate | Queue,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Play episodes to their ends.

    Requests of one barrier go to `generate` in the order (slot, sample, place in the workflow), so that
    batches form the same way in every run.

    Args:
        generate: answers a batch; or a queue, which answers as it can: then there are no barriers.
        on_finish: told of each trajectory as its episode ends, by barrier, then in that order.
    Returns:
        Trajectories in the order of `states`. An episode that waits for a person is `paused`.
    """
    order = sorted(range(len(states)), key=lambda i: (states[i].key.slot, states[i].key.sample, i))
    if not callable(generate):
        return _play_freely(player, states, order, generate, on_finish)
    finished: dict[int, Trajectory] = {}
    while order:
        batch: list[Request] = []
        owners: list[EpisodeState] = []
        running: list[int] = []
        asked = _advance(player, states, order)
        for i in order:
            new = asked[i]
            if player.finished(states[i]):
                finished[i] = _ended(player, states[i])
                if on_finish is not None:
                    on_finish(finished[i])
                continue
            batch += new
            owners += [states[i]] * len(new)
            running.append(i)
        if running and not batch:
            raise RunError(
                "episodes wait for replies that nobody was asked for",
                "play states that have no open requests",
            )
        for state, reply in zip(owners, generate(batch) if batch else [], strict=True):
            player.deliver(state, reply)
        order = running
    return [finished[i] for i in range(len(states))]


def _advance(
    player: Player, states: Sequence[EpisodeState], going: Sequence[int]
) -> dict[int, list[Request]]:
    """What each of these episodes asks for next; the tools of all of them run beside each other."""
    asked = {i: player.advance(states[i], wait=False) for i in going}
    waiting = list(going)
    while waiting := [i for i in waiting if player.waits(states[i])]:
        for i in waiting:
            player.wait(states[i])
            asked[i] += player.advance(states[i], wait=False)
    return asked


def _ended(player: Player, state: EpisodeState) -> Trajectory:
    """What an episode left behind."""
    trajectory = player.trajectory(state)
    if trajectory.outcome != "paused":
        player.let_go(state)
    return trajectory


def _play_freely(
    player: Player,
    states: Sequence[EpisodeState],
    order: Sequence[int],
    queue: Queue,
    on_finish: Callable[[Trajectory], None] | None,
) -> list[Trajectory]:
    """As `play`; an episode goes on with every reply that it gets."""
    finished: dict[int, Trajectory] = {}
    owners: dict[str, int] = {}
    going: Sequence[int] = order
    try:
        while len(finished) < len(states):
            waiting: list[int] = []
            while going:
                asked: list[Request] = []
                for i in going:
                    if i in waiting:
                        player.wait(states[i])
                    new = player.advance(states[i], wait=False)
                    asked += new
                    owners.update((request.turn_id, i) for request in new)
                    if player.finished(states[i]):
                        finished[i] = _ended(player, states[i])
                        if on_finish is not None:
                            on_finish(finished[i])
                queue.submit(asked)  # answered while tools run
                waiting = [i for i in going if i not in finished and player.waits(states[i])]
                going = waiting
            heard = {reply.turn_id: reply for reply in queue.collect()}
            if not heard and len(finished) < len(states):
                raise RunError(
                    "episodes wait for replies that nobody was asked for",
                    "play states that have no open requests",
                )
            open_ = [(owners.pop(turn_id), reply) for turn_id, reply in heard.items()]
            open_ = [(i, reply) for i, reply in open_ if i not in finished]
            for i, reply in open_:
                player.deliver(states[i], reply)
            going = list(dict.fromkeys(i for i, _ in open_))
    finally:
        queue.clear()
    return [finished[i] for i in range(len(states))]
