"""What the commands do with a plan: a run or several seeds of it, an evaluation, one episode.

Knows the controller, not its inside; prints results, leaves exit codes to the command line.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ruamel.yaml import YAML

from masflow.compiler import compile_experiment
from masflow.compiler.overrides import overridden
from masflow.compiler.plan import ModelIR, Plan
from masflow.compiler.rows import load_tasks
from masflow.errors import Problem, RunError, SpecError
from masflow.project import load
from masflow.runtime import checkpoints
from masflow.runtime import evaluate as evaluation
from masflow.runtime.controller import train
from masflow.runtime.progress import Display, number
from masflow.runtime.report import result_text
from masflow.runtime.rundir import RunDir
from masflow.runtime.team import Team
from masflow.tools import ToolBox
from masflow.trace import EpisodeKey


def launch(
    experiment: Path,
    mapping: Path | None,
    runtime: Path | None,
    overrides: Mapping[str, str],
    out: Path | None,
    resume: bool,
    *,
    seeds: int = 1,
    as_json: bool = False,
    only_warm_start: bool = False,
) -> list[dict[str, Any]]:
    """Train one seed into `out`, or several into `out/seed_N`, and print each result.

    Raises:
        SpecError, RunError, Interrupted: as `train`; the seeds that are done stay done.
    """
    first = compile_experiment(experiment, mapping=mapping, runtime=runtime, overrides=overrides)
    folder = out or default_out(experiment, resume)
    results = []
    for offset in range(seeds):
        place = folder / f"seed_{first.train.seed + offset}" if seeds > 1 else folder
        changed = {**overrides, "train.seed": str(first.train.seed + offset)} if seeds > 1 else overrides
        plan = (
            compile_experiment(experiment, mapping=mapping, runtime=runtime, overrides=changed)
            if offset
            else first
        )
        again = resume and (seeds == 1 or RunDir(place).used())
        if again and seeds > 1 and (done := finished(plan, place, only_warm_start)):
            results.append(done)
            continue
        warm = plan.warm_start.steps if plan.warm_start and not plan.init else 0
        text = resolved(experiment, mapping, runtime, changed)
        with Display(plan.train.steps, warm) as display:
            results.append(
                train(plan, place, again, display, only_warm_start=only_warm_start, experiment_text=text)
            )
        tell(results[-1], experiment, as_json and seeds == 1)
    if seeds > 1:
        summary = over_seeds(results)
        print(json.dumps(summary, default=str) if as_json else seeds_text(summary), flush=True)
    return results


def resolved(
    experiment: Path, mapping: Path | None, runtime: Path | None, overrides: Mapping[str, str]
) -> str:
    """The experiment as YAML with the command's changes in it; paths stay as they were written."""
    spec: Any = overridden(load(experiment, "experiment"), overrides).spec
    for key, file in (("mapping", mapping), ("runtime", runtime)):
        if file is not None:
            spec = spec.model_copy(update={key: load(file, key).spec})
    yaml = YAML()
    yaml.default_flow_style = False
    text = StringIO()
    yaml.dump(spec.model_dump(mode="json", by_alias=True, exclude_unset=True), text)
    return text.getvalue()


def default_out(experiment: Path, resume: bool, root: Path = Path("runs")) -> Path:
    """`runs/<name>-<time>`; with resume the newest folder of that name.

    Raises:
        RunError: there is none to resume.
    """
    if not resume:
        return root / f"{experiment.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    found = sorted(root.glob(f"{experiment.stem}-*-*"), key=lambda p: p.name)
    if not found:
        raise RunError(f"no run of {experiment.stem} in {root}", "name the run's folder with --out")
    return found[-1]


def finished(plan: Plan, place: Path, only_warm_start: bool) -> dict[str, Any] | None:
    """The result of a seed that is done already, read from its checkpoint."""
    last = checkpoints.latest(place / "checkpoints")
    state = checkpoints.read_state(last) if last else None
    steps = 0 if only_warm_start else plan.train.steps
    if state is None or state.digest != plan.digest or not state.warmed or state.step < steps:
        return None
    after = state.evals.get(str(state.step)) if steps else None
    return {"steps": state.step, "eval_before": state.evals.get("0"), "eval_after": after, "out": str(place)}


def tell(result: dict[str, Any], experiment: Path, as_json: bool) -> None:
    print(
        json.dumps(result, ensure_ascii=False, default=str) if as_json else result_text(result, experiment),
        flush=True,
    )


def over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of the headline, before and after."""

    def spread(key: str) -> dict[str, Any] | None:
        found = [evaluation_score(result[key]) for result in results if result[key]]
        known = [value for value in found if value is not None]
        if not known:
            return None
        return {"mean": fmean(known), "sd": stdev(known) if len(known) > 1 else 0.0, "seeds": known}

    return {
        "steps": results[-1]["steps"],
        "eval_before": spread("eval_before"),
        "eval_after": spread("eval_after"),
        "out": str(Path(results[-1]["out"]).parent),
    }


def evaluation_score(found: dict[str, Any]) -> float | None:
    return found["metrics"].get(found["headline"])


def seeds_text(summary: dict[str, Any]) -> str:
    """Over seeds: a line before, a line after."""
    lines = []
    for key, word in (("eval_before", "before"), ("eval_after", "after")):
        if found := summary[key]:
            each = " ".join(number(value) for value in found["seeds"])
            lines.append(f"held out {word}: {number(found['mean'])} ± {number(found['sd'])}   ({each})")
    return "\n".join(lines)


class Loaded:
    """A plan's team with the weights of a checkpoint, or as its bases are; a context manager.

    The run that holds the checkpoint is only read: what an engine writes goes to a temporary folder.
    """

    def __init__(self, plan: Plan, reference: str | None):
        self.reference = reference
        models = tuple(_without_init(model) if reference else model for model in plan.models)
        self.plan = replace(plan, models=models)
        self._folder = tempfile.TemporaryDirectory(prefix="masflow-")

    def __enter__(self) -> Team:
        folder = Path(self._folder.name)
        place = None
        if self.reference is not None:
            place = checkpoints.find(self.reference, (Path.cwd(), Path(self.plan.root_dir)))
            base = place.parent.parent / "base"
            self.plan = with_seed_of(self.plan, place.parent.parent)
            if base.is_dir():
                (folder / "base").symlink_to(base.resolve())
        self.team = Team(self.plan, folder)
        if place is not None:
            checkpoints.restore(place, dict(self.team.groups))
        return self.team

    def __exit__(self, *error: object) -> None:
        self.team.close()
        self._folder.cleanup()


def _without_init(model: ModelIR) -> ModelIR:
    return replace(model, policies=tuple(replace(p, init=None) for p in model.policies))


def with_seed_of(plan: Plan, run: Path) -> Plan:
    """The plan with the seed of a run, from which its bases were made."""
    try:
        seed = json.loads((run / "plan.json").read_text(encoding="utf-8"))["train"]["seed"]
    except (OSError, ValueError, KeyError):
        return plan
    return replace(plan, train=plan.train.model_copy(update={"seed": seed}))


def evaluate_checkpoint(
    plan: Plan, checkpoint: str | None, split: str, limit: int | None, samples: int
) -> dict[str, Any]:
    """Score a split under a checkpoint, or under the untrained models.

    Raises:
        RunError: unknown split, no rows, or a checkpoint of other models.
    """
    known = [name for name in plan.data if name != "warm_start"]
    if split not in known:
        raise RunError(
            f"unknown split '{split}'; known: {', '.join(known) or 'none'}", "name one of data's splits"
        )
    with Loaded(plan, checkpoint) as team:
        return evaluation.evaluate(plan, team, ToolBox(plan), split=split, limit=limit, samples=samples)


def parse_task(text: str) -> dict[str, Any]:
    """A task from the command line. Raises SpecError when it isn't a JSON object."""
    try:
        task = json.loads(text)
    except ValueError as error:
        raise SpecError(
            Problem("--task", 0, "", "bad-task", f"not JSON: {error}", 'write {"field": "value"}')
        ) from None
    if not isinstance(task, dict):
        problem = Problem("--task", 0, "", "bad-task", f"a task is a JSON object, not {type(task).__name__}")
        raise SpecError(problem)
    return task


def first_task(plan: Plan) -> dict[str, Any]:
    """The first held-out (or training) row."""
    split = next((name for name in ("eval", "train") if plan.data.get(name)), None)
    if split is None:
        raise RunError("the experiment has no data to take a task from", "give one with --task")
    tasks = load_tasks(plan, split)
    if not tasks:
        raise RunError(f"the split '{split}' has no rows", "give a task with --task")
    return tasks[0].row


def episode_key(plan: Plan) -> EpisodeKey:
    return EpisodeKey(plan.train.seed, "run", 0, 0, "0", 0)
