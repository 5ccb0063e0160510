"""Run one reward function on one set of arguments: value, nothing, or the reason why there is none."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from masflow.compiler.expressions import TemplateProblem, condition, value
from masflow.compiler.graph import FunctionIR, Graph, RewardIR, RoleIR
from masflow.errors import RunError, boundary
from masflow.functions import load_callable
from masflow.spec.types import shown
from masflow.timelimit import call_limited
from masflow.trace import EpisodeKey, Path, Trajectory, Turn

__all__ = ["Ask", "Judge", "Judgement", "RewardCall", "Verdict", "number"]


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


LARGEST = 1e30
Judge = Callable[[Sequence[Judgement]], list[Verdict]]
"""Answers many questions at once, one verdict each, in order."""
Ask = Callable[[Judgement], Verdict]


@dataclass
class RewardCall:
    """One reward of one trajectory, ready to be called at several places of it."""

    reward: RewardIR
    trajectory: Trajectory
    root: str
    """Project folder, for the paths of functions."""
    early: bool
    """The episode ended early or a turn was malformed: a null argument may come from that."""
    graph: Graph
    """The workflow whose reward it is."""
    call: str = ""
    """Of that workflow, with a slash; empty at the top."""
    ask: Ask | None = None
    failures: list[str] = field(default_factory=list)

    def applies(self, names: dict[str, Any]) -> bool | None:
        """Whether `when` holds; None, with the reason noted, when it can't be evaluated."""
        if self.reward.when is None:
            return True
        try:
            return condition(self.reward.when, names)
        except TemplateProblem as problem:
            self.fail(f"when: {problem}")
            return None

    def at(self, args: dict[str, Any], names: dict[str, Any], turn: Turn | None = None) -> float | None:
        """The reward on `args` filled in from `names`; None is unscored."""
        result = self.raw(args, names, turn)
        if isinstance(result, dict):
            self.fail("gave a dict here; only an allocator, fn(trajectory), gives one")
            return None
        return result

    def raw(
        self, args: dict[str, Any], names: dict[str, Any], turn: Turn | None = None
    ) -> float | dict[str, float | None] | None:
        """As `at`, but an allocator's dict passes through, its values checked."""
        try:
            given = {name: value(raw, names) for name, raw in args.items()}
        except TemplateProblem as problem:
            return self.fail(f"args: {problem}")
        if any(v is None and self._stops(name) for name, v in given.items()):
            return self.reward.otherwise
        if self.reward.judge is not None:
            return self._judged(given, turn)
        assert self.reward.function is not None
        return self._called(self.reward.function, given, turn)

    def _stops(self, name: str) -> bool:
        function = self.reward.function
        return self.early or function is None or name not in function.nullable

    def _judged(self, given: dict[str, Any], turn: Turn | None) -> float | None:
        if self.ask is None:
            raise RunError(
                f"reward '{self.reward.name}' is judged by role '{self.reward.judge}',"
                " and no model can be asked here",
                "score where the models are loaded, or give `score` a judge",
            )
        role = self.graph.role(str(self.reward.judge))
        path = turn.path if turn is not None else ()
        verdict = self.ask(Judgement(self.reward.name, role, self.call, given, self.trajectory.key, path))
        return self.fail(verdict.detail) if verdict.detail else verdict.score

    def _called(self, function: FunctionIR, given: dict[str, Any], turn: Turn | None) -> Any:
        result: Any = None
        with boundary(function.ref) as caught:
            call = load_callable(function.ref, self.root)
            asked = function.params or tuple(inspect.signature(call).parameters)
            if "trajectory" in asked:
                given.setdefault("trajectory", self.trajectory)
            if "turn" in asked:
                given.setdefault("turn", turn)
            result = call_limited(call, deepcopy(given), self.reward.timeout_s)
        if caught.error is not None:
            return self.fail(caught.error)
        if isinstance(result, dict):
            return {key: self._number(v) for key, v in result.items()}
        return self._number(result)

    def _number(self, result: Any) -> float | None:
        if result is None:
            return None
        found = number(result)
        if found is None:
            return self.fail(f"gave {shown(result)}; a reward is a finite number, or null for unscored")
        return found

    def fail(self, reason: str) -> None:
        """Note why this reward is null somewhere."""
        text = f"reward {self.reward.name}: {reason}"
        if text not in self.failures:
            self.failures.append(text)
        return None


def number(result: Any) -> float | None:
    """`result` as a float; None unless it is a finite real number (a bool is 0 or 1) of at most 1e30, so that
    sums and squares of rewards stay finite."""
    if not isinstance(result, Real) and not hasattr(result, "__float__"):
        return None
    found = math.nan
    with boundary("float of a result"):  # it may be any object: a list of numbers, an endless integer
        found = float(result)
    return found if abs(found) <= LARGEST else None
