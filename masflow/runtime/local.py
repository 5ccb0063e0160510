"""The backend of one process: actors are objects, calls run at once, and a debugger can stop anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from masflow.runtime.backend import Actor, Ask, Died, Pending

__all__ = ["LocalActor", "LocalBackend", "Value"]


class Value:
    """A result that is there, or the death that took its place."""

    def __init__(self, value: Any, died: Died | None = None):
        self._value, self._died = value, died

    def done(self) -> bool:
        return True

    def get(self, timeout_s: float) -> Any:
        if self._died is not None:
            raise self._died
        return self._value


class LocalActor:
    """An object of this process."""

    def __init__(self, name: str, instance: Any):
        self.name, self.instance = name, instance
        self._dead = False

    def call(self, method: str, *args: Any) -> Pending[Any]:
        """Run it now; what it raises is raised here."""
        if self._dead:
            return Value(None, Died(self.name, "it was killed"))
        try:
            values = [arg.get(0.0) if isinstance(arg, Value) else arg for arg in args]
            return Value(getattr(self.instance, method)(*values))
        except Died as death:
            return Value(None, death)

    def kill(self) -> None:
        self._dead = True


class LocalBackend:
    """Makes actors in this process; there is nothing to reserve and nothing to wait for."""

    apart = False

    def __init__(self) -> None:
        self.actors: dict[str, LocalActor] = {}

    def reserve(self, asks: Mapping[str, Ask]) -> None:
        """A process takes what it needs."""

    def spawn(self, name: str, cls: type, *args: Any, ask: Ask | None = None) -> Actor:
        """Made at once; what the constructor raises is raised here."""
        self.actors[name] = LocalActor(name, cls(*args))
        return self.actors[name]

    def wait(self, pendings: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        return list(range(len(pendings)))

    def close(self) -> None:
        """What holds something beside memory lets go of it."""
        for actor in self.actors.values():
            close = getattr(actor.instance, "close", None)
            if close is not None:
                close()
        self.actors.clear()
