"""What the rewards of one workflow see of a trajectory: its turns, its names, where they were."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from masflow.compiler.graph import END, Graph, RewardIR
from masflow.trace import Moment, Path, Trajectory, Turn

__all__ = ["Scope", "speaking"]


@dataclass
class Scope:
    """A trajectory as one graph's rewards see it; `prefix` is the call that holds it, () at the top."""

    graph: Graph
    trajectory: Trajectory
    prefix: Path = ()

    @cached_property
    def call(self) -> str:
        """Qualified name of the call, with a slash; empty at the top."""
        return "".join(f"{step.node}/" for step in self.prefix)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        depth = len(self.prefix)
        return tuple(t for t in self.trajectory.turns if t.path[:depth] == self.prefix)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        depth = len(self.prefix)
        inside = (m for m in self.trajectory.moments if m.path[:depth] == self.prefix)
        return tuple(m for m in inside if len(m.path) == depth + 1)

    @cached_property
    def _moment_at(self) -> dict[Path, Moment]:
        return {speaking(m.path): m for m in self.moments}

    @cached_property
    def _superseded(self) -> set[str]:
        last: dict[Path, Turn] = {}
        for turn in self.turns:
            key = (*turn.path[:-1], turn.step._replace(attempt=0))
            if key not in last or last[key].step.attempt < turn.step.attempt:
                last[key] = turn
        return {t.id for t in self.turns} - {t.id for t in last.values()}

    @cached_property
    def _last_call(self) -> dict[Path, int]:
        calls: dict[Path, int] = {}
        for turn in self.turns:
            key = speaking(turn.path)
            calls[key] = max(calls.get(key, 0), turn.step.model_call)
        return calls

    @cached_property
    def names_at_end(self) -> dict[str, Any]:
        """Names when the episode, or this call of a sub-workflow, had ended."""
        if not self.prefix:
            return self.trajectory.names
        return next((m.names for m in self.moments if m.path[-1].node == END), {})

    @cached_property
    def early(self) -> bool:
        """The episode ended early, or its last word somewhere was malformed."""
        return self.trajectory.outcome != "ok" or any(
            not t.ok for t in self.turns if not self.is_superseded(t)
        )

    def local(self, name: str) -> str:
        """A qualified node, role or member name as this graph writes it."""
        return name.removeprefix(self.call)

    def is_role_node(self, name: str) -> bool:
        return any(n.name == name and n.kind == "role" for n in self.graph.nodes)

    def is_superseded(self, turn: Turn) -> bool:
        """A malformed attempt that was asked again."""
        return turn.id in self._superseded

    def is_final(self, turn: Turn) -> bool:
        """The turn that gave its visit (or item) its value: last attempt of the last model call."""
        key = speaking(turn.path)
        return not self.is_superseded(turn) and turn.step.model_call == self._last_call[key]

    def is_over(self, turn: Turn) -> bool:
        """Whether the turn's visit (or item) has its value: no tool was called and nothing asked again
        last."""
        key = speaking(turn.path)
        return any(t.last for t in self.turns if speaking(t.path) == key and self.is_final(t))

    def visit_of(self, path: Path) -> Path:
        """The visit that a path lies in, whatever the item, model call or attempt."""
        return (*path[:-1], path[-1]._replace(item=None, model_call=0, attempt=0))

    def selected(self, reward: RewardIR) -> list[Turn]:
        """Turns that a reward may pay: by `roles` and `nodes`, without attempts that were asked again."""
        return [
            t
            for t in self.turns
            if not self.is_superseded(t) and self.of_roles(t, reward.roles) and self.at_nodes(t, reward.nodes)
        ]

    def of_roles(self, turn: Turn, roles: tuple[str, ...]) -> bool:
        """Whether its role or its member is one of `roles`; none named: all."""
        return not roles or self.local(turn.role) in roles or self.local(turn.member) in roles

    def at_nodes(self, turn: Turn, nodes: tuple[str, ...]) -> bool:
        """Whether it stands at one of these nodes; `role:key` is one call of a function."""
        name = self.local(turn.node)
        return not nodes or name in nodes or f"{name}:{turn.step.item}" in nodes

    def names_at(self, turn: Turn) -> dict[str, Any]:
        """Names when the turn's visit ended, with `result` its own value; at the end where none were kept.

        For a turn inside a sub-workflow: the names when that call had ended.
        """
        path = turn.path[: len(self.prefix) + 1]
        moment = self._moment_at.get(speaking(path)) or self._moment_at.get(self.visit_of(path))
        names = self.names_at_end if moment is None else moment.names
        return {"me": turn.member, **names, "result": turn.value}


def speaking(path: Path) -> Path:
    """The item of a visit that a path lies in, whatever the model call or attempt."""
    return (*path[:-1], path[-1]._replace(model_call=0, attempt=0))
