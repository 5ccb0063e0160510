"""The compiler: documents in, a plan out. Imports neither torch nor ray, here or below.

`compile_workflow`, `compile_experiment`, `check`, `dump_plan` and `load_plan` are its whole face; they import
what they need when they are called, so that the graph and plan classes stay cheap to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from masflow.errors import Problem, SpecError

if TYPE_CHECKING:
    from masflow.compiler.graph import Graph
    from masflow.compiler.plan import Plan
    from masflow.project import Loaded

__all__ = ["check", "compile_experiment", "compile_workflow", "dump_plan", "load_plan"]


def compile_workflow(workflow: Loaded[Any] | Path | str) -> tuple[str, dict[str, Graph]]:
    """Compile one workflow with its default params.

    Returns:
        (the root's name, graphs by name: the root and its sub-workflows).
    Raises:
        SpecError: every problem found; warnings alone don't raise.
    """
    from masflow.compiler.pipeline import WORKFLOW_STEPS, Draft, run_steps

    loaded = _loaded(workflow, "workflow")
    draft = run_steps(Draft(loaded.root, workflow=loaded), WORKFLOW_STEPS)
    _raise(draft.problems)
    assert draft.root is not None
    return draft.root, draft.graphs


def compile_experiment(
    experiment: Loaded[Any] | Path | str,
    *,
    mapping: Path | str | None = None,
    runtime: Path | str | None = None,
    overrides: Mapping[str, str] | None = None,
    on_warning: Callable[[Problem], None] | None = None,
) -> Plan:
    """Compile an experiment.

    Args:
        mapping, runtime: files that replace the experiment's own.
        overrides: dotted key → YAML text, as `--set` gives them.
        on_warning: told every warning of a plan without errors.
    Raises:
        SpecError: every problem of every document; warnings alone don't raise.
    """
    draft = _experiment_draft(experiment, mapping, runtime, overrides or {})
    _raise(draft.problems)
    if on_warning:
        for warning in sorted(set(draft.problems)):
            on_warning(warning)
    assert draft.plan is not None
    return draft.plan


def _experiment_draft(experiment: Any, mapping: Any, runtime: Any, overrides: Mapping[str, str]) -> Any:
    from masflow.compiler.pipeline import STEPS, Draft, run_steps

    loaded = _loaded(experiment, "experiment")
    draft = Draft(
        loaded.root,
        experiment=loaded,
        overrides=overrides,
        mapping_file=Path(mapping) if mapping is not None else None,
        runtime_file=Path(runtime) if runtime is not None else None,
    )
    return run_steps(draft, STEPS)


def check(path: Path | str) -> list[Problem]:
    """Every problem and warning of a document of any kind; bad input never raises.

    Args:
        path: a YAML file; a Python file, of which every `@workflow` is checked; or `file.py:function`.
    """
    from masflow.compiler.pipeline import WORKFLOW_STEPS, Draft, run_steps
    from masflow.decorators import decorated

    file = Path(path)
    names = list(decorated(file)) if file.suffix == ".py" and file.is_file() else []
    if len(names) > 1:
        return sorted({problem for name in names for problem in check(f"{path}:{name}")})
    try:
        loaded = _loaded(path, None)
        if loaded.kind == "workflow":
            found = run_steps(Draft(loaded.root, workflow=loaded), WORKFLOW_STEPS).problems
        elif loaded.kind == "experiment":
            found = _experiment_draft(loaded, None, None, {}).problems
        else:
            found = []
    except SpecError as error:
        found = list(error.problems)
    return sorted(set(found))


def dump_plan(plan: Plan) -> str:
    """The plan as JSON text; `load_plan` reads it back to an equal one."""
    from masflow.compiler import digest

    return digest.dump_plan(plan)


def load_plan(text: str) -> Plan:
    """Read a plan.json. Raises RunError when it isn't one of this version."""
    from masflow.compiler import digest

    return digest.load_plan(text)


def _loaded(document: Any, kind: str | None) -> Loaded[Any]:
    """A document by its file, or `file.py:function`, unless it is one already."""
    from masflow.errors import Where
    from masflow.project import load

    if not isinstance(document, (str, Path)):
        return document
    from masflow.compiler.programs import load_workflow, split_ref

    file, name = split_ref(str(document))
    if kind in (None, "workflow") and file.endswith(".py") and Path(file).is_file():
        return load_workflow(Path(file), name, Where(str(document)))
    if file.endswith(".py") and Path(file).is_file():
        message = f"this is a Python file; the kind of document that belongs here is '{kind}'"
        fix = f"name a YAML file; an experiment's says 'workflow: {document}'"
        raise SpecError(Problem.at(Where(str(document)), "wrong-document", message, fix))
    return load(Path(document), kind)


def _raise(problems: list[Problem]) -> None:
    if any(not p.code.startswith("warn-") for p in problems):
        raise SpecError(p for p in problems if not p.code.startswith("warn-"))
