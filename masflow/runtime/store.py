"""The store of a model: rows of experience by turn id, and the token trace on disk.

Its workers put rows in and take them out; the hub names turns and never sees a token. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from masflow.models.experience import Experience, Row, TokenTrace

__all__ = ["Store"]


class Store:
    """The only lasting copy of a model's tokens. Whatever arrives twice is kept once."""

    def __init__(self, model: str, run_dir: Path):
        """Raises RunError when the token trace can't be opened."""
        self.experience = Experience()
        self.trace = TokenTrace(run_dir / "tokens" / f"{model}.sqlite")

    def add(self, rows: Sequence[Row]) -> None:
        """Keep sampled rows and write them to the trace; the same turn again replaces its row."""
        self.experience.add(rows)
        self.trace.add(rows)

    def teach(self, rows: Sequence[Row]) -> None:
        """Keep demonstrated rows; they are not part of the trace."""
        self.experience.add(rows)

    def rows(self, turn_ids: Sequence[str]) -> list[Row]:
        """Raises RunError for a turn that was never sampled here."""
        return self.experience.rows(turn_ids)

    def known(self, turn_ids: Sequence[str]) -> list[Row]:
        """The rows that are here."""
        return [row for turn_id in turn_ids if (row := self.experience.get(turn_id)) is not None]

    def clear(self) -> None:
        """Forget the rows; the token trace on disk keeps them."""
        self.experience.clear()

    def ready(self) -> None:
        """Answers once the store is made."""

    def close(self) -> None:
        self.trace.close()
