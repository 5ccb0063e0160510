"""How a store changes after a step: a pure function of the store, the step's turns and the step's number.

The outline is that of JoyAgents-R1 (arXiv 2506.19846, "adaptive memory evolution"): what the reward puts in
the upper tail is remembered, what it puts in the lower one costs the records that were recalled. Where the
paper is silent the choices are ours:

- The score is the distance of the turn's reward from the mean of the window, times `alpha`; a penalty is the
  failing turn's distance. Success lifts nothing but itself: records that are recalled often would otherwise
  outgrow every new one.
- Decay is exp(-beta·t / decay_steps), t in steps since the score was last set, worked out when it is needed.
- The window holds this step's rewards already when its turns are judged.
- Turns are looked at in order of reward, then id: never in the order in which episodes ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from masflow.memory.recall import Index
from masflow.memory.records import Event, Experience, Kind, Memory, Record
from masflow.memory.rules import Rules
from masflow.memory.window import Bounds, bounds

__all__ = ["Evolved", "evolve", "score_at"]


@dataclass(frozen=True)
class Evolved:
    """A store after a step, and how it got there. Made by `evolve`; eaten by `MemoryDb.write`."""

    memory: Memory
    events: tuple[Event, ...] = ()
    rewards: tuple[float, ...] = ()
    """Of the step's turns, in the order in which the window holds them."""
    brief: tuple[Record, ...] = ()
    """Records that came and went within the step."""


def score_at(record: Record, step: int, rules: Rules) -> float:
    """A record's score at a step: it has decayed since it was set."""
    return record.score * math.exp(-rules.beta * max(0, step - record.scored) / rules.decay_steps)


def evolve(
    memory: Memory,
    experiences: Sequence[Experience],
    step: int,
    rules: Rules,
    held_out: Collection[str] = (),
    examples: bool = False,
) -> Evolved:
    """The store after a step, and what happened to its records. Changes nothing that it is given.

    Args:
        experiences: the step's turns, in any order.
        step: from 1, and 0 for what comes before; the only clock.
        held_out: tasks (`task_key`) that nothing is kept of: those of evaluation splits. Their turns don't
            even count.
        examples: somebody chose these turns: where all are paid the same, all of them are good.
    """
    turns = sorted((e for e in experiences if e.task not in held_out), key=lambda e: (-e.reward, e.turn))
    in_order = sorted(turns, key=lambda e: e.turn)
    rewards = (*memory.rewards, *(e.reward for e in in_order))[-rules.window :]
    seen = bounds(rewards, rules.upper, rules.lower)
    if seen is None and examples and rewards:
        seen = Bounds(rewards[0], rewards[0], rewards[0])
    work = _Work(memory, step, rules, frozenset(e.situation for e in turns))
    try:
        for one in turns:
            work.use(one)
        if seen is not None:
            for one in turns:
                work.judge(one, seen)
            for one in turns:
                if seen.is_good(one.reward) and one.is_whole and one.strategy.strip():
                    work.remember(one, seen)
        work.forget()
        work.evict()
    finally:
        work.close()
    records = tuple(work.records[number] for number in sorted(work.records))
    after = Memory(memory.name, records, rewards, work.next_id)
    seen_now = tuple(e.reward for e in in_order)
    return Evolved(after, tuple(work.events), seen_now, tuple(work.brief))


@dataclass
class _Work:
    """A store while it changes."""

    memory: Memory
    step: int
    rules: Rules
    situations: frozenset[str]
    """Of the step's turns."""
    records: dict[int, Record] = field(init=False)
    next_id: int = field(init=False)
    events: list[Event] = field(default_factory=list)
    brief: list[Record] = field(default_factory=list)
    _index: Index | None = None

    def __post_init__(self) -> None:
        self.records = {record.id: record for record in self.memory.records}
        self.next_id = self.memory.next_id

    def close(self) -> None:
        if self._index is not None:
            self._index.close()

    def use(self, one: Experience) -> None:
        """Count what a turn recalled."""
        for record in self._recalled(one):
            self.records[record.id] = replace(record, uses=record.uses + 1, last_used=self.step)

    def judge(self, one: Experience, seen: Bounds) -> None:
        """Penalise what a turn in the lower tail recalled."""
        if not seen.is_bad(one.reward):
            return
        for record in self._recalled(one):
            record = self._aged(record)
            score = record.score + self.rules.alpha * (one.reward - seen.mean)
            self.records[record.id] = replace(record, score=score)
            self._tell(record.id, "penalised", one.turn, score, f"reward {one.reward:g}, mean {seen.mean:g}")
            if score < self.rules.floor:
                self._drop(record.id, "deleted", one.turn, score, f"below the floor {self.rules.floor:g}")

    def remember(self, one: Experience, seen: Bounds) -> None:
        """Insert a turn, or merge it with the record that is as good as the same; the better one stays."""
        score = self.rules.alpha * (one.reward - seen.mean)
        index = self._searched()
        near = index.nearest(one.situation, 1)
        if not near or near[0][1] < self.rules.merge:
            record = Record(
                self.next_id, one.situation, one.strategy, score, self.step, 0, self.step, self.step,
                one.turn, one.task,
            )  # fmt: skip
            self.next_id += 1
            self._put(record)
            self._tell(record.id, "inserted", one.turn, score, f"reward {one.reward:g}")
            return
        old, similarity = self.records[near[0][0].id], near[0][1]
        now, alike = score_at(old, self.step, self.rules), f"similarity {similarity:.3f}"
        if score <= now:
            self._tell(old.id, "merged", one.turn, now, f"{alike}; the record was no worse and stays")
            return
        new = replace(old, situation=one.situation, strategy=one.strategy, source=one.turn, task=one.task)
        self._put(replace(new, score=score, scored=self.step))
        self._tell(old.id, "merged", one.turn, score, f"{alike}; in place of turn {old.source}")

    def forget(self) -> None:
        """Delete what has decayed below the floor."""
        for record in list(self.records.values()):
            score = score_at(record, self.step, self.rules)
            if score < self.rules.floor:
                self._tell(record.id, "decayed", "", score, f"from {record.score:g} at step {record.scored}")
                self._drop(record.id, "deleted", "", score, f"below the floor {self.rules.floor:g}")

    def evict(self) -> None:
        """Make room: the lowest scores go; of equals those that were used longest ago, then the earlier."""

        def worth(record: Record) -> tuple[float, int, int]:
            return score_at(record, self.step, self.rules), record.last_used, record.id

        spare = len(self.records) - self.rules.capacity
        for record in sorted(self.records.values(), key=worth)[: max(0, spare)]:
            score = score_at(record, self.step, self.rules)
            self._drop(record.id, "evicted", "", score, f"more than {self.rules.capacity} records")

    def _recalled(self, one: Experience) -> Iterator[Record]:
        for number in dict.fromkeys(one.recalled):
            if number in self.records:  # else an earlier turn's reward has deleted it
                yield self.records[number]

    def _aged(self, record: Record) -> Record:
        """The record with its score of today."""
        score = score_at(record, self.step, self.rules)
        if score != record.score:
            self._tell(record.id, "decayed", "", score, f"from {record.score:g} at step {record.scored}")
        return replace(record, score=score, scored=self.step)

    def _searched(self) -> Index:
        if self._index is None:
            self._index = Index(self.records.values(), self.situations)
        return self._index

    def _put(self, record: Record) -> None:
        self.records[record.id] = record
        self._searched().add(record)

    def _drop(self, number: int, kind: Kind, turn: str, score: float, why: str) -> None:
        record = self.records.pop(number)
        if number >= self.memory.next_id:
            self.brief.append(record)
        if self._index is not None:
            self._index.remove(number)
        self._tell(number, kind, turn, score, why)

    def _tell(self, number: int, kind: Kind, turn: str, score: float, why: str) -> None:
        self.events.append(Event(self.step, self.memory.name, number, kind, turn, score, why))
