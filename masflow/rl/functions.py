"""One reward of one trajectory: what it asks of a function or a judge, and what it makes of the answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import cloudpickle

from masflow.compiler.expressions import TemplateProblem, condition, value
from masflow.compiler.graph import FunctionIR, Graph, RewardIR, RoleIR
from masflow.errors import boundary
from masflow.functions import load_callable
from masflow.isolated import Sent, Weighed, number, weighed
from masflow.isolation import Call, packed
from masflow.timelimit import call_limited
from masflow.trace import EpisodeKey, Path, Trajectory, Turn

__all__ = [
    "Asked",
    "Judge",
    "Judgement",
    "Played",
    "Question",
    "RewardCall",
    "Verdict",
    "call_apart",
    "call_here",
    "number",
]


@dataclass(frozen=True)
class Judgement:
    """A question to a frozen role, made by a reward and eaten by a `Judge`."""

    reward: str
    role: RoleIR
    call: str
    """Of the sub-workflow that holds the role, with a slash; empty at the top."""
    args: dict[str, Any]
    """What the role's prompt sees."""
    key: EpisodeKey
    path: Path
    """Of the turn that is judged; empty for the whole episode."""


@dataclass(frozen=True)
class Verdict:
    """A judge's answer; without a score, `detail` says why."""

    score: float | None
    detail: str = ""


Judge = Callable[[Sequence[Judgement]], list[Verdict]]
"""Answers many questions at once, one verdict each, in order."""


@dataclass(frozen=True)
class Asked:
    """A function with the arguments of one place. Made by a reward; called here or in a process of its own,
    alone or together with those of other places."""

    function: FunctionIR
    args: dict[str, Any]
    played: Played
    turn: Turn | None
    seed: str

    def given(self) -> dict[str, Any]:
        """What a function gets if it has a parameter for it."""
        return {"trajectory": self.played.trajectory, "turn": self.turn}


@dataclass
class Question:
    """What one reward needs to know at one place: a number that is known already, a function's, a judge's."""

    value: float | None = None
    asked: Asked | None = None
    judgement: Judgement | None = None


@dataclass
class Played:
    """A trajectory whose rewards are worked out."""

    trajectory: Trajectory

    @cached_property
    def pickled(self) -> bytes:
        return cloudpickle.dumps(self.trajectory)


@dataclass
class RewardCall:
    """One reward of one trajectory, ready to be asked for at several places of it."""

    reward: RewardIR
    played: Played
    early: bool
    """The episode ended early or a turn was malformed: a null argument may come from that."""
    graph: Graph
    """The workflow whose reward it is."""
    call: str = ""
    """Of that workflow, with a slash; empty at the top."""
    failures: list[str] = field(default_factory=list)
    num_asked: int = 0

    def applies(self, names: dict[str, Any]) -> bool | None:
        """Whether `when` holds; None, with the reason noted, when it can't be evaluated."""
        if self.reward.when is None:
            return True
        try:
            return condition(self.reward.when, names)
        except TemplateProblem as problem:
            self.fail(f"when: {problem}")
            return None

    def ask(self, args: dict[str, Any], names: dict[str, Any], turn: Turn | None = None) -> Question:
        """The reward on `args` filled in from `names`."""
        try:
            given = {name: value(raw, names) for name, raw in args.items()}
        except TemplateProblem as problem:
            self.fail(f"args: {problem}")
            return Question()
        if any(v is None and self._stops(name) for name, v in given.items()):
            return Question(self.reward.otherwise)
        key = self.played.trajectory.key
        if self.reward.judge is not None:
            role = self.graph.role(self.reward.judge)
            path = turn.path if turn is not None else ()
            return Question(judgement=Judgement(self.reward.name, role, self.call, given, key, path))
        assert self.reward.function is not None
        self.num_asked += 1
        seed = f"{key.run_seed} {key.episode_id} {self.call}{self.reward.name} {self.num_asked}"
        return Question(asked=Asked(self.reward.function, given, self.played, turn, seed))

    def _stops(self, name: str) -> bool:
        function = self.reward.function
        return self.early or function is None or name not in function.nullable

    def plain(self, result: float | dict[str, float | None] | None) -> float | None:
        """A value that is no allocator's."""
        if isinstance(result, dict):
            self.fail("gave a dict here; only an allocator, fn(trajectory), gives one")
            return None
        return result

    def fail(self, reason: str) -> None:
        """Note why this reward is null somewhere."""
        text = f"reward {self.reward.name}: {reason}"
        if text not in self.failures:
            self.failures.append(text)


def call_here(reward: RewardIR, each: Sequence[Asked], root: str) -> Weighed:
    """Call a function in this process, on a thread of its own (`isolate: false`).

    Args:
        each: one place; with `batch: true` all of them, whose arguments become lists.
    Raises:
        RunError: it can't be loaded.
    """
    many = len(each) if reward.batch else None
    found = Weighed(None)
    with boundary(each[0].function.ref) as caught:
        call = load_callable(each[0].function.ref, root)
        takes = each[0].function.params or tuple(inspect.signature(call).parameters)
        args, given = _arguments(reward, each)
        args = {**{name: v for name, v in given.items() if name in takes}, **args}
        found = weighed(call_limited(call, deepcopy(args), reward.timeout_s), many)
    return Weighed(None if many is None else [None] * many, (caught.error,)) if caught.error else found


def call_apart(reward: RewardIR, each: Sequence[Asked], root: str) -> Call:
    """The same call, for a process of `masflow.isolation`."""
    function, many = each[0].function, len(each) if reward.batch else None
    args, given = _arguments(reward, each)
    wanted = [n for n in given if n not in args and (not function.hash or n in function.params)]
    data, packs = b"", ()
    with boundary("an argument can't be sent to the function's process") as caught:
        data = packed(args)
        packs = tuple(
            (name, _pickled(name, given[name], each[0] if many is None else None)) for name in wanted
        )
    memory = int(reward.memory_gb * 1e9)
    sent = Sent(function.ref, root, function.hash, data, packs, reward.timeout_s, memory, each[0].seed, many)
    call = Call(sent)
    if caught.error:
        call.answer = Weighed(None if many is None else [None] * many, (caught.error,))
    return call


def _pickled(name: str, value: Any, alone: Asked | None) -> bytes:
    """A trajectory is pickled once for all rewards that look at it."""
    return alone.played.pickled if alone is not None and name == "trajectory" else cloudpickle.dumps(value)


def _arguments(reward: RewardIR, each: Sequence[Asked]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments, and those that a function gets if it asks; with `batch: true` lists, a value a place."""
    if not reward.batch:
        return dict(each[0].args), each[0].given()
    args = {name: [one.args[name] for one in each] for name in each[0].args}
    return args, {name: [one.given()[name] for one in each] for name in ("trajectory", "turn")}
