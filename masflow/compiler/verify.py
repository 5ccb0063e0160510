"""All rules that span the objects of one graph; those of a whole plan stand in `pairs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from masflow.compiler.calls import call_problems
from masflow.compiler.documents import Doc
from masflow.compiler.flow import flow_problems
from masflow.compiler.graph import Graph
from masflow.compiler.names import check_names, check_program_names
from masflow.compiler.payment import reward_problems
from masflow.compiler.programs import program_problems
from masflow.compiler.regions import Regions
from masflow.compiler.signatures import signature_problems
from masflow.compiler.usage import usage_problems
from masflow.compiler.writers import conversation_problems, state_problems
from masflow.errors import Problem

__all__ = ["verify_graphs"]


def verify_graphs(
    root: str,
    graphs: Mapping[str, Graph],
    changed: Set[str],
    incomplete: Set[str],
    docs: Mapping[str, Doc] | None = None,
) -> Iterator[Problem]:
    """Every rule for the graphs named in `changed`.

    Args:
        incomplete: graphs with edges that could not be read; rules of flow and names are left out for them.
        docs: the document of each graph, for the places of names.
    """
    for key in graphs:
        if key not in changed:
            continue
        graph = graphs[key]
        if graph.program is not None:
            yield from program_problems(graph)
            yield from call_problems(graph)
            yield from signature_problems(graph, graphs)
            yield from reward_problems(graph, graphs, None)
            yield from check_program_names(graph, graphs, (docs or {}).get(key))
            continue
        regions = None if key in incomplete else Regions.of(graph)
        found = [] if regions is None else list(flow_problems(graph, regions))
        yield from found
        sound = regions if not found else None
        yield from usage_problems(graph, graphs)
        yield from signature_problems(graph, graphs)
        yield from state_problems(graph, sound)
        yield from reward_problems(graph, graphs, sound)
        if sound is not None:
            yield from conversation_problems(graph, sound)
            yield from check_names(graph, graphs, sound, (docs or {}).get(key))
