"""`RUN[@step]`: the checkpoint of an earlier run that a plan starts from; whether it fits.

Reads records and hashes, and never loads weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.errors import Problem, SpecError, Where
from masflow.project import Loaded, Source, resolve
from masflow.spec.mapping import ConfigBase

__all__ = ["HASHES", "best_step", "link_starts", "weights_hash"]

HASHES = "weights.json"
"""In a checkpoint: `{"sha256": hash of all its weights}`."""
_STEP = re.compile(r"(warm|step)_(\d{6,})\Z")
_BACKBONE = "(backbone)"


def link_starts(plan: Plan, experiment: Loaded[Any], mapping: Loaded[Any], problems: list[Problem]) -> Plan:
    """Ensures: every `init` is the folder of one checkpoint, beside the hash of its weights."""
    where = experiment.source.where("init")
    place = _found(plan.init, experiment, where, problems) if plan.init is not None else None
    models = []
    for model in plan.models:
        policies = []
        for policy in model.policies:
            at = _init_at(model, policy, mapping.source)
            own = _found(policy.init, mapping, at, problems) if policy.init is not None else None
            start = own or (place if policy.init is None else None)
            if start is not None:
                problems.extend(_misfits(model, policy, start, at if own else where))
            if own and policy.adapter and "adapters" in at.path.split("."):
                problems.extend(_not_an_adapter(model, policy, own, at))
            kept = replace(policy, init=str(own), init_hash=weights_hash(own)) if own else policy
            policies.append(kept)
        models.append(replace(model, policies=tuple(policies)))
    plan = replace(plan, models=tuple(models))
    return replace(plan, init=str(place), init_hash=weights_hash(place)) if place else plan


def _init_at(model: ModelIR, policy: PolicyIR, source: Source) -> Where:
    """Where a policy's `init` stands: at its adapter, else at its model."""
    of_model = ("models", model.name.split(".")[0])
    of_adapter = (*of_model, "adapters", (policy.adapter or "").split(".")[0], "init")
    return source.where(*(of_adapter if of_adapter in source.lines else (*of_model, "init")))


def _found(init: str, loaded: Loaded[Any], where: Where, problems: list[Problem]) -> Path | None:
    """The checkpoint's folder, or a problem: a missing run, or one without that checkpoint."""
    run, _, step = init.partition("@")
    try:
        folder = resolve(run, loaded.path, loaded.root, where, "run")
    except SpecError as error:
        problems.extend(error.problems)
        return None
    if (folder / "state.json").is_file() and not step:
        return folder
    kept = sorted((p.parent for p in folder.glob("checkpoints/*/state.json")), key=_order)
    place = _picked(kept, step)
    if place is None:
        message = f"'{init}' has no such checkpoint; kept: {', '.join(p.name for p in kept) or 'none'}"
        fix = "name a kept step, or leave '@step' out for the last one"
        problems.append(Problem.at(where, "missing-checkpoint", message, fix))
    return place


def _order(place: Path) -> tuple[bool, int]:
    """Earliest first; every step is after the warm start."""
    found = _STEP.match(place.name)
    return (found.group(1) == "step", int(found.group(2))) if found else (False, -1)


def _picked(kept: list[Path], step: str) -> Path | None:
    if kept and step in ("", "last"):
        return kept[-1]
    if kept and step == "best":
        evals = _json(kept[-1] / "state.json").get("evals")
        best = best_step(evals, (_order(place)[1] for place in kept)) if isinstance(evals, dict) else None
        step = "best" if best is None else str(best)
    wanted = f"step_{int(step):06d}" if step.isdigit() else step
    return next((place for place in kept if place.name == wanted), None)


def best_step(evals: Mapping[str, Mapping[str, Any]], saved: Iterable[int]) -> int | None:
    """The saved step with the best held-out headline, the earliest of equals.

    Args:
        evals: step (as text) → result of its evaluation.
        saved: steps that have a checkpoint; None of them was evaluated: None.
    """
    scores = {int(at): found["metrics"].get(found["headline"]) for at, found in evals.items()}
    there = set(saved)
    known = {at: value for at, value in scores.items() if value is not None and at in there}
    return max(sorted(known), key=lambda at: known[at]) if known else None


def weights_hash(place: Path) -> str:
    """16 hex digits over a checkpoint's weights, not its optimizers; read from where they were noted."""
    noted = _json(place / HASHES).get("sha256")
    if isinstance(noted, str):
        return noted
    digest = hashlib.sha256()
    for file in sorted(place.glob("models/*/*.safetensors")):
        if not file.name.endswith(".reference.safetensors"):
            digest.update(file.relative_to(place).as_posix().encode())
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()[:16]


# -- whether it fits ------------------------------------------------------------------------------


def _misfits(model: ModelIR, policy: PolicyIR, place: Path, where: Where) -> Iterator[Problem]:
    """The earlier policy was trained on another base than this one has."""
    theirs = _json(place.parent.parent / "plan.json").get("models")
    found = _earlier(theirs, policy) if isinstance(theirs, list) else None
    if found is None or found.get("base_hash") == model.base_hash:
        return
    reason = _difference(model, found, place)
    if reason:
        message = f"{place.parent.parent.name} trained '{found.get('name')}' on another base: {reason}"
        fix = f"give model '{model.name}' the base of that run, or start from another one"
        yield Problem.at(where, "other-base", message, fix)


def _not_an_adapter(model: ModelIR, policy: PolicyIR, place: Path, where: Where) -> Iterator[Problem]:
    """An adapter's own `init` would move the backbone under all of them."""
    theirs = _json(place.parent.parent / "plan.json").get("models")
    found = _earlier(theirs, policy) if isinstance(theirs, list) else None
    if found is not None and found.get("train") == "full":
        message = (
            f"{place.parent.parent.name} trained '{found.get('name')}' whole and holds no adapter for"
            f" '{policy.adapter}': its weights would be the backbone of all adapters of '{model.name}'"
        )
        fix = f"write 'init' at the model '{model.name}', or name a run that trained adapters"
        yield Problem.at(where, "not-an-adapter", message, fix)


def _earlier(models: Iterable[Any], policy: PolicyIR) -> dict[str, Any] | None:
    """The earlier model that this policy starts from: by its policy's name, its roles, or as the only one."""
    known = [
        (m, p) for m in models if isinstance(m, dict) for p in m.get("policies") or () if isinstance(p, dict)
    ]
    same_name = [m for m, p in known if p.get("name") == policy.name]
    same_roles = [m for m, p in known if set(p.get("roles") or ()) & set(policy.roles)]
    found = same_name or same_roles or [m for m, _ in known]
    return found[0] if len(found) == 1 else None


def _difference(model: ModelIR, found: dict[str, Any], place: Path) -> str:
    """What of two bases keeps weights from fitting; "" where they may fit."""
    ours, theirs = model.base, found.get("base")
    if isinstance(ours, ConfigBase) and isinstance(theirs, dict):
        mine = ours.model_dump(mode="json")
        before, now = theirs.get("config") or {}, mine["config"]
        odd = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        if odd:
            return ", ".join(f"{key} {before.get(key)} there, {now.get(key)} here" for key in odd)
        same = all(mine[key] == theirs.get(key) for key in ("init", "freeze"))
        return "its tokenizer was made from other files" if same else ""
    if isinstance(theirs, str) and found.get("train") == "lora":
        moved = _json(place / "models" / str(found.get("name")) / "model.json").get("changed") or ()
        return "" if _BACKBONE in moved else f"its adapters belong on {theirs}"
    return ""


def _json(file: Path) -> dict[str, Any]:
    """A file's object; an empty one where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
