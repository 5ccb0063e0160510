"""Tools as the player calls them: built-ins and users' functions behind one `call`.

Knows no player and no models. What a tool returns is plain JSON data, so that it can be recorded and
replayed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import threading
from typing import TYPE_CHECKING, Any

from masflow.errors import EpisodeError, boundary
from masflow.spec.tools import BUILTINS, settings_problems
from masflow.spec.types import is_easy, unwritable
from masflow.timelimit import OutOfTime, call_limited
from masflow.tools.beside import Lanes

if TYPE_CHECKING:
    from collections.abc import Callable

    from masflow.compiler.graph import ToolIR
    from masflow.compiler.plan import Plan

__all__ = ["BUILTINS", "ToolBox", "fork_state", "plain", "settings_problems"]


class ToolBox:
    """Every tool of a plan, made on first use and then kept for the process.

    A tool of scope `episode` is either a class (`__init__(**settings)`, `__call__(**args)`, optionally
    `fork()`), of which every episode has its own instance, or a function that takes a `state` dict. Both
    live in the `episode_state` that the caller keeps. Shared tools may be called from several threads.
    """

    def __init__(self, plan: Plan):
        """Raises RunError: a tool's programs can't be run on this machine."""
        self.root = plan.root_dir
        os.environ["MASFLOW_SANDBOX"] = plan.runtime.sandbox  # rewards run in processes started later
        if any(tool.function.ref == "python" for graph in plan.workflows.values() for tool in graph.tools):
            importlib.import_module(BUILTINS["python"].module).ready()  # now, not after a warm start
        self.made: dict[str, Callable[..., Any]] = {}
        self.lanes = Lanes()
        self._making = threading.RLock()

    def call(self, graph_name: str, tool: ToolIR, args: dict[str, Any], episode_state: dict[str, Any]) -> Any:
        """Run one tool.

        Args:
            graph_name: key of the workflow in the plan; tools of two workflows may share a name.
            args: by parameter name, already rendered.
            episode_state: changed in place by a tool of scope `episode`.
        Raises:
            EpisodeError: `tool_error` when the tool broke, `timeout` when it ran longer than `timeout_s`.
            SpecError: its corpus can't be read.
        """
        name = f"{graph_name}/{tool.name}"
        run, given = self._bound(name, tool, dict(args), episode_state)
        result: Any = None
        late: str | None = None
        with boundary(f"tool {tool.name} ({tool.function.ref})") as caught:
            try:
                result = plain(call_limited(run, given, tool.timeout_s))
            except OutOfTime as error:
                late = str(error)
        if late is not None:
            raise EpisodeError("timeout", f"tool {tool.name} ({tool.function.ref}): {late}")
        if caught.error is not None:
            raise EpisodeError("tool_error", caught.error)
        return result

    def _bound(
        self, name: str, tool: ToolIR, args: dict[str, Any], episode_state: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        if tool.function.ref in BUILTINS:
            return self._builtin(name, tool), args
        function = self._function(tool)
        if tool.scope == "shared":
            if inspect.isclass(function):
                return self._once(name, tool, function), args
            return function, {**tool.settings, **args}
        if inspect.isclass(function):
            if name not in episode_state:
                episode_state[name] = self._instance(tool, function)
            return episode_state[name], args
        return function, {**tool.settings, **args, "state": episode_state.setdefault(name, {})}

    def _builtin(self, name: str, tool: ToolIR) -> Callable[..., Any]:
        with self._making:
            if name not in self.made:
                module = importlib.import_module(BUILTINS[tool.function.ref].module)
                self.made[name] = module.make(tool.settings)
            return self.made[name]

    def _once(self, name: str, tool: ToolIR, function: Any) -> Callable[..., Any]:
        with self._making:
            if name not in self.made:
                self.made[name] = self._instance(tool, function)
            return self.made[name]

    def _instance(self, tool: ToolIR, function: Any) -> Callable[..., Any]:
        who, late = f"tool {tool.name} ({tool.function.ref})", ""
        with boundary(who) as caught:
            try:
                return call_limited(function, dict(tool.settings), tool.timeout_s)
            except OutOfTime as error:
                late = str(error)
        if late:
            raise EpisodeError("timeout", f"{who}: {late}")
        raise EpisodeError("tool_error", caught.error or "")

    def _function(self, tool: ToolIR) -> Any:
        from masflow.functions import load_callable

        return load_callable(tool.function.ref, self.root)


def fork_state(episode_state: dict[str, Any]) -> dict[str, Any]:
    """An independent copy of the states of an episode's tools: by their `fork()`, else by a deep copy.

    Raises:
        EpisodeError: `tool_error`, a state can be copied neither way.
    """
    forked = {}
    for name, state in episode_state.items():
        with boundary(f"fork of the state of tool {name}") as caught:
            forked[name] = state.fork() if hasattr(state, "fork") else copy.deepcopy(state)
        if caught.error is not None:
            raise EpisodeError("tool_error", caught.error)
    return forked


def plain(value: Any) -> Any:
    """`value` as JSON data of its own: tuples become lists, everything is copied.

    Raises:
        TypeError: it holds something that JSON can't.
    """
    if type(value) not in (list, dict) and is_easy(value):
        return value
    copied = _copied(value)
    problem = unwritable(copied)
    if problem:
        raise TypeError(f"the result {problem}")
    return copied


def _copied(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, (list, tuple)):
        return [_copied(v) for v in value]
    if isinstance(value, dict):
        return {_key(k): _copied(v) for k, v in value.items()}
    hint = "; call its .tolist()" if hasattr(value, "tolist") else ""
    name = type(value).__name__
    raise TypeError(f"the result must be plain data (text, numbers, lists, dicts); got {name}{hint}")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key must be text, got {key!r}")
    return key
