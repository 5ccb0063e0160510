"""Declare a team of language-model agents; a compiler turns it into multi-agent reinforcement learning.

Light on purpose: importing this package imports neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from masflow.errors import EpisodeError, MasflowError, Problem, RunError, SpecError

if TYPE_CHECKING:
    from masflow.program import workflow
    from masflow.runtime.awaiting import Agents, Context, gather

__all__ = [
    "Agents",
    "Context",
    "EpisodeError",
    "MasflowError",
    "Problem",
    "RunError",
    "SpecError",
    "__version__",
    "gather",
    "workflow",
]

__version__ = "0.1.0"

_PLACES = {
    "Agents": "masflow.runtime.awaiting",
    "Context": "masflow.runtime.awaiting",
    "gather": "masflow.runtime.awaiting",
    "workflow": "masflow.program",
}
"""Names that are imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'masflow' has no attribute '{name}'")
