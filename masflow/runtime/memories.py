"""The memories of a run: what the plan says of them, the file, the step's view, and how a step changes them.

What evolution does is `masflow.memory`; here a step's turns become what it eats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from masflow.compiler.plan import Plan
from masflow.compiler.rows import load_tasks
from masflow.memory.evolve import Evolved, evolve
from masflow.memory.recall import Snapshot
from masflow.memory.records import Experience, Memory, task_key
from masflow.memory.rules import Rules
from masflow.memory.store import MemoryDb
from masflow.rl.groups import training_policy
from masflow.runtime import checkpoints
from masflow.runtime.reminding import clean
from masflow.trace import Scored, Turn

__all__ = ["FILE", "Memories", "remembered", "view_of"]

FILE = "memory.sqlite"
"""In a run's folder."""
TRAINING = ("train", "warm_start")
"""Splits that may be remembered; all others are held out."""


def options_of(plan: Plan) -> dict[str, Any] | None:
    """The settings of the plan's evolve stage; None without memory."""
    return next((s.options for s in plan.stages if (s.name, s.op) == ("evolve", "memory")), None)


def snapshot_of(options: dict[str, Any], now: dict[str, Memory], held_out: frozenset[str]) -> Snapshot:
    """What roles are reminded of while the stores are as they are now."""
    store_of = {role: store for store, roles in options["stores"].items() for role in roles}
    return Snapshot(now, store_of, options["recall"], held_out)


def held_out_keys(plan: Plan) -> frozenset[str]:
    """`task_key` of every row of every split that isn't trained on."""
    splits = [split for split in plan.data if split not in TRAINING]
    return frozenset(key_of(plan, task.row) for split in splits for task in load_tasks(plan, split))


def key_of(plan: Plan, row: dict[str, Any]) -> str:
    """`task_key` of an episode's task."""
    return task_key(row, (field.name for field in plan.graph.task if field.hidden))


class Memories:
    """All stores of a run while it goes on."""

    def __init__(self, plan: Plan, options: dict[str, Any], db: MemoryDb):
        self._plan, self._options, self._db = plan, options, db
        self._rules = Rules(**options["rules"])
        self._held_out = held_out_keys(plan)
        self.now: dict[str, Memory] = {name: Memory(name) for name in options["stores"]}
        """Store → its memory after the last step."""
        self._view: Snapshot | None = None

    @classmethod
    def of(cls, plan: Plan, folder: Path) -> Memories | None:
        """Those of a run's folder; None for a plan without memory."""
        options = options_of(plan)
        return cls(plan, options, MemoryDb(folder / FILE)) if options is not None else None

    def close(self) -> None:
        self._forget_view()
        self._db.close()

    def begin(self, step: int) -> None:
        """Go back to the memory of a step: what came after it is forgotten.

        Raises:
            RunError: the file has no memory of that step.
        """
        self._db.cut(step)
        self.now = self._db.at(step, self._options["stores"])
        self._forget_view()

    def view(self) -> Snapshot:
        """The one view that everybody has until the next step is over."""
        if self._view is None:
            self._view = snapshot_of(self._options, self.now, self._held_out)
        return self._view

    @property
    def is_taught(self) -> bool:
        """Whether the warm start's demonstrations are taught with it."""
        return self._options.get("demonstrations", False)

    def begin_with(self, played: Callable[[Snapshot], Sequence[Scored]]) -> None:
        """Let demonstrations be the first experience, unless the memory has begun already.

        Args:
            played: gives them, rewards and all, as they are told with an empty memory.
        """
        if self.is_taught and not self._db.has_beginning():
            self.evolve(0, played(self.view()))

    def evolve(self, step: int, played: Sequence[Scored]) -> dict[str, dict[str, int]]:
        """Change the stores by what a step played, and write them.

        Returns:
            Store → `records`, and how many were inserted, merged, ….
        """
        seen: dict[str, list[Experience]] = {name: [] for name in self.now}
        for store, one in experiences(self._plan, self._options["rewards"], played):
            seen[store].append(one)
        after = {
            name: evolve(memory, seen[name], step, self._rules, self._held_out, examples=step == 0)
            for name, memory in self.now.items()
        }
        self._db.write(step, self.now, after)
        self.now = {name: one.memory for name, one in after.items()}
        self._forget_view()
        return {
            name: {"records": len(one.memory.records), **sorted_kinds(one)} for name, one in after.items()
        }

    def _forget_view(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None


def sorted_kinds(evolved: Evolved) -> dict[str, int]:
    """Kind of event → how many."""
    return dict(sorted(Counter(event.kind for event in evolved.events).items()))


def experiences(
    plan: Plan, rewards: Sequence[str], played: Sequence[Scored]
) -> Iterator[tuple[str, Experience]]:
    """(store, what it learns from) of each final turn of a role with a memory.

    A turn counts that no outcome keeps from training, and whose named rewards are all known; those that don't
    reach it are left aside. A role that calls tools is remembered by its calls and the reply that ends them.
    """
    for one in played:
        trajectory = one.trajectory
        policy = training_policy(plan.graph.outcomes, trajectory)
        task = key_of(plan, trajectory.task)
        visits: dict[Any, list[Turn]] = {}
        for turn in trajectory.turns:
            visits.setdefault((turn.path[:-1], turn.path[-1][:4]), []).append(turn)
            found = trajectory.recalled.get(turn.id)
            paid = one.components.get(turn.id, {})
            values = [paid[name] for name in rewards if name in paid]
            known = [value for value in values if value is not None]
            if found is None or not turn.last or policy[turn.id] != "train":
                continue
            if not known or len(known) < len(values):
                continue
            said = [one.text for one in visits[turn.path[:-1], turn.path[-1][:4]] if one.ok]
            texts = (clean(found.situation), clean("\n".join(said)))
            is_whole = turn.ok and turn.outcome == "ok"
            yield found.store, Experience(turn.id, *texts, fmean(known), task, found.records, is_whole)


def view_of(memories: Memories | None) -> Snapshot | None:
    """What a player is given."""
    return memories.view() if memories is not None else None


@contextmanager
def remembered(plan: Plan, checkpoint: str | None) -> Iterator[Snapshot | None]:
    """The memory that belongs to a checkpoint, read only; an empty one without a checkpoint; None for a plan
    without memory.

    Raises:
        RunError: no such checkpoint, or the run's memory isn't there.
    """
    options = options_of(plan)
    if options is None:
        yield None
        return
    now = {name: Memory(name) for name in options["stores"]}
    if checkpoint is not None:
        place = checkpoints.find(checkpoint, (Path.cwd(), Path(plan.root_dir)))
        with MemoryDb(place.parent.parent / FILE, read_only=True) as db:
            now = db.at(checkpoints.read_state(place).step, options["stores"])
    view = snapshot_of(options, now, held_out_keys(plan))
    try:
        yield view
    finally:
        view.close()
