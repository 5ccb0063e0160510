"""The algorithm of an experiment: its preset's values filled in, wrong pairs refused, its stages named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from masflow.algorithms import Facts, Preset, filled, known_algorithms
from masflow.algorithms.wrong_pairs import wrong_pairs
from masflow.compiler.graph import Graph
from masflow.compiler.plan import STAGES, GroupIR, ModelIR, StageIR
from masflow.errors import Problem, unknown
from masflow.project import Loaded
from masflow.spec.experiment import Algorithm, Experiment

__all__ = ["default_stages", "resolve_algorithm"]


def resolve_algorithm(
    loaded: Loaded[Experiment],
    problems: list[Problem],
    graph: Graph | None = None,
    models: Sequence[ModelIR] | None = None,
) -> Algorithm:
    """The preset's values filled in, and what can't work refused; an unknown name counts as grpo."""
    given, known = loaded.spec.algorithm, known_algorithms()
    if given.use not in known:
        problems.append(unknown(loaded.source.where("algorithm", "use"), "algorithm", given.use, known))
        given = given.model_copy(update={"use": "grpo"})
    algorithm, preset = filled(given), known[given.use]
    said = frozenset(name for name in given.model_fields_set if getattr(given, name) is not None)
    facts = Facts(
        algorithm,
        said,
        loaded.spec.train.tasks_per_step,
        graph.credit if graph else None,
        tuple(name for name, _, _ in passes_of(loaded.spec)),
        {p.name: p.roles for m in models or () for p in m.policies if p.train},
        {m.name: tuple(p.name for p in m.policies) for m in models or () if m.train != "frozen"},
        tuple(_individual(graph)) if graph else (),
        loaded.spec.train.steps,
    )
    problems.extend(_fixed(loaded, preset, given))
    for found in (*wrong_pairs(facts), *preset.refuse(facts)):
        where = loaded.source.where("algorithm", *found.field.split("."))
        problems.append(Problem.at(where, found.code, found.message, found.fix))
    return algorithm


WIDE: Mapping[Any, tuple[str, ...]] = {
    "task_role": ("each turn",),
    "state": ("each episode", "equal prompts"),
}
"""Groups a role → what is compared in each."""


def grouped(groups: tuple[GroupIR, ...], algorithm: Algorithm) -> tuple[GroupIR, ...]:
    """The groups of single places as the algorithm's `group` makes them wider.

    Sizes are of episodes a task; a role that speaks several times an episode has more turns, or calls.
    """
    kind, roles = algorithm.group, dict.fromkeys(group.role for group in groups)
    if kind == "task" and groups:
        return (GroupIR(("task", "all roles", "each episode"), groups[0].expected_size, "", ""),)
    if kind not in (*WIDE, "task_call"):
        return groups
    found = []
    for role in roles:
        called = ("each call" if "/" in role else "each episode",)
        for what in WIDE.get(kind, called):
            found.append(GroupIR(("task", role, what), groups[0].expected_size, role, ""))
    return tuple(found)


def passes_of(spec: Experiment) -> list[tuple[str, dict[str, Any], int | None]]:
    """(name, settings, place in the experiment) of each pass: the algorithm's own, which the experiment
    doesn't name, then those that it does, which the algorithm's settings fill up."""
    preset = known_algorithms().get(spec.algorithm.use)
    own = {name: dict(settings) for name, settings in preset.passes.items()} if preset else {}
    written = [(*next(iter(entry.items())), i) for i, entry in enumerate(spec.passes)]
    named = {name for name, _, _ in written}
    return [
        *((name, settings, None) for name, settings in own.items() if name not in named),
        *((name, {**own.get(name, {}), **(settings or {})}, i) for name, settings, i in written),
    ]


def _individual(graph: Graph) -> Iterator[str]:
    """Rewards that count and pay some turns only."""
    for reward in graph.rewards:
        is_built_in = reward.function is None and reward.judge is None and not reward.measure_after
        is_apart = reward.level != "trajectory" or reward.allocator or reward.measure_after or reward.to
        if reward.weight and is_apart and not is_built_in:
            yield reward.name


def _fixed(loaded: Loaded[Experiment], preset: Preset, given: Algorithm) -> Iterator[Problem]:
    """Fields by which an algorithm is what it is, changed."""
    for name in preset.fixed:
        own, value = preset.fields[name], getattr(given, name)
        if value is not None and name in given.model_fields_set and value != own:
            message = f"'{name}: {own}' is what makes {preset.name}; with '{value}' it is another algorithm"
            fix = f"remove '{name}', or choose another 'use'"
            where = loaded.source.where("algorithm", name)
            yield Problem.at(where, "fixed-by-algorithm", message, fix)


def default_stages(graph: Graph, algorithm: Algorithm) -> tuple[StageIR, ...]:
    """The training step, in order, with the operators that the algorithm names."""
    rounds = algorithm.dynamic.max_rounds if algorithm.dynamic else 1
    ops = {
        "sample": "trajectories",
        "score": "rewards",
        "credit": graph.credit,
        "group": algorithm.group,
        "advantage": algorithm.advantage,
        "select": "dynamic" if rounds > 1 else "all",
        "update": _update_op(algorithm),
        "evolve": "none",
    }
    options = {"select": {"max_rounds": rounds}} if rounds > 1 else {}
    return tuple(StageIR(name, str(ops[name]), options.get(name, {})) for name in STAGES)


UPDATES: Mapping[tuple[Any, Any], str] = {
    ("token", "ppo"): "clip",
    ("sequence", "ppo"): "sequence_clip",
    ("token", "cispo"): "cispo",
    ("token", "none"): "ratio",
    ("sequence", "none"): "sequence_ratio",
    ("sequence", "cispo"): "sequence_cispo",
}
"""(ratio, clip) → the name of the update."""


def _update_op(algorithm: Algorithm) -> str:
    return UPDATES[algorithm.ratio, algorithm.clip]
