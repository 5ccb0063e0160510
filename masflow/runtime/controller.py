"""The hub: warm start, held-out score, then step after step until the run's end; reads from top to bottom.

Holds text, ids and scalars, never token tensors. `training` says what a step does, `rundir` what a folder is.
"""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from masflow.compiler import dump_plan
from masflow.compiler.plan import STAGES, Plan, PolicyIR
from masflow.compiler.rows import Task, load_tasks
from masflow.errors import RunError
from masflow.memory.recall import Snapshot
from masflow.rl.score import score
from masflow.runtime import alarms, checkpoints, garbage
from masflow.runtime import evaluate as evaluation
from masflow.runtime.checkpoints import RunState, writing
from masflow.runtime.judge import judge_of
from masflow.runtime.memories import Memories, view_of
from masflow.runtime.resuming import check_begun, has_eval, open_state
from masflow.runtime.rundir import Interrupted, RunDir, StopFlag
from masflow.runtime.schedule import stable_seed
from masflow.runtime.supervised import demonstrations, warm_start
from masflow.runtime.team import Team
from masflow.runtime.tracedb import TraceDb
from masflow.runtime.tracking import Trackers, require
from masflow.runtime.training import Work, run_stages, step_record
from masflow.tools import ToolBox
from masflow.trace import Scored

OnEvent = Callable[[str, dict[str, Any]], None]
"""(kind, facts): start, warm_start, eval_progress, eval, stage, train, warning, checkpoint, end."""
SAVE_WARM_EVERY_S = 60.0


@dataclass
class Run:
    """One run while it goes on; made by `train`, handed to the functions below."""

    plan: Plan
    dir: RunDir
    team: Team
    toolbox: ToolBox
    trace: TraceDb
    state: RunState
    stop: StopFlag
    on_event: OnEvent
    trackers: Trackers
    memories: Memories | None = None
    saved: RunState | None = None
    warned: set[str] = field(default_factory=set)

    def record(self, record: dict[str, Any]) -> None:
        self.dir.append(record)
        for warning in self.trackers.record(record):
            self.warn(warning)
        self.on_event(record["kind"], record)

    def warn(self, warning: str) -> None:
        """Tell a warning once, however the numbers in it change."""
        kind = re.sub(r"[0-9]+", "#", warning)
        if kind not in self.warned:
            self.warned.add(kind)
            self.on_event("warning", {"message": warning})

    def save(self) -> Path:
        groups: dict[str, checkpoints.Saver] = dict(self.team.groups)
        with writing("a checkpoint", self.dir.path):
            self.state.metrics_bytes = self.dir.sync_metrics()
            place = checkpoints.save(self.dir.checkpoints, self.state, groups)
            best = checkpoints.best_step(self.state, self.dir.checkpoints)
            kept = self.plan.train
            checkpoints.prune(self.dir.checkpoints, kept.keep, best, every=kept.keep_every)
        self.saved = copy.deepcopy(self.state)
        self.on_event("checkpoint", {"path": str(place), "step": self.state.step})
        return place


def train(
    plan: Plan,
    out: Path,
    resume: bool = False,
    on_event: OnEvent = lambda kind, facts: None,
    *,
    stop: StopFlag | None = None,
    only_warm_start: bool = False,
    experiment_text: str = "",
) -> dict[str, Any]:
    """Run a plan in the folder `out`, from its beginning or from its last checkpoint.

    Args:
        on_event: told what happens; never changes it.
        stop: ask for a stop through it; the run saves a checkpoint and raises Interrupted.
        only_warm_start: end after the warm start and the evaluation that follows it (`masflow sft`).
        experiment_text: the resolved experiment, kept beside the plan.
    Returns:
        `{"steps", "eval_before", "eval_after", "out"}`.
    Raises:
        RunError: nothing to do, the folder is taken, another plan's checkpoint, or the run can't go on.
        Interrupted: stopped on request, with a checkpoint.
    """
    stop = stop or StopFlag()
    folder = RunDir(out)
    require(plan.runtime.tracking)
    if resume:
        check_begun(folder)
    with ExitStack() as stack:
        stack.enter_context(folder.held())
        state = open_state(plan, folder, resume, only_warm_start)
        stack.enter_context(stop.listening())
        with writing("the plan", folder.path):
            checkpoints.put_text(folder.plan, dump_plan(plan))
            if experiment_text:
                checkpoints.put_text(folder.experiment, experiment_text)
        seed_globals(plan.train.seed, "start")
        team = Team(with_init(plan, fresh=checkpoints.latest(folder.checkpoints) is None), folder.path, stop)
        stack.callback(team.close)
        trace = TraceDb(folder.path / "trace.sqlite")
        stack.callback(trace.close)
        memories = Memories.of(plan, folder.path)
        if memories is not None:
            stack.callback(memories.close)
        trackers = Trackers(plan, folder.path, state, resume)
        stack.callback(trackers.close)
        garbage.started()
        run = Run(plan, folder, team, ToolBox(plan), trace, state, stop, on_event, trackers, memories)
        try:
            result = go(run, only_warm_start)
            for warning in trackers.close():
                run.warn(warning)
            return result
        except Interrupted:
            if run.saved != run.state:
                run.save()
            message = f"at {run.state.name.replace('_', ' ')}; continue with --resume --out {folder.path}"
            raise Interrupted(message) from None


def go(run: Run, only_warm_start: bool) -> dict[str, Any]:
    """The run itself, from wherever its state stands."""
    tasks = [] if only_warm_start else training_tasks(run.plan)
    announce(run)
    state, last = run.state, 0 if only_warm_start else run.plan.train.steps
    if run.memories is not None and state.step == 0:
        run.memories.begin_with(partial(paid_demonstrations, run))
    if not state.warmed:
        teach(run)
    if state.step == 0 and run.plan.algorithm.kl.weight:
        run.team.snapshot_reference()
    if state.step == 0:
        run.team.start_critics()
    while True:
        if (
            due(run, run.plan.train.eval_every, last)
            and str(state.step) not in state.evals
            and has_eval(run.plan)
        ):
            held_out(run)
        every = (run.plan.train.save_every or run.plan.train.eval_every, run.plan.train.keep_every)
        if any(due(run, steps, last) for steps in every) and run.saved != state:
            run.save()
        if state.step >= last:
            return finish(run)
        step(run, tasks)


def due(run: Run, every: int | None, last: int) -> bool:
    """True at the start, at the end, and at every multiple of `every`."""
    now = run.state.step
    return now in (0, last) or now > last or (every is not None and now % every == 0)


def announce(run: Run) -> None:
    """Load what the state was saved with, or what `init` names."""
    place = checkpoints.latest(run.dir.checkpoints)
    groups: dict[str, checkpoints.Saver] = dict(run.team.groups)
    if place is not None:
        run.state = checkpoints.restore(place, groups)
        run.saved = copy.deepcopy(run.state)
        run.trace.cut(run.state.step)
    if run.memories is not None:
        run.memories.begin(run.state.step)
    facts = {"models": {name: group.describe() for name, group in run.team.groups.items()}}
    run.on_event(
        "start", {"out": str(run.dir.path), "step": run.state.step, "resumed": place is not None, **facts}
    )


def teach(run: Run) -> None:
    """The warm start, from where it stands to its end; optimizers begin afresh after it."""
    saved_at = time.monotonic()

    def on_step(done: int, metrics: dict[str, Any]) -> None:
        nonlocal saved_at
        run.state.warm_step = done
        run.record({"kind": "warm_start", "step": done, "policies": metrics})
        if time.monotonic() - saved_at > SAVE_WARM_EVERY_S:
            run.save()
            saved_at = time.monotonic()
        run.stop.check()

    memory = run.memories.view() if run.memories is not None and run.memories.is_taught else None
    warm_start(run.plan, run.team, run.state.warm_step, on_step, run.toolbox, memory)
    run.team.clear_rows()
    run.team.reset_optimizers()
    run.state.warmed = True


def paid_demonstrations(run: Run, memory: Snapshot) -> list[Scored]:
    """The warm start's demonstrations with their rewards, for a memory that begins with them."""
    told = demonstrations(run.plan, run.toolbox, memory)
    return score(run.plan, told, judge_of(run.plan, run.team.generate))


def held_out(run: Run) -> None:
    """Score the held-out rows and keep the result under the step."""
    plan, began = run.plan, time.perf_counter()

    def on_chunk(done: int, total: int) -> None:
        run.on_event("eval_progress", {"done": done, "total": total})

    found = evaluation.evaluate(
        plan,
        run.team,
        run.toolbox,
        limit=plan.eval.limit,
        samples=plan.eval.samples,
        step=run.state.step,
        on_chunk=on_chunk,
        on_greedy=lambda scored: run.trace.add_trajectories(run.state.step, "eval", scored),
        memory=view_of(run.memories),
    )
    for warning in run.team.incidents():
        run.warn(warning)
    run.team.clear_rows()
    run.state.evals[str(run.state.step)] = found
    seconds = {"total_s": round(time.perf_counter() - began, 4)}
    run.record({"kind": "eval", "step": run.state.step, **found, "time": seconds})


def step(run: Run, tasks: Sequence[Task]) -> None:
    """One training step; the state moves when its updates are done, and nothing stops it in between."""
    state, plan = run.state, run.plan
    before_update = STAGES[: STAGES.index("update")]
    seed_globals(plan.train.seed, state.step)
    work = Work(plan, run.team, run.toolbox, tasks, state.step + 1, state.position, memories=run.memories)

    def on_stage(work: Work, name: str) -> None:
        run.on_event("stage", {"step": work.step, "stage": name})
        if name == "sample":
            for warning in alarms.truncation(work):
                run.warn(warning)
        if name in before_update:
            run.stop.check()

    run_stages(work, on_stage)
    state.step, state.position = work.step, work.position + work.num_tasks
    record = step_record(work)
    with writing("trace.sqlite", run.dir.path):
        run.trace.add_trajectories(work.step, "train", work.played(), work.advantages())
        run.trace.add_metrics(work.step, record)
    run.record(record)
    assert work.batch is not None
    failures = {f"unscored: {text}" for one in work.scored for text in one.failures}
    warnings = (*run.team.incidents(), *alarms.broken(work), *sorted(failures)[:3], *work.batch.warnings)
    for warning in warnings:
        run.warn(warning)
    reason = alarms.idle(work, state.idle)
    if reason:
        run.save()
        raise RunError(reason, "see 'batch' and 'roles' in metrics.jsonl; or raise train.patience")


def with_init(plan: Plan, fresh: bool) -> Plan:
    """The plan whose policies start from the experiment's `init`; a run with a checkpoint starts there."""

    def policy(p: PolicyIR) -> PolicyIR:
        return replace(p, init=(p.init or plan.init) if fresh else None)

    models = tuple(replace(m, policies=tuple(policy(p) for p in m.policies)) for m in plan.models)
    return replace(plan, models=models)


def training_tasks(plan: Plan) -> list[Task]:
    """All training tasks. Raises RunError when there are none, SpecError for a row that misses a field."""
    if not plan.data.get("train"):
        raise RunError("the experiment has no training data", "give it data.train")
    tasks = load_tasks(plan, "train")
    if not tasks:
        raise RunError("the training data has no rows", "add rows to data.train")
    return tasks


def seed_globals(seed: int, step: int | str) -> None:
    """Make the global generators, which users' functions may use, depend on the step alone."""
    random.seed(stable_seed("globals", seed, step))
    np.random.seed(stable_seed("numpy", seed, step) % 2**32)
    torch.manual_seed(stable_seed("torch", seed, step))


def finish(run: Run) -> dict[str, Any]:
    """The run's result."""
    evals = run.state.evals
    result = {
        "steps": run.state.step,
        "eval_before": evals.get("0"),
        "eval_after": evals.get(str(run.state.step)) if run.state.step else None,
        "out": str(run.dir.path),
    }
    run.on_event("end", result)
    return result
