"""`masflow export`: which policies of a run become folders, where they stand, and the card beside each.

Knows runs and checkpoints; how a folder is written is the models' part. Leaves the run as it is.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from masflow.compiler import load_plan
from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.compiler.team import speakers_of, team_of
from masflow.errors import RunError, closest
from masflow.models import export as folders
from masflow.models import saving
from masflow.runtime import checkpoints
from masflow.runtime.checkpoints import RunState
from masflow.spec.mapping import Chat

__all__ = ["export", "export_text"]

BACKBONE = "backbone"


@dataclass(frozen=True)
class Part:
    """One folder to write."""

    kind: str
    """`full`, `adapter`, `merged`, or `backbone`."""
    model: ModelIR
    policy: PolicyIR | None
    name: str
    """Its folder below the target; "" is the target itself."""
    roles: tuple[str, ...]


def export(
    reference: str, to: Path, *, role: str | None = None, model: str | None = None, merge: bool = False
) -> dict[str, Any]:
    """Write a run's trained policies as Hugging Face folders: all of them, a role's, or a model's.

    One policy becomes the folder `to` itself, several a folder each in it. Adapters are accompanied by the
    weights under them where nobody else has these.

    Args:
        reference: `RUN` (its last checkpoint), `RUN@step`, `RUN@best`, or a checkpoint's folder.
        merge: write full models instead of adapters.
    Returns:
        `{"run", "step", "digest", "to", "folders": [{"path", "kind", "model", "policy", "roles", "base",
        "dtype"}]}`; `dtype` is how the model was held in training.
    Raises:
        RunError: no such checkpoint or role, frozen or served roles, or a folder that isn't empty.
    """
    place = checkpoints.find(reference, (Path.cwd(),))
    run = place.parent.parent
    plan, state = _plan_of(run), checkpoints.read_state(place)
    chosen = _chosen(plan, role, model)
    to = to.resolve()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise RunError(f"{to} isn't an empty folder", "choose another --to")
    parts = _parts(chosen, merge, place)
    written = []
    with _appearing(to) as partial, _bases(run) as bases:
        for part in parts:
            folder, base = partial / part.name, _base_of(part, parts, to)
            source = folders.Source(part.model, bases, plan.train.seed, place / "models" / part.model.name)
            _write(part, source, base, folder)
            facts = {
                "kind": part.kind,
                "model": part.model.name,
                "policy": part.policy.name if part.policy else None,
                "roles": list(part.roles),
                "base": base,
                "dtype": source.dtype or None,
            }
            run_facts = {
                "run": run.name,
                "step": state.step,
                "digest": plan.digest,
                "masflow": version("masflow"),
            }
            saved = {**run_facts, **facts}
            (folder / "export.json").write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            (folder / "README.md").write_text(card(part, parts, saved, plan, state), encoding="utf-8")
            written.append({"path": str(to / part.name), **facts})
    return {"run": str(run), "step": state.step, "digest": plan.digest, "to": str(to), "folders": written}


def _plan_of(run: Path) -> Plan:
    file = run / "plan.json"
    if not file.is_file():
        raise RunError(f"{run} holds no plan.json", "name a run's folder, or a checkpoint inside of one")
    return load_plan(file.read_text(encoding="utf-8"))


def _chosen(plan: Plan, role: str | None, model: str | None) -> list[tuple[ModelIR, PolicyIR]]:
    """The trained policies that are asked for."""
    everything = [(m, p) for m in plan.models for p in m.policies]
    if role is not None and model is not None:
        raise RunError("a role or a model, not both", "leave --role or --model out")
    found = everything
    if role is not None:
        members = {speaker.name: speaker.members for speaker in team_of(plan.root, plan.workflows)}
        wanted = set(members.get(role, (role,)))
        found = [(m, p) for m, p in everything if wanted & set(p.roles)]
        if not found:
            known = dict.fromkeys((*members, *(r for _, p in everything for r in p.roles)))
            raise _unknown("role", role, list(known))
    if model is not None:
        found = [(m, p) for m, p in everything if m.name == model]
        found = found or [(m, p) for m, p in everything if m.name.startswith(f"{model}.")]
        if not found:
            raise _unknown("model", model, [m.name for m in plan.models])
    trained = [(m, p) for m, p in found if p.train]
    if not trained:
        raise _untrained(found[0][0], f"role '{role}'" if role is not None else f"model '{found[0][0].name}'")
    return trained


def _unknown(kind: str, name: str, known: list[str]) -> RunError:
    near = closest(name, known)
    message = f"the run has no {kind} '{name}'; known: {', '.join(known)}"
    return RunError(message, f"write '{near}'" if near else f"name one of its {kind}s")


def _untrained(model: ModelIR, what: str) -> RunError:
    if model.endpoint is not None:
        return RunError(f"{what} is played by the server {model.endpoint.url}", "there is nothing to export")
    init = next((p.init for p in model.policies if p.init), None)
    if init is not None:
        return RunError(f"{what} is frozen, as {init} left it", f"export that: masflow export {init}")
    return RunError(f"{what} is frozen: it is still its base", f"use {model.base}")


def _parts(chosen: list[tuple[ModelIR, PolicyIR]], merge: bool, place: Path) -> list[Part]:
    """What to write: policies first, then what stands under their adapters."""
    if merge and not any(m.train == "lora" for m, _ in chosen):
        raise RunError("there is no adapter to merge: these are full models", "leave --merge out")
    single = len(chosen) == 1
    parts = []
    for m, p in chosen:
        kind = "full" if m.train != "lora" else "merged" if merge else "adapter"
        parts.append(Part(kind, m, p, "" if single else saving.file_name(p.name), p.roles))
    for m in dict.fromkeys(part.model.name for part in parts if part.kind == "adapter"):
        mine = [part for part in parts if part.model.name == m]
        if _is_moved(mine[0].model, place):
            roles = tuple(role for part in mine for role in part.roles)
            parts.append(Part(BACKBONE, mine[0].model, None, BACKBONE if single else m, roles))
    return parts


def _is_moved(model: ModelIR, place: Path) -> bool:
    return folders.Source(model, place, 0, place / "models" / model.name).is_moved


def _base_of(part: Part, parts: list[Part], to: Path) -> str | None:
    """What an adapter belongs on: the folder beside it, or the base's folder or id."""
    if part.kind != "adapter":
        return part.model.base if isinstance(part.model.base, str) else None
    beside = _beside(part, parts)
    return str(to / beside.name) if beside is not None else str(part.model.base)


def _beside(part: Part, parts: list[Part]) -> Part | None:
    """The weights under an adapter, where they are written too."""
    return next((p for p in parts if p.kind == BACKBONE and p.model.name == part.model.name), None)


def _write(part: Part, source: folders.Source, base: str | None, folder: Path) -> None:
    if part.policy is None:
        folders.write_backbone(source, folder)
    elif part.kind == "full":
        folders.write_full(source, part.policy, folder)
    elif part.kind == "merged":
        folders.write_merged(source, part.policy, folder)
    else:
        folders.write_adapter(source, part.policy, str(base), folder)


@contextmanager
def _appearing(to: Path) -> Iterator[Path]:
    """A folder beside `to` that gets its name when the block is through, so that it is whole or absent."""
    partial = to.with_name(f".partial-{to.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if to.exists():
            to.rmdir()
        partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _bases(run: Path) -> Iterator[Path]:
    """A temporary run folder with the run's made bases: one that is missing is made there, not in the run."""
    with tempfile.TemporaryDirectory(prefix="masflow-") as name:
        if (run / "base").is_dir():
            (Path(name) / "base").symlink_to((run / "base").resolve())
        yield Path(name)


def export_text(found: dict[str, Any]) -> str:
    """What was written, a line a folder, and how adapters load."""
    lines = [f"{Path(found['run']).name}, step {found['step']}"]
    for one in found["folders"]:
        lines.append(f"  {one['kind']:<9}{', '.join(one['roles'])}: {one['path']}")
    lines.append("how each loads, and its prompts: README.md in the folder")
    return "\n".join(lines)


# -- the card -------------------------------------------------------------------------------------


def card(part: Part, parts: list[Part], facts: dict[str, Any], plan: Plan, state: RunState) -> str:
    """`README.md`: what this is, how it loads, and the prompts that its roles were trained with."""
    name = facts["policy"] or f"what stands under the adapters of {part.model.name}"
    library = "peft" if part.kind == "adapter" else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags: [masflow]", "---", ""]
    lines += [f"# {name}", "", f"Trained by masflow as a part of the team `{plan.root}`.", ""]
    rows = {
        "roles": ", ".join(part.roles),
        "kind": part.kind,
        "base": facts["base"] or "made from a config by the run",
        "run": f"{facts['run']}, step {facts['step']}",
        "plan": facts["digest"],
        "precision in training": facts["dtype"] or "unknown",
        "temperature in training": str(plan.algorithm.temperature),
        **_chat(part.model.chat),
        **_scores(state),
    }
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items()), ""]
    lines += ["```python", *_loading(part, _shown_base(part, parts), _dtype(part, facts)), "```", ""]
    return "\n".join([*lines, *_prompts(part, plan)])


def _chat(chat: Chat) -> dict[str, str]:
    """Variables of the chat template in training: a template can't hold them."""
    given = {} if chat.thinking is None else {"enable_thinking": chat.thinking}
    given |= chat.options
    return {"variables of the chat template": json.dumps(given)} if given else {}


def _scores(state: RunState) -> dict[str, str]:
    """Held out, at the start and at this step."""
    found = {}
    for label, step in (("start", "0"), (f"step {state.step}", str(state.step))):
        one = state.evals.get(step)
        value = one["metrics"].get(one["headline"]) if one else None
        if one and value is not None:
            found[f"{one['headline']} of the team, held out, at {label}"] = f"{value:.3f}"
    return found


def _dtype(part: Part, facts: dict[str, Any]) -> str:
    """How to load it: as it was trained, or, merged, as it was added up."""
    return "float32" if part.kind == "merged" else facts["dtype"] or "auto"


def _shown_base(part: Part, parts: list[Part]) -> str:
    """Python for the base of an adapter: the folder beside it, wherever both are moved to, or an id."""
    beside = _beside(part, parts)
    if beside is None:
        return repr(part.model.base)
    return f'FOLDER + "/{"../" if part.name else ""}{beside.name}"'


def _loading(part: Part, base: str, dtype: str) -> list[str]:
    load = "tokenizer = AutoTokenizer.from_pretrained(FOLDER)"
    if part.kind != "adapter":
        return [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype='{dtype}')",
            load,
        ]
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"base = AutoModelForCausalLM.from_pretrained({base}, dtype='{dtype}')",
        "model = PeftModel.from_pretrained(base, FOLDER)",
        load,
    ]


def _prompts(part: Part, plan: Plan) -> list[str]:
    """The templates of the roles that this policy plays."""
    lines = []
    for speaker in team_of(plan.root, plan.workflows):
        if not set(speaker.members) & set(part.roles):
            continue
        nodes = [n for n in speaker.graph.nodes if speaker.role.name in speakers_of(n)]
        texts = {"system": speaker.role.system, "user": speaker.role.prompt}
        texts |= {f"user, at {n.name}": n.prompt for n in nodes if n.prompt != speaker.role.prompt}
        for kind, text in texts.items():
            if text:
                lines += [f"## {speaker.name}: {kind}", "", "````", text.rstrip("\n"), "````", ""]
    return lines
