"""What a workflow written as a function has in its hands: values, calls to await, `agents`, `ctx`, `gather`.

Light on purpose: a user's file imports it. Knows no plan; what stands behind it is the
`Stage` below.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol

__all__ = ["Agent", "Agents", "Chance", "Context", "Gather", "Hidden", "Misuse", "Pending", "Value", "gather"]


class Misuse(Exception):
    """The function asks for something that doesn't exist; ends the episode even when it is caught."""


class Value:
    """A record with its fields as attributes, read only: a reply, a tool's result, the task."""

    def __init__(self, fields: Mapping[str, Any]):
        self.__dict__.update({name: wrapped(value) for name, value in fields.items()})

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(vars(self)) or "none"
        raise AttributeError(f"no field '{name}'; known: {known}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"'{name}' can't be set: a value is what was said")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"'{name}' can't be removed: a value is what was said")

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def __eq__(self, other: object) -> bool:
        return vars(self) == (vars(other) if isinstance(other, Value) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Value({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def wrapped(value: Any) -> Any:
    """JSON data with attribute access at every depth; lists stay lists, of their own."""
    if isinstance(value, dict):
        return Value(value)
    return [wrapped(item) for item in value] if isinstance(value, list) else value


def unwrapped(value: Any, hidden: Callable[[str], Any]) -> Any:
    """The JSON data behind values, at any depth.

    Args:
        hidden: gives a hidden task field's value, or raises Misuse where it may not be read.
    """
    if isinstance(value, Value):
        return {name: unwrapped(inner, hidden) for name, inner in vars(value).items()}
    if isinstance(value, Hidden):
        return hidden(_name_of(value))
    if isinstance(value, dict):
        return {name: unwrapped(inner, hidden) for name, inner in value.items()}
    return [unwrapped(inner, hidden) for inner in value] if isinstance(value, (list, tuple)) else value


class Hidden:
    """A hidden task field in the function's hands: it can be handed to a tool, and read by nobody."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        object.__setattr__(self, "_name", name)

    def __repr__(self) -> str:
        return f"<the hidden field '{_name_of(self)}'>"

    def _read(self, *_: Any) -> Any:
        name = _name_of(self)
        raise TypeError(
            f"the hidden field '{name}' may be handed to tools and read by rewards, not by the function"
        )

    __str__ = __bool__ = __eq__ = __lt__ = __iter__ = __len__ = __getitem__ = __getattr__ = __contains__ = (
        _read
    )
    __hash__ = _read


def _name_of(hidden: Hidden) -> str:
    return object.__getattribute__(hidden, "_name")


class Pending:
    """Something that was asked for; `await` gives its value, once."""

    def __init__(self, label: str, where: str):
        self.label, self.where = label, where
        self.done = False
        self.awaited = False
        self.stop: tuple[str, str] | None = None
        """Outcome and detail that end the episode when this is awaited."""
        self.value: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        yield self
        return self.given

    def __getattr__(self, name: str) -> Any:
        """A field of what `await` gives, asked for too early."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{vars(self).get('label', 'it')} isn't awaited: write (await …).{name}")

    @property
    def given(self) -> Any:
        """What `await` gives."""
        return wrapped(self.value)


class Gather:
    """Several things awaited together."""

    def __init__(self, parts: tuple[Any, ...], where: str):
        self.parts, self.where = list(parts), where

    def __await__(self) -> Generator[Any, None, list[Any]]:
        yield self
        return [part.given for part in self.parts]


def gather(*awaitables: Any) -> Gather:
    """Await calls, or coroutines of your own, side by side; gives their values in order.

    What each has said is known to what follows only after all of them are there.
    """
    return Gather(awaitables, caller())


class Stage(Protocol):
    """What stands behind `agents` and `ctx`: one play of one function."""

    def ask(
        self,
        role: str,
        member: str | int | None,
        values: dict[str, Any],
        key: str | int | None,
        prompt: str | None,
        thread: str | int | None,
        where: str,
    ) -> Pending: ...

    def use(self, tool: str, args: dict[str, Any], key: str | int | None, where: str) -> Pending: ...

    def run(self, workflow: Any, args: dict[str, Any], key: str | int | None, where: str) -> Pending: ...

    def spawn(self, coroutine: Any, where: str) -> Pending: ...

    def misuse(self, where: str, message: str) -> Misuse: ...

    def chance(self) -> random.Random: ...

    @property
    def members(self) -> Mapping[str, tuple[str, ...]]:
        """Role → its members, empty for a plain one."""
        ...


class Agents:
    """The roles of the workflow by name."""

    def __init__(self, player: Stage):
        self._player = player

    def __getattr__(self, name: str) -> Agent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Agent:
        if name not in self._player.members:
            known = ", ".join(self._player.members) or "none"
            raise self._player.misuse(caller(), f"no role '{name}'; known: {known}")
        return Agent(self._player, name)


class Agent:
    """One role. Calling it asks it; a role with copies or names is indexed by member first."""

    def __init__(self, player: Stage, role: str, member: str | int | None = None):
        self._player, self._role, self._member = player, role, member

    def __call__(
        self,
        *unnamed: Any,
        key: str | int | None = None,
        prompt: str | None = None,
        thread: str | int | None = None,
        member: str | int | None = None,
        **values: Any,
    ) -> Pending:
        """Ask the role now; `await` gives its parsed reply.

        Args:
            key: names this call, so that it is the same call in every sample; else its ordinal does.
            prompt: a template instead of the role's.
            thread: of a role with a conversation: which of several.
            member: of copies or a family: who speaks.
            values: what the prompt's template sees, beside task fields and `params`.
        """
        if unnamed:
            raise self._player.misuse(caller(), f"values have names: write agents.{self._role}(NAME=…)")
        who = self._member if member is None else member
        return self._player.ask(self._role, who, values, key, prompt, thread, caller())

    def __await__(self) -> Generator[Any, None, Any]:
        raise self._player.misuse(caller(), f"a role is called: write await agents.{self._role}(…)")

    def __getitem__(self, member: str | int) -> Agent:
        return Agent(self._player, self._role, member)

    def __iter__(self) -> Iterator[Agent]:
        return (Agent(self._player, self._role, name) for name in self._player.members[self._role])

    def __len__(self) -> int:
        return len(self._player.members[self._role])


class Context:
    """All else that the function may use: parameters, chance, tools, sub-workflows, tasks of its own."""

    def __init__(self, player: Stage, params: Mapping[str, Any]):
        self._player = player
        self.params = Value(params)
        self.rng: random.Random = Chance(player.chance)
        """The only source of chance: seeded by the episode and by what was awaited."""

    def tool(self, name: str, /, *unnamed: Any, key: str | int | None = None, **args: Any) -> Pending:
        """Use a tool; `await` gives its result. The only effect: recorded once, then replayed."""
        if unnamed:
            raise self._player.misuse(caller(), f"arguments have names: write ctx.tool({name!r}, NAME=…)")
        return self._player.use(name, args, key, caller())

    def run(self, workflow: Any, /, *unnamed: Any, key: str | int | None = None, **task: Any) -> Pending:
        """Start an episode of another workflow inside this one; `await` gives its output.

        The value is None when that episode ended malformed, truncated or at a limit.
        """
        if unnamed:
            raise self._player.misuse(caller(), "task fields have names: write ctx.run(WORKFLOW, FIELD=…)")
        return self._player.run(workflow, task, key, caller())

    def spawn(self, coroutine: Any, /) -> Pending:
        """Go on with a coroutine of your own beside this one; await what this gives."""
        return self._player.spawn(coroutine, caller())


class Chance(random.Random):
    """A generator whose state belongs to the place in the episode from which it is asked."""

    def __init__(self, now: Callable[[], random.Random]):
        self._now = now
        super().__init__(0)

    def random(self) -> float:
        return self._now().random()

    def getrandbits(self, k: int, /) -> int:
        return self._now().getrandbits(k)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """As `normalvariate`: nothing is kept from one call for the next."""
        return self.normalvariate(mu, sigma)

    def seed(self, *args: Any, **kwargs: Any) -> None:
        """The episode seeds it."""


def caller() -> str:
    """`file:line` of the nearest call from outside this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def shown(file: str) -> str:
    """A file as a person would write it: from the working folder when it lies inside."""
    inside = file.startswith(os.getcwd() + os.sep)
    return os.path.relpath(file) if inside else file
