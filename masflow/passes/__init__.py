"""The registry of passes: plug-ins that change a plan's graph, sampler or stages.

A pass is a frozen config class with `apply(plan) -> plan`, found by name here or in the entry-point group
`masflow.passes`. It holds no run-time state.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import ConfigDict

from masflow.errors import Problem, SpecError, Where, boundary
from masflow.spec.base import Spec

if TYPE_CHECKING:
    from masflow.compiler.plan import Plan

__all__ = ["BUILT_IN", "DEFAULT", "GROUP", "Pass", "known_passes"]

GROUP = "masflow.passes"
DEFAULT = ("prefix_sharing",)
"""Passes that are applied last to plans that don't name them, and listed only where they are named."""


class Pass(Protocol):
    """What a pass is. The class is a frozen `masflow.spec.base.Spec`; its fields are the YAML settings."""

    before: ClassVar[tuple[str, ...]]
    """Names of passes that must come later when both are used."""
    after: ClassVar[tuple[str, ...]]
    """Names of passes that must come earlier when both are used."""

    def apply(self, plan: Plan) -> Plan:
        """The changed plan; pure. Raises SpecError when the plan can't be changed so."""
        ...


BUILT_IN: dict[str, type[Pass]] = {}
"""Passes beside those of this package, by name."""


def known_passes() -> Mapping[str, type[Pass]]:
    """Built-in passes and those that installed packages offer."""
    from masflow.passes.memory_evolution import MemoryEvolution
    from masflow.passes.node_sampling import NodeSampling
    from masflow.passes.prefix_sharing import PrefixSharing
    from masflow.passes.top_k import TopK

    own: dict[str, type[Pass]] = {
        "memory_evolution": MemoryEvolution,
        "node_sampling": NodeSampling,
        "prefix_sharing": PrefixSharing,
        "top_k": TopK,
    }
    found = {**own, **BUILT_IN}
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            continue
        with boundary(entry.value) as caught:
            found[entry.name] = entry.load()
        if caught.error:
            found[entry.name] = _unusable(entry, caught.error)
    return found


def _unusable(entry: EntryPoint, why: str) -> type[Pass]:
    """Refuses every experiment that names it, and no other one."""

    class Unusable(Spec):
        model_config = ConfigDict(extra="allow")
        before: ClassVar[tuple[str, ...]] = ()
        after: ClassVar[tuple[str, ...]] = ()

        def apply(self, plan: Plan) -> Plan:
            message = f"pass '{entry.name}' ({entry.value}, of an installed package) can't be used: {why}"
            fix = "repair that package, or remove the pass"
            raise SpecError([Problem.at(Where("passes", 0, entry.name), "bad-pass", message, fix)])

    return Unusable
