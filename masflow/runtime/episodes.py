"""Plays many episodes at once: all of them advance to a barrier, one batch of requests is answered, and
again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from masflow.errors import RunError
from masflow.models.engine import Reply, Request
from masflow.runtime.player import Player
from masflow.runtime.state import EpisodeState
from masflow.trace import Trajectory

Generate = Callable[[Sequence[Request]], list[Reply]]


def play(
    player: Player,
    states: Sequence[EpisodeState],
    generate: Generate,
    on_finish: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Play episodes to their ends.

    Requests of one barrier go to `generate` in the order (slot, sample, place in the workflow), so that
    batches form the same way in every run.

    Args:
        on_finish: told of each trajectory as its episode ends, by barrier, then in that order.
    Returns:
        Trajectories in the order of `states`. An episode that waits for a person is `paused`.
    """
    order = sorted(range(len(states)), key=lambda i: (states[i].key.slot, states[i].key.sample, i))
    finished: dict[int, Trajectory] = {}
    while order:
        batch: list[Request] = []
        owners: list[EpisodeState] = []
        running: list[int] = []
        for i in order:
            new = player.advance(states[i])
            if player.finished(states[i]):
                finished[i] = player.trajectory(states[i])
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
