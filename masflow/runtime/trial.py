"""What a plan does without training: a split scored under a checkpoint, or one episode played.

Leaves the run that a checkpoint belongs to as it is; prints only what a person is asked.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from masflow.compiler.plan import ModelIR, Plan
from masflow.compiler.rows import field_problem, load_tasks, task_of
from masflow.errors import Problem, RunError, SpecError
from masflow.rl.score import score
from masflow.runtime import checkpoints, garbage
from masflow.runtime import evaluate as evaluation
from masflow.runtime.controller import with_init
from masflow.runtime.episodes import play
from masflow.runtime.judge import judge_of
from masflow.runtime.memories import remembered
from masflow.runtime.player import Player
from masflow.runtime.schedule import stable_seed
from masflow.runtime.state import EpisodeState
from masflow.runtime.team import Team
from masflow.tools import ToolBox
from masflow.trace import EpisodeKey, Scored


@contextmanager
def loaded(plan: Plan, reference: str | None) -> Iterator[Team]:
    """A plan's team with the weights of a checkpoint, or as it would begin: its `init`, else its bases.

    The run that holds the checkpoint is only read: what an engine writes goes to a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="masflow-") as name, ExitStack() as stack:
        folder, place = Path(name), None
        plan = replace(plan, critics=())  # nothing is compared here
        if reference is not None:
            place = checkpoints.find(reference, (Path.cwd(), Path(plan.root_dir)))
            run = place.parent.parent
            plan = with_seed_of(replace(plan, models=tuple(map(_without_init, plan.models))), run)
            if (run / "base").is_dir():
                (folder / "base").symlink_to((run / "base").resolve())
        team = Team(plan if place is not None else with_init(plan, fresh=True), folder)
        stack.callback(team.close)
        if place is not None:
            checkpoints.restore(place, dict(team.groups))
        garbage.started()
        yield team


def _without_init(model: ModelIR) -> ModelIR:
    return replace(model, policies=tuple(replace(p, init=None) for p in model.policies))


def with_seed_of(plan: Plan, run: Path) -> Plan:
    """The plan with the seed of a run, from which its bases were made."""
    try:
        seed = json.loads((run / "plan.json").read_text(encoding="utf-8"))["train"]["seed"]
    except (OSError, ValueError, KeyError, TypeError):
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
    with loaded(plan, checkpoint) as team, remembered(plan, checkpoint) as memory:
        options = {"split": split, "limit": limit, "samples": samples, "memory": memory}
        return evaluation.evaluate(plan, team, ToolBox(plan), **options)


def parse_task(text: str, plan: Plan) -> dict[str, Any]:
    """A task from the command line; hidden fields may be left out, and rewards that read them are unscored.

    Raises:
        SpecError: it isn't a JSON object with the task's fields.
    """
    row: Any = None
    message = ""
    try:
        row = json.loads(text)
    except ValueError as error:
        message = f"not JSON: {error}"
    if not message and not isinstance(row, dict):
        message = f"a task is a JSON object, not {type(row).__name__}"
    needed = [f for f in plan.graph.task if not f.hidden or (not message and (f.source or f.name) in row)]
    wrong = None if message else field_problem(row, needed)
    message = wrong[2] if wrong else message
    if message:
        example = json.dumps({f.source or f.name: str(f.type) for f in plan.graph.task if not f.hidden})
        raise SpecError(Problem("--task", 0, "", "bad-task", message, f"write {example}"))
    return task_of(row, plan.graph.task)


def first_task(plan: Plan) -> dict[str, Any]:
    """The first held-out (or training) row."""
    split = next((name for name in ("eval", "train") if plan.data.get(name)), None)
    if split is None:
        raise RunError("the experiment has no data to take a task from", "give one with --task")
    tasks = load_tasks(plan, split)
    if not tasks:
        raise RunError(f"the split '{split}' has no rows", "give a task with --task")
    return tasks[0].row


def episode_name(row: dict[str, Any]) -> str:
    """A task's place in an episode's id."""
    return f"{stable_seed(json.dumps(row, sort_keys=True, default=str)):x}"


def run_episode(
    plan: Plan, task: str | None, checkpoint: str | None, resume: str | None, folder: Path
) -> Scored:
    """Play one episode, asking people at the terminal; one that waits for a person is saved under `folder`.

    Raises:
        SpecError: the task doesn't fit; RunError: no such saved episode, or one of another plan.
    """
    if resume is not None:
        state, checkpoint = load_episode(plan, folder, resume, checkpoint)
    else:
        row = parse_task(task, plan) if task is not None else first_task(plan)
        state = EpisodeState((EpisodeKey(plan.train.seed, "run", 0, 0, episode_name(row), 0),), dict(row))
    with loaded(plan, checkpoint) as team, remembered(plan, checkpoint) as memory:
        player = Player(plan, ToolBox(plan), mode="eval", interactive=True, memory=memory)
        while True:
            trajectory = play(player, [state], team.generate)[0]
            if trajectory.outcome != "paused" or not answer_questions(player, state):
                break
        left_out = [
            f.name for f in plan.graph.task if trajectory.task[f.name] is None and not f.type.nullable
        ]
        if left_out:
            scored = Scored(trajectory, {}, {}, {}, (f"the task leaves out {', '.join(left_out)}",))
        else:
            scored = score(plan, [trajectory], judge_of(plan, team.generate))[0]
    place = folder / f"{trajectory.id}.json"
    if trajectory.outcome == "paused":
        folder.mkdir(parents=True, exist_ok=True)
        saved = {"digest": plan.digest, "checkpoint": checkpoint, "state": state.to_json()}
        checkpoints.put_text(place, json.dumps(saved))
    else:
        place.unlink(missing_ok=True)
    return scored


def answer_questions(player: Player, state: EpisodeState) -> bool:
    """Ask the person at the terminal; False when nobody is there."""
    for question in player.questions(state):
        print(f"── {question.node}\n{question.text}", file=sys.stderr)
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return False
            try:
                player.answer(state, question, text)
                break
            except ValueError as error:
                print(f"not understood: {error}", file=sys.stderr)
    return True


def load_episode(
    plan: Plan, folder: Path, name: str, checkpoint: str | None
) -> tuple[EpisodeState, str | None]:
    """A saved episode, and the checkpoint that it was played with unless another is named."""
    place = folder / f"{name}.json"
    if not place.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none"
        raise RunError(
            f"no paused episode '{name}' in {folder}; there: {known}", "name one of those, or its --out"
        )
    try:
        saved = json.loads(place.read_text(encoding="utf-8"))
        state = EpisodeState.from_json(saved["state"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{place} can't be read: {error}", "play the episode again") from error
    if saved["digest"] != plan.digest:
        raise RunError(
            f"episode '{name}' belongs to another plan", "resume it with the experiment it was played with"
        )
    return state, checkpoint or saved["checkpoint"]
