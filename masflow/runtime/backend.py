"""What a star is made of: actors that a backend spawned, calls to them, and how they may fail.

`local` runs everything in this process, `cluster` in processes of Ray; whoever uses them can't tell. An actor
is a plain class that knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from masflow.errors import MasflowError, RunError

__all__ = ["Actor", "Ask", "Backend", "Died", "Pending", "stuck"]

T_co = TypeVar("T_co", covariant=True)


class Died(MasflowError):
    """An actor's process ended before it answered. `args` are (actor's name, why)."""

    @property
    def name(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return f"'{self.args[0]}' died: {self.args[1]}"


@dataclass(frozen=True)
class Ask:
    """What an actor takes of a cluster. Made from a model's `Place`; eaten by the backend."""

    cpus: float = 0.0
    gpus: float = 0.0
    threads: int | None = None
    """Of torch, in that process; None: torch's choice."""
    here: bool = False
    """On the machine of whoever spawns it."""


class Pending(Protocol[T_co]):
    """The result of a call, now or later."""

    def done(self) -> bool:
        """Whether `get` would not wait."""
        ...

    def get(self, timeout_s: float) -> T_co:
        """Wait for it.

        Raises:
            Died: the actor's process ended.
            RunError: nothing came in time; the actor is named. Or what the method itself raised.
        """
        ...


class Actor(Protocol):
    """A plain object, here or in a process of its own; its calls run one after the other, in order."""

    @property
    def name(self) -> str: ...

    def call(self, method: str, *args: Any) -> Pending[Any]:
        """Begin a method. An argument may be another call's Pending: its value is passed on without coming
        through the caller."""
        ...

    def kill(self) -> None:
        """End it at once; calls to it raise Died from then on."""
        ...


class Backend(Protocol):
    """Where actors live."""

    apart: bool
    """Actors have processes of their own, so that calls to several run at once."""

    def reserve(self, asks: Mapping[str, Ask]) -> None:
        """Set aside what actors of these names will take, all of it or nothing.

        Raises:
            RunError: there is not enough, with what is asked for and what there is.
        """
        ...

    def spawn(self, name: str, cls: type, *args: Any, ask: Ask | None = None) -> Actor:
        """Begin to make `cls(*args)` somewhere; its errors come with the first call that is waited for.

        A name may be used again after its actor died.
        """
        ...

    def wait(self, pendings: Sequence[Pending[Any]], timeout_s: float) -> list[int]:
        """Numbers of those that are there, at least one; none after `timeout_s`."""
        ...

    def close(self) -> None:
        """End all actors and give back what was reserved."""
        ...


def stuck(name: str, method: str, timeout_s: float, key: str = "call_timeout_s") -> RunError:
    """What to say of an actor that doesn't answer."""
    return RunError(
        f"'{name}' has not answered '{method}' after {timeout_s:g} s",
        f"see what that process does; if it only needs longer, raise 'runtime.{key}'",
    )
