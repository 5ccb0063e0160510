"""The compiler's pipeline: one literal tuple of named steps over one draft, `verify` between them.

Every step adds what it finds to the draft's problems; a step whose input is missing is left out, so that all
problems of all documents are reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from masflow.compiler import link
from masflow.compiler.binding import bind_functions
from masflow.compiler.chat import link_chats
from masflow.compiler.critics import link_critics
from masflow.compiler.digest import sealed
from masflow.compiler.graph import Graph
from masflow.compiler.lower import Lowering, doc_of
from masflow.compiler.overrides import overridden
from masflow.compiler.pairs import plan_problems
from masflow.compiler.places import link_places
from masflow.compiler.plan import ModelIR, Plan
from masflow.compiler.policies import Names, link_models
from masflow.compiler.presets import default_stages, resolve_algorithm
from masflow.compiler.programs import load_workflow, split_ref
from masflow.compiler.runs import link_starts
from masflow.compiler.team import graphs_below, team_of
from masflow.compiler.verify import verify_graphs
from masflow.errors import Problem, SpecError
from masflow.project import Loaded, load, resolve
from masflow.spec.experiment import Experiment, WorkflowUse
from masflow.spec.mapping import Mapping as MappingSpec
from masflow.spec.runtime import Runtime
from masflow.spec.workflow import Workflow

__all__ = ["STEPS", "WORKFLOW_STEPS", "Draft", "run_steps"]


@dataclass
class Draft:
    """What the steps hand on. A field is None (or empty) until its step has made it."""

    root_dir: Path
    problems: list[Problem] = field(default_factory=list)
    experiment: Loaded[Experiment] | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    mapping_file: Path | None = None
    runtime_file: Path | None = None
    workflow: Loaded[Workflow] | None = None
    workflow_prefix: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    mapping: Loaded[MappingSpec] | None = None
    runtime: Runtime | None = None
    runtime_document: Loaded[Runtime] | None = None
    lowering: Lowering | None = None
    root: str | None = None
    graphs: dict[str, Graph] = field(default_factory=dict)
    models: tuple[ModelIR, ...] | None = None
    plan: Plan | None = None
    verified: dict[str, Graph] = field(default_factory=dict)


def read_documents(draft: Draft) -> None:
    """Ensures: workflow, mapping and runtime are specs, or their problems stand in the draft."""
    assert draft.experiment is not None
    try:
        draft.experiment = overridden(draft.experiment, draft.overrides)
    except SpecError as error:
        draft.problems.extend(error.problems)
    spec = draft.experiment.spec
    use = spec.workflow if isinstance(spec.workflow, WorkflowUse) else WorkflowUse(use=spec.workflow)
    at = ("workflow", "use") if isinstance(spec.workflow, WorkflowUse) else ("workflow",)
    draft.params = use.params
    draft.workflow = _document(draft, use.use, "workflow", at, None)
    draft.workflow_prefix = at if isinstance(use.use, Workflow) else ()
    draft.mapping = _document(draft, spec.mapping, "mapping", ("mapping",), draft.mapping_file)
    runtime = _document(draft, spec.runtime, "runtime", ("runtime",), draft.runtime_file)
    draft.runtime_document = runtime
    draft.runtime = runtime.spec if runtime else None


def _document(
    draft: Draft, written: Any, kind: Any, at: tuple[str, ...], instead: Path | None
) -> Loaded[Any] | None:
    experiment = draft.experiment
    assert experiment is not None
    try:
        if instead is not None:
            return load(_given(instead, experiment.root), kind)
        if isinstance(written, str):
            where = experiment.source.where(*at)
            file, name = split_ref(written) if kind == "workflow" else (written, None)
            path = resolve(file, experiment.path, experiment.root, where, kind)
            return load_workflow(path, name, where) if kind == "workflow" else load(path, kind)
        source = experiment.source.under(*at)
        return Loaded(kind, written, source, experiment.path, experiment.root)
    except SpecError as error:
        draft.problems.extend(error.problems)
        return None


def _given(path: Path, root: Path) -> Path:
    """A file named on the command line: from the working folder, else from the project's root."""
    return path if path.exists() or not (root / path).exists() else root / path


def lower_workflow(draft: Draft) -> None:
    """Ensures: `graphs[root]` and every sub-workflow's graph."""
    if draft.workflow is None:
        return
    draft.lowering = Lowering(problems=draft.problems)
    by = doc_of(draft.experiment, draft.workflow.spec) if draft.experiment else None
    draft.root = draft.lowering.workflow(doc_of(draft.workflow), draft.params, "workflow", "params", by=by)
    draft.graphs = draft.lowering.graphs


def read_functions(draft: Draft) -> None:
    """Ensures: users' functions have signatures and hashes."""
    draft.graphs = bind_functions(draft.graphs, draft.root_dir, draft.problems)


def verify(draft: Draft) -> None:
    """Every rule that spans objects, for graphs that changed since they were last verified; then the plan's
    own.
    """
    changed = {key for key, graph in draft.graphs.items() if draft.verified.get(key) is not graph}
    incomplete = draft.lowering.incomplete if draft.lowering else set()
    if changed and draft.root is not None:
        docs = draft.lowering.docs if draft.lowering else {}
        draft.problems.extend(verify_graphs(draft.root, draft.graphs, changed, incomplete, docs))
        draft.verified = dict(draft.graphs)
    if draft.plan is not None:
        draft.problems.extend(plan_problems(draft.plan, draft.experiment))


def link_mapping(draft: Draft) -> None:
    """Ensures: every member is played by one policy of a completely resolved model."""
    if draft.mapping is None or draft.root is None or draft.experiment is None:
        return
    declared = [
        p.prefix + role.name for p in graphs_below(draft.root, draft.graphs) for role in p.graph.roles
    ]
    team = team_of(draft.root, draft.graphs)
    models = link_models(draft.mapping, draft.experiment, Names.of(team, declared), draft.problems)
    models = link_chats(models, draft.mapping, team, draft.problems)
    if draft.runtime_document is not None:
        models = link_places(models, draft.mapping, draft.runtime_document, draft.problems)
    draft.models = models


def link_plan(draft: Draft) -> None:
    """Ensures: a plan without passes."""
    if draft.experiment is None:
        return
    spec = draft.experiment.spec
    graph = draft.graphs.get(draft.root or "")
    algorithm = resolve_algorithm(draft.experiment, draft.problems, graph, draft.models)
    data = link.link_data(draft.experiment, graph, draft.problems)
    link.option_problems(draft.experiment, graph, draft.problems)
    if graph is None or draft.models is None or draft.runtime is None or draft.root is None:
        return
    policies = [p for m in draft.models for p in m.policies]
    policy_of = {member: p.name for p in policies for member in p.roles}
    trained = {member for p in policies if p.train for member in p.roles}
    sampler = link.default_sampler(algorithm)
    draft.plan = Plan(
        root=draft.root,
        workflows=draft.graphs,
        models=draft.models,
        policy_of=policy_of,
        data=data,
        algorithm=algorithm,
        warm_start=spec.warm_start,
        init=spec.init,
        train=spec.train,
        eval=spec.eval,
        runtime=draft.runtime,
        sampler=sampler,
        stages=default_stages(graph, algorithm),
        groups=link.expected_groups(draft.root, draft.graphs, sampler.samples, trained),
        critics=link_critics(algorithm, draft.models, draft.graphs, draft.experiment, draft.problems),
        root_dir=str(draft.root_dir),
    )


def find_starts(draft: Draft) -> None:
    """Ensures: every earlier run that the plan starts from is one checkpoint with its hash."""
    if draft.plan is not None and draft.experiment is not None and draft.mapping is not None:
        draft.plan = link_starts(draft.plan, draft.experiment, draft.mapping, draft.problems)


def apply_passes(draft: Draft) -> None:
    """Ensures: the plan is what its passes made of it."""
    if draft.plan is not None and draft.experiment is not None:
        draft.plan = link.apply_passes(draft.plan, draft.experiment, draft.problems)
        draft.graphs = draft.plan.workflows
    elif draft.experiment is not None:
        link.apply_passes(Plan(root="", workflows={}), draft.experiment, draft.problems)


def seal(draft: Draft) -> None:
    """Ensures: the plan has its digest."""
    if draft.plan is not None and not link.problems_are_fatal(draft.problems):
        draft.plan = sealed(draft.plan)


Step = Callable[[Draft], None]
WORKFLOW_STEPS: tuple[Step, ...] = (lower_workflow, read_functions, verify)
STEPS: tuple[Step, ...] = (
    read_documents,
    lower_workflow,
    read_functions,
    verify,
    link_mapping,
    link_plan,
    find_starts,
    verify,
    apply_passes,
    verify,
    seal,
)


def run_steps(draft: Draft, steps: tuple[Step, ...]) -> Draft:
    """Run the steps in order; problems stay in the draft."""
    for step in steps:
        step(draft)
    return draft
