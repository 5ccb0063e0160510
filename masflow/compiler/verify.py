"""Rules that span objects: a graph's flow, its names, and a plan's pairs. Each rule returns its problems."""

from __future__ import annotations

from collections.abc import Mapping, Set

from masflow.compiler.graph import Graph
from masflow.compiler.plan import Plan
from masflow.compiler.regions import Regions
from masflow.errors import Problem
from masflow.project import Loaded
from masflow.spec.experiment import Experiment
from masflow.spec.mapping import Mapping as MappingSpec


def verify_graphs(
    root: str, graphs: Mapping[str, Graph], changed: Set[str], incomplete: Set[str]
) -> list[Problem]:
    problems: list[Problem] = []
    for key in sorted(changed):
        Regions.of(graphs[key])
    return problems


def verify_plan(
    plan: Plan, experiment: Loaded[Experiment] | None, mapping: Loaded[MappingSpec] | None
) -> list[Problem]:
    return []
