"""Where a run begins: afresh, or from its folder's last checkpoint; refuses to do nothing or to mix plans."""

from __future__ import annotations

import json

from masflow.compiler import dump_plan
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.runtime import checkpoints
from masflow.runtime.checkpoints import RunState
from masflow.runtime.differing import told
from masflow.runtime.rundir import RunDir


def has_eval(plan: Plan) -> bool:
    return bool(plan.data.get("eval"))


def check_begun(folder: RunDir) -> None:
    """Raises RunError when there is nothing to resume in a folder; makes nothing there."""
    if not folder.begun():
        raise RunError(
            f"{folder.path} holds no run to resume", "leave --resume out, or name the run's folder with --out"
        )


def open_state(plan: Plan, folder: RunDir, resume: bool, only_warm_start: bool) -> RunState:
    """The state that the run begins from; nothing is loaded yet.

    Raises:
        RunError: the folder is used, is another plan's, or nothing is left to do.
    """
    state = found_state(plan, folder, resume, only_warm_start)
    if resume:
        folder.cut_metrics(state.metrics_bytes)
    return state


def found_state(plan: Plan, folder: RunDir, resume: bool, only_warm_start: bool) -> RunState:
    """As `open_state`, which leaves the folder as it is: to refuse a run before anything is started."""
    if resume:
        check_begun(folder)
        refuse_other_plan(plan, folder)
    elif folder.used():
        raise RunError(
            f"{folder.path} holds a run already", "add --resume to continue it, or choose another --out"
        )
    place = checkpoints.latest(folder.checkpoints) if resume else None
    if place is None:
        check_zero(plan, RunState(), only_warm_start)
        return RunState(digest=plan.digest, warmed=plan.warm_start is None or plan.init is not None)
    state = checkpoints.read_state(place)
    check_zero(plan, state, only_warm_start)
    return state


def refuse_other_plan(plan: Plan, folder: RunDir) -> None:
    """Raises RunError, with the differences, when the folder's run was made from another plan."""
    try:
        old = json.loads(folder.plan.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise ValueError("it is no plan")
    except (OSError, ValueError) as error:
        raise RunError(f"{folder.plan} can't be read: {error}", "start again in another folder") from error
    if old.get("digest") == plan.digest:
        return
    found = told(json.loads(dump_plan(plan)), old) or ["how it was compiled: by another version of masflow"]
    listed = "\n".join(f"  {line}" for line in found[:12]) + ("\n  …" if len(found) > 12 else "")
    fix = "resume with the experiment that the run was made from, or start a new run with init:"
    raise RunError(f"{folder.path} was made from another plan; it differs in\n{listed}", fix)


def check_zero(plan: Plan, state: RunState, only_warm_start: bool) -> None:
    """Raises RunError when the run would do nothing."""
    if not any(policy.train for policy in plan.policies):
        fix = "write `train: full` or `train: lora` for one in the mapping, or score them with masflow eval"
        raise RunError("every model is frozen: there is nothing to train", fix)
    warm = plan.warm_start.steps if plan.warm_start is not None and plan.init is None else 0
    pending = has_eval(plan) and str(state.step) not in state.evals and state.digest != ""
    if only_warm_start:
        if warm == 0:
            raise RunError(
                "the experiment has no warm start to run", "give it warm_start: with data and steps"
            )
        if state.warmed and not pending:
            raise RunError(
                "the warm start is done already: nothing is left to do",
                "train on with masflow train --resume",
            )
    elif plan.train.steps == 0:
        raise RunError(
            "train.steps is 0: the run would do nothing",
            "set train.steps, or use masflow sft for the warm start alone",
        )
    elif state.step >= plan.train.steps and not pending:
        message = f"the run has done {state.step} of {plan.train.steps} steps: nothing is left to do"
        raise RunError(message, f"raise it: --set train.steps={2 * state.step}")
