"""An episode as a value: its key, its task and everything that came from outside, by path.

The player is deterministic, so that replies and effects *are* the state: copying, saving, forking and
replaying are copies of these records, and the player's position (`live`) is worked out again from them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from masflow.models.engine import Reply
from masflow.trace import Effect, EpisodeKey, Path, path_from_json, path_json

if TYPE_CHECKING:
    from masflow.runtime.live import Live

BEHIND = ">"
"""Before a path in `EpisodeState.forks`: the turn there is kept."""


@dataclass(eq=False)
class EpisodeState:
    """One episode, at any point. Equal states have equal keys, tasks and records, however they got there."""

    keys: tuple[EpisodeKey, ...]
    """The base episode's, then one a fork."""
    task: dict[str, Any]
    forks: tuple[str, ...] = ()
    """One a fork: the path (canonical JSON) of the turn that is asked again; with `BEHIND` before it that
    turn stays, and only what follows it is new."""
    replies: dict[str, Reply] = field(default_factory=dict)
    """By path; a reply that isn't needed yet is replayed when its turn comes."""
    effects: dict[str, Effect] = field(default_factory=dict)
    """By kind and path."""
    prompts: dict[str, str] = field(default_factory=dict)
    """What each call of a workflow's function was asked, by path: a replay has to ask the same."""
    pending: dict[str, str] = field(default_factory=dict)
    """Requests handed out by this object and not answered yet: turn id → path."""
    until: tuple[Path, str, int] | None = field(default=None, repr=False)
    """Of a graph: the visit (prefix, node, number) behind which nothing is played; copies go on."""
    script: Any = field(default=None, repr=False)
    """A demonstration being replayed."""
    live: Live | None = field(default=None, repr=False)

    @property
    def key(self) -> EpisodeKey:
        return self.keys[-1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpisodeState) and self._value() == other._value()

    __hash__ = None  # type: ignore[assignment]

    def _value(self) -> tuple[Any, ...]:
        return self.keys, self.task, self.forks, self.replies, self.effects

    def branch(self, mark: str, fork: tuple[Any, ...]) -> EpisodeState:
        """Another episode from this point on.

        Args:
            mark: as in `forks`: a turn that is asked for and has no reply yet; or, with `BEHIND`, one that
                has just got it.
            fork: (node path, sibling, continuation), the new key's.
        """
        keys, forks = (*self.keys, replace(self.key, fork=fork)), (*self.forks, mark)
        return EpisodeState(
            keys, self.task, forks, dict(self.replies), dict(self.effects), dict(self.prompts)
        )

    def copy(self) -> EpisodeState:
        """An independent state at the same point; requests already handed out count for it too."""
        return EpisodeState(
            self.keys,
            self.task,
            self.forks,
            dict(self.replies),
            dict(self.effects),
            dict(self.prompts),
            dict(self.pending),
        )

    def to_json(self) -> str:
        """Everything that is needed to go on elsewhere; requests that are out will be handed out again."""
        return json.dumps(
            {
                "keys": [asdict(key) for key in self.keys],
                "task": self.task,
                "forks": self.forks,
                "replies": {path: asdict(reply) for path, reply in sorted(self.replies.items())},
                "effects": {
                    path: {**asdict(e), "path": path_json(e.path)} for path, e in sorted(self.effects.items())
                },
                "prompts": self.prompts,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> EpisodeState:
        """Raises ValueError or KeyError when it isn't what `to_json` wrote."""
        data = json.loads(text)
        return cls(
            keys=tuple(EpisodeKey(**{**key, "fork": tupled(key["fork"])}) for key in data["keys"]),
            task=data["task"],
            forks=tuple(data["forks"]),
            replies={path: Reply(**reply) for path, reply in data["replies"].items()},
            effects={
                path: Effect(**{**effect, "path": path_from_json(effect["path"])})
                for path, effect in data["effects"].items()
            },
            prompts=dict(data.get("prompts", {})),
        )


def tupled(value: Any) -> Any:
    """Lists, at any depth, as tuples: the form that keys have in memory."""
    return tuple(tupled(item) for item in value) if isinstance(value, (list, tuple)) else value
