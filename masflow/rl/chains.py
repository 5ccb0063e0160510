"""What a critic is asked about: turns as links of chains, each with what it and what follows it brings.

A chain is one turn (`gae`), one role's turns in one episode (`turn_gae`), or all the team's turns in one
episode (a central critic). Knows no values: those are made where the tokens are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from masflow.compiler.plan import CriticIR, Plan
from masflow.rl.groups import Entrant, Group
from masflow.trace import Path, Scored, Trajectory, Turn

__all__ = ["Link", "critic_groups", "links_of", "superseded", "team_state"]


@dataclass(frozen=True)
class Link:
    """One turn, as its critic sees it. Made here, eaten by the critic's model group."""

    turn_id: str
    role: str
    """The member that spoke; its head, and among whom it is whitened."""
    reward: float
    """Its own, with all that comes before its successor."""
    successor: str | None = None
    """The turn that follows in the chain."""
    decay: float = 1.0
    """Discount between the two."""
    minibatch: int = 0
    text: str | None = field(default=None, repr=False)
    """What a central critic reads; None: the critic reads the turn's own tokens."""


def links_of(
    plan: Plan,
    critic: CriticIR,
    scored: Sequence[Scored],
    entrants: Sequence[Entrant],
    minibatch_of: Mapping[int, int],
) -> list[Link]:
    """The critic's turns, in the order of the entrants.

    What a turn is credited with is its return G, however credit was given; its reward is
    G_t - g^(s_next - s_t) G_next, so that nothing is counted twice, and with values of 0 and lambda 1 an
    advantage is the return. Under `return_to_go` (discount g a superstep) that is its own and whatever was
    paid to anybody after it, up to its successor; so what turns that don't train (masked, unscored, dropped)
    were paid accrues to the link before them: they are no links. Under `own` there is no discount (g = 1),
    and what a whole episode was paid comes with a chain's last turn. An attempt that was asked again is a
    chain of its own.
    """
    mine = [e for e in entrants if e.turn.member in critic.roles]
    whole = {one.trajectory.id: one.trajectory for one in scored}
    texts: dict[str, str] = {}
    if critic.central:
        texts = {e.turn.id: team_state(whole[e.episode], e.turn, critic.roles) for e in mine}
    discount = plan.graph.discount if plan.graph.credit == "return_to_go" else 1.0
    after: dict[str, Entrant] = {}
    if plan.algorithm.advantage != "gae":
        after = _successors(mine, {i for one in whole.values() for i in superseded(one)}, critic.central)
    return [_link(e, after.get(e.turn.id), discount, minibatch_of, texts) for e in mine]


def _link(
    entrant: Entrant,
    after: Entrant | None,
    discount: float,
    minibatch_of: Mapping[int, int],
    texts: Mapping[str, str],
) -> Link:
    turn, minibatch = entrant.turn, minibatch_of[entrant.slot]
    decay = discount ** (after.turn.superstep - turn.superstep) if after else 1.0
    reward = entrant.total - (decay * after.total if after else 0.0)
    successor = after.turn.id if after else None
    return Link(turn.id, turn.member, reward, successor, decay, minibatch, texts.get(turn.id))


def _successors(mine: Sequence[Entrant], alone: set[str], central: bool) -> dict[str, Entrant]:
    """Turn id → the first turn of its chain in a later superstep. Copies of one role that run at once are
    chains apart, told by the items of their paths; under a central critic they meet again in whoever speaks
    next."""
    chains: dict[tuple[object, ...], list[Entrant]] = {}
    for entrant in mine:
        if entrant.turn.id not in alone:
            own = () if central else (entrant.turn.member, _items(entrant.turn.path))
            chains.setdefault((entrant.episode, *own), []).append(entrant)
    found: dict[str, Entrant] = {}
    for chain in chains.values():
        ordered = sorted(chain, key=lambda e: e.turn.superstep)
        for place, entrant in enumerate(ordered):
            later = (e for e in ordered[place + 1 :] if e.turn.superstep > entrant.turn.superstep)
            if (first := next(later, None)) is not None:
                found[entrant.turn.id] = first
    return found


def _items(path: Path) -> tuple[object, ...]:
    return tuple((step.call, step.node, step.item) for step in path if step.item is not None)


def superseded(trajectory: Trajectory) -> set[str]:
    """Ids of attempts that were asked again: they are paid for themselves alone."""
    last: dict[Path, int] = {}
    for turn in trajectory.turns:
        key = (*turn.path[:-1], turn.step._replace(attempt=0))
        last[key] = max(last.get(key, 0), turn.step.attempt)
    return {
        turn.id
        for turn in trajectory.turns
        if turn.step.attempt < last[(*turn.path[:-1], turn.step._replace(attempt=0))]
    }


def team_state(trajectory: Trajectory, turn: Turn, roles: Sequence[str]) -> str:
    """What the team knows as a turn is asked: of every other role its last prompt and reply from earlier
    supersteps, then the acting role's prompt, which so stands last.

    Replies that are given at the same time, or later, are not in it: values may not know the action.
    """
    latest: dict[str, Turn] = {}
    for other in trajectory.turns:
        if other.superstep < turn.superstep and other.member != turn.member:
            latest[other.member] = other
    order = [*roles, *sorted(set(latest) - set(roles))]
    parts = [_told(latest[role], latest[role].text) for role in order if role in latest]
    return "\n".join([*parts, _told(turn)])


def _told(turn: Turn, reply: str | None = None) -> str:
    lines = [f"[{turn.member}]", *(message.content for message in turn.messages)]
    return "\n".join(lines if reply is None else [*lines, reply])


def critic_groups(
    critics: Sequence[CriticIR], entrants: Sequence[Entrant], advantages: Mapping[str, float]
) -> list[Group]:
    """One group a role: the turns that were whitened together. Of `gae` a turn's advantage is its tokens'
    mean."""
    found: list[Group] = []
    for role in (role for critic in critics for role in critic.roles):
        mine = [e for e in entrants if e.turn.member == role and e.turn.id in advantages]
        if mine:
            values = tuple(advantages[e.turn.id] for e in mine)
            turns, totals = tuple(e.turn.id for e in mine), tuple(e.total for e in mine)
            found.append(Group((-1, "", role, ()), turns, totals, values, any(values)))
    return found
