"""What the commands do with a plan: a run or several seeds of it, an evaluation, one episode.

Knows the controller, not its inside; prints results, leaves exit codes to the command line.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
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
from masflow.runtime.progress import Display
from masflow.runtime.report import result_text
from masflow.runtime.rundir import Interrupted, RunDir
from masflow.runtime.seeds import SeedResult, draw_seeds, summary, summary_text, write_summary
from masflow.timelimit import prints_aside


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

    A seed that fails stops none of the others: it is told of, and raised when they are done. What the seeds
    reached together stands in `out/seeds.json` and `out/curves.png` after each of them.

    Raises:
        SpecError, RunError, Interrupted: as `train`; the seeds that are done stay done.
    """
    files = (experiment, mapping, runtime)
    first = compile_experiment(
        experiment, mapping=mapping, runtime=runtime, overrides=overrides, on_warning=warned
    )
    folder = out or default_out(experiment, resume)
    if seeds == 1:
        text = resolved(*files, overrides)
        with prints_aside(as_json):
            result = shown_run(first, folder, resume, only_warm_start, text)
        tell(result, experiment, as_json, options_of(mapping, overrides))
        return [result]
    numbers = range(first.train.seed, first.train.seed + seeds)
    if not resume:
        refuse_used(folder, numbers)
    ended: list[SeedResult] = []
    for seed in numbers:
        changed = {**overrides, "train.seed": str(seed)}
        plan = (
            first
            if seed == first.train.seed
            else compile_experiment(experiment, mapping=mapping, runtime=runtime, overrides=changed)
        )
        with prints_aside(as_json):
            ended.append(run_seed(plan, folder, resume, only_warm_start, resolved(*files, changed)))
        together(ended, folder)
        if ended[-1].result is not None and not as_json:
            tell(ended[-1].result, experiment, False, options_of(mapping, changed))
    found = summary(ended, folder.resolve())
    print(json.dumps(found, default=str) if as_json else summary_text(found), flush=True)
    failed = [one for one in ended if one.error]
    if failed:
        which = ", ".join(str(one.seed) for one in failed)
        message = f"{len(failed)} of {seeds} seeds failed: {which}; the others are done: {folder}/seeds.json"
        raise RunError(message, f"mend what is said above, then add --resume --out {folder}")
    return [one.result for one in ended if one.result is not None]


def refuse_used(folder: Path, seeds: Iterable[int]) -> None:
    """Raises RunError before the first seed begins where any of them has run already."""
    used = [place for seed in seeds if RunDir(place := folder / f"seed_{seed}").used()]
    if used:
        message = f"{used[0]} holds a run already"
        raise RunError(message, "add --resume to continue the seeds, or choose another --out")


def run_seed(plan: Plan, folder: Path, resume: bool, only_warm_start: bool, text: str) -> SeedResult:
    """One of several seeds: done already, trained, or failed; an interruption goes on."""
    seed = plan.train.seed
    place = folder / f"seed_{seed}"
    again = resume and RunDir(place).used()
    if again and (done := finished(plan, place, only_warm_start)):
        return SeedResult(seed, place, done)
    try:
        return SeedResult(seed, place, shown_run(plan, place, again, only_warm_start, text))
    except RunError as error:
        print(f"seed {seed} failed: {error}", file=sys.stderr, flush=True)
        return SeedResult(seed, place, error=error.message)
    except Interrupted:
        message = f"in seed {seed}; continue with the same words and --resume --out {folder}"
        raise Interrupted(message) from None


def together(ended: Sequence[SeedResult], folder: Path) -> None:
    """Write what the seeds reached so far."""
    with writing("the summary of the seeds", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_summary(summary(ended, folder.resolve()), folder)
        records = {one.seed: RunDir(one.out).records() for one in ended if one.result is not None}
        draw_seeds(records, folder / "curves.png", folder / "curves.svg")


def warned(problem: Problem) -> None:
    """Say what `masflow check` warns of; the run goes on."""
    print(f"warning: {problem}", file=sys.stderr, flush=True)


def train(plan: Plan, place: Path, *words: Any, **options: Any) -> dict[str, Any]:
    """As `hub.train`; torch is imported here, once the files are known to be right."""
    from masflow.runtime import hub

    return hub.train(plan, place, *words, **options)


def shown_run(plan: Plan, place: Path, resume: bool, only_warm_start: bool, text: str) -> dict[str, Any]:
    """Train before a display, and draw the curves however it ends."""
    warm = plan.warm_start.steps if plan.warm_start and not plan.init else 0
    try:
        with Display(plan.train.steps, warm) as display:
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
