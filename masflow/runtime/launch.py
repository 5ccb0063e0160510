"""What the commands do with a plan: a run or several seeds of it, an evaluation, one episode.

Knows the controller, not its inside; prints results, leaves exit codes to the command line.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ruamel.yaml import YAML

from masflow.compiler import compile_experiment
from masflow.compiler.overrides import overridden
from masflow.compiler.plan import Plan
from masflow.errors import Problem, RunError
from masflow.library import shown_path
from masflow.project import load
from masflow.runtime import checkpoints
from masflow.runtime.checkpoints import writing
from masflow.runtime.curves import draw_curves
from masflow.runtime.hub import train
from masflow.runtime.progress import Display, number
from masflow.runtime.report import result_text
from masflow.runtime.rundir import RunDir


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
    first = compile_experiment(
        experiment, mapping=mapping, runtime=runtime, overrides=overrides, on_warning=warned
    )
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
            results.append(run_one(plan, place, again, display, only_warm_start, text))
        tell(results[-1], experiment, as_json and seeds == 1, options_of(mapping, changed))
    if seeds > 1:
        summary = over_seeds(results)
        print(json.dumps(summary, default=str) if as_json else seeds_text(summary), flush=True)
    return results


def warned(problem: Problem) -> None:
    """Say what `masflow check` warns of; the run goes on."""
    print(f"warning: {problem}", file=sys.stderr, flush=True)


def run_one(
    plan: Plan, place: Path, resume: bool, display: Display, only_warm_start: bool, text: str
) -> dict[str, Any]:
    """Train, and draw the curves however it ends."""
    try:
        return train(plan, place, resume, display, only_warm_start=only_warm_start, experiment_text=text)
    finally:
        folder = RunDir(place)
        with writing("the curves", folder.path):
            draw_curves(folder.records(), folder.path / "curves.png", folder.path / "curves.svg")


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
    return {
        "steps": state.step,
        "eval_before": state.evals.get("0"),
        "eval_after": after,
        "out": str(place.resolve()),
    }


def tell(result: dict[str, Any], experiment: Path, as_json: bool, options: str) -> None:
    print(
        json.dumps(result, ensure_ascii=False, default=str)
        if as_json
        else result_text(result, experiment, options),
        flush=True,
    )


def options_of(mapping: Path | None, overrides: Mapping[str, str]) -> str:
    """What has to be said again so that a checkpoint of the run fits: its mapping, changes of its models."""
    words = ["--mapping", shown_path(mapping)] if mapping is not None else []
    for key, value in overrides.items():
        if key.split(".")[0] in ("base", "mapping", "workflow"):
            words += ["--set", f"{key}={value}"]
    return shlex.join(words)


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
