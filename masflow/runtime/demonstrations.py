"""A demonstration line as a source of replies and values for the player, with clear errors where it doesn't
fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from masflow.errors import EpisodeError
from masflow.trace import Path, path_from_json, path_json, short_key


class Script:
    """Turns of one demonstration, used up node by node, in order."""

    def __init__(self, demonstration: dict[str, Any], line: str):
        self.line = line
        self.alone: Callable[[], bool] = lambda: True
        """Whether one thread runs, so that the next turn left is the only one that fits."""
        self.left: list[tuple[int, dict[str, Any]]] = []
        self.trained: dict[str, bool] = {}
        turns = demonstration.get("turns", [])
        if not isinstance(turns, list):
            raise self._error("'turns' isn't a list")
        for number, turn in enumerate(turns, start=1):
            if not isinstance(turn, dict) or "node" not in turn or ("reply" in turn) == ("value" in turn):
                raise self._error(f"turn {number} isn't {{node, reply}} or {{node, value}}: {turn!r}")
            self.left.append((number, turn))

    def _error(self, message: str) -> EpisodeError:
        return EpisodeError("malformed", f"demonstration {self.line}: {message}")

    def reply(self, node: str, path_text: str) -> str:
        """Raw text of the next turn of a node. Raises EpisodeError when the demonstration has none."""
        item = path_from_json(path_text)[-1].item
        index = self._find(node, item)
        if index is None or "reply" not in self.left[index][1]:
            following = (
                f"turn {self.left[0][0]} is of node '{self.left[0][1]['node']}'"
                if self.left
                else "it has no turn left"
            )
            at = f"node '{node}'" + (f" (item or key {item!r})" if item is not None else "")
            raise self._error(f"the workflow is at {at}, but {following}")
        _, turn = self.left.pop(index)
        self.trained[path_text] = bool(turn.get("train", True))
        return str(turn["reply"])

    def has_value(self, path: Path) -> bool:
        index = self._find(qualified(path), path[-1].item)
        return index is not None and "value" in self.left[index][1]

    def value(self, path: Path) -> Any:
        index = self._find(qualified(path), path[-1].item)
        assert index is not None, path_json(path)
        return self.left.pop(index)[1]["value"]

    def trains(self, path_text: str) -> bool:
        return self.trained.get(path_text, True)

    def _find(self, node: str, item: int | str | None) -> int | None:
        """The first turn left of a node; it must be the next one unless branches run side by side.

        One that carries a `key` is the turn of that key (or item) only.
        """
        names = (node, node.rpartition("/")[2])
        found = (
            i
            for i, (_, turn) in enumerate(self.left)
            if turn["node"] in names and short_key(turn.get("key", item)) == item
        )
        index = next(found, None)
        return None if index and self.alone() else index

    def finish(self, stop: tuple[str, str] | None) -> None:
        """Raises EpisodeError when turns are left over, or the episode broke."""
        if stop is not None and stop[0] not in ("malformed", "truncated"):
            raise self._error(f"the episode ended with {stop[0]}: {stop[1]}")
        if self.left:
            number, turn = self.left[0]
            ended = f"the episode ended ({stop[0]}: {stop[1]})" if stop else "the episode ended"
            raise self._error(f"{ended} before turn {number} (node '{turn['node']}')")


def qualified(path: Path) -> str:
    """The qualified node of a path, `research/ask`."""
    step = path[-1]
    return f"{step.call}/{step.node}" if step.call else step.node
