"""All rules that span objects, in one table; each rule returns its problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from masflow.compiler.documents import Doc
from masflow.compiler.flow import flow_problems
from masflow.compiler.graph import Graph
from masflow.compiler.names import check_names
from masflow.compiler.payment import reward_problems
from masflow.compiler.plan import Plan
from masflow.compiler.regions import Regions
from masflow.compiler.signatures import signature_problems
from masflow.compiler.team import graphs_below
from masflow.compiler.usage import below, usage_problems
from masflow.compiler.writers import conversation_problems, state_problems
from masflow.errors import Problem
from masflow.project import Loaded
from masflow.spec.experiment import Experiment

__all__ = ["verify_graphs", "verify_plan"]


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


def verify_plan(plan: Plan, experiment: Loaded[Experiment] | None) -> Iterator[Problem]:
    """Pairs of workflow, mapping and schedule that can't work together."""
    trained = {member for policy in plan.policies if policy.train for member in policy.roles}
    trains = plan.train.steps > 0 and "train" in plan.data
    for place in graphs_below(plan.root, plan.workflows):
        graph = place.graph
        for reward in graph.rewards:
            judges = [m for r in graph.roles if r.name == reward.judge for m in r.members or (r.name,)]
            for member in judges:
                if place.prefix + member in trained:
                    message = f"'{reward.judge}' judges for reward '{reward.name}', and it is trained itself"
                    fix = "give it a model with 'train: frozen' in the mapping"
                    yield Problem.at(below(reward.where, "use"), "judge-not-frozen", message, fix)
        for node in graph.nodes if trains else ():
            if node.human is not None and node.human.in_training is None:
                message = f"'{node.name}' asks a person, and nobody is there in training"
                fix = "add in_training: skip, {value: …}, {call: file.py:fn} or {role: NAME}"
                yield Problem.at(below(node.where, "human"), "human-in-training", message, fix)
            if any(tool.approve for tool in graph.tools if tool.name == node.tool):
                message = f"tool '{node.tool}' asks a person for approval, and nobody is there in training"
                yield Problem.at(node.where, "human-in-training", message, "remove 'approve' for training")
    if plan.policies and not trained and trains:
        where = experiment.source.where("mapping") if experiment else plan.graph.where
        message = "every model is frozen, so there is nothing to train"
        yield Problem.at(where, "warn-nothing-to-train", message, "train a model, or write train: {steps: 0}")
