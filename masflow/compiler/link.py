"""Experiment + graphs + models → plan: data, algorithm, sampler, stages, groups, passes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from masflow.compiler.bases import HUB_ID
from masflow.compiler.demonstrations import demonstration_problems
from masflow.compiler.digest import plan_data
from masflow.compiler.documents import file_hash, text_hash
from masflow.compiler.graph import Graph
from masflow.compiler.plan import GroupIR, Plan, SamplerIR, SourceIR
from masflow.compiler.presets import passes_of
from masflow.compiler.regions import Regions
from masflow.compiler.rows import FILE_ENDS, row_problems
from masflow.compiler.saved_data import is_saved, saved_hash, saved_split
from masflow.compiler.team import graphs_below, speakers_of
from masflow.errors import Problem, SpecError, Where, unknown
from masflow.passes import DEFAULT, known_passes
from masflow.project import Loaded, expand_data, resolve
from masflow.spec.experiment import Algorithm, DataSource, Experiment
from masflow.spec.problems import problems_of

__all__ = [
    "apply_passes",
    "expected_groups",
    "link_data",
    "option_problems",
]


def link_data(
    loaded: Loaded[Experiment], graph: Graph | None, problems: list[Problem]
) -> dict[str, tuple[SourceIR, ...]]:
    """Every split's sources, found, hashed, and their rows checked against the task's fields."""
    data = loaded.spec.data
    splits: dict[str, tuple[Any, tuple[str | int, ...]]] = {}
    for name in ("train", "eval"):
        if getattr(data, name) is not None:
            splits[name] = (getattr(data, name), ("data", name))
    for name, source in data.extra.items():
        splits[name] = (source, ("data", "extra", name))
    if loaded.spec.warm_start is not None:
        splits["warm_start"] = (loaded.spec.warm_start.data, ("warm_start", "data"))
    found: dict[str, tuple[SourceIR, ...]] = {}
    for split, (source, at) in splits.items():
        sources = [
            s for s in (_source(loaded, part, place, problems) for part, place in _parts(source, at)) if s
        ]
        found[split] = tuple(_named(sources))
        problems.extend(_weight_problems(loaded, split, source, at, sources))
        if graph is not None:
            for one in sources:
                demonstrated = split == "warm_start"
                found_in = (
                    demonstration_problems(one, graph) if demonstrated else row_problems(one, graph.task)
                )
                problems.extend(found_in)
    if "train" not in found and loaded.spec.train.steps > 0:
        message = "there is no data.train, so this experiment can be played but not trained"
        where = loaded.source.where("data")
        problems.append(Problem.at(where, "warn-no-train-data", message, "add data: {train: FILE}"))
    return found


def _named(sources: list[SourceIR]) -> Iterable[SourceIR]:
    """Names that differ within a split."""
    taken: set[str] = set()
    for source in sources:
        name, number = source.name, 2
        while name in taken:
            name, number = f"{source.name}_{number}", number + 1
        taken.add(name)
        yield replace(source, name=name)


def _weight_problems(
    loaded: Loaded[Experiment],
    split: str,
    source: Any,
    at: tuple[str | int, ...],
    sources: list[SourceIR],
) -> Iterable[Problem]:
    """Weights that nothing is drawn by, or that some sources of a mixture lack."""
    given = [s for s in sources if s.weight is not None]
    if not given:
        return
    where = loaded.source.where(*at)
    if split not in ("train", "warm_start"):
        message = f"the rows of '{split}' are scored once each, so a weight has no effect"
        yield Problem.at(where, "option-without-effect", message, "remove it")
    elif not isinstance(source, tuple) or len(source) == 1:
        message = "a weight is a share among several sources, and this one stands alone"
        yield Problem.at(where, "option-without-effect", message, "remove it, or add a source")
    elif len(given) < len(sources):
        message = (
            f"{len(given)} of {len(sources)} sources have a weight: the shares of the others are unknown"
        )
        yield Problem.at(where, "mixed-weights", message, "give every source a weight, or none")


def _parts(source: Any, at: tuple[str | int, ...]) -> Iterable[tuple[Any, tuple[str | int, ...]]]:
    if isinstance(source, tuple):
        return [(part, (*at, i)) for i, part in enumerate(source)]
    return [(source, at)]


def _source(
    loaded: Loaded[Experiment], part: str | DataSource, at: tuple[str | int, ...], problems: list[Problem]
) -> SourceIR | None:
    one = DataSource(path=part) if isinstance(part, str) else part
    where = loaded.source.where(*at)
    try:
        text = expand_data(one.path, loaded.root, where)
        path = resolve(text, loaded.path, loaded.root, where, "data file")
    except SpecError as error:
        if (
            HUB_ID.match(one.path)
            and not one.path.lower().endswith(FILE_ENDS)
            and not one.path.startswith(".")
        ):
            return SourceIR(
                one.path,
                text_hash(f"{one.path}:{one.split}"),
                one.split,
                one.weight,
                is_file=False,
                name=one.name or one.path.rpartition("/")[2],
            )
        problems.extend(error.problems)
        return None
    if is_saved(path):
        return _saved_source(path, one, where, problems)
    if not path.is_file() or not path.name.lower().endswith(FILE_ENDS):
        message = f"'{one.path}' isn't a data file; known endings: {', '.join(FILE_ENDS)}"
        fix = "name a file of rows, a folder that datasets saved, or a Hugging Face id"
        problems.append(Problem.at(where, "bad-data-file", message, fix))
        return None
    if one.split is not None:
        message = f"'{one.path}' is a file, which has no splits"
        problems.append(Problem.at(where, "option-without-effect", message, "remove 'split'"))
    return SourceIR(str(path), file_hash(path), None, one.weight, name=one.name or _stem(path))


def _stem(path: Path) -> str:
    """A file's name without its endings."""
    ending = next((end for end in (".jsonl.gz", *FILE_ENDS) if path.name.lower().endswith(end)), "")
    return path.name[: len(path.name) - len(ending)] or path.name


def _saved_source(path: Path, one: DataSource, where: Where, problems: list[Problem]) -> SourceIR | None:
    """A folder of `datasets`, as a file with its rows."""
    folder = saved_split(path, one.split, where)
    if isinstance(folder, Problem):
        problems.append(folder)
        return None
    try:
        return SourceIR(str(folder), saved_hash(folder), None, one.weight, name=one.name or path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SpecError) as error:
        message = f"'{one.path}' can't be read: {error}"
        problems.append(Problem.at(where, "unreadable-data", message, "save it again with save_to_disk"))
        return None


def expected_groups(
    root: str, graphs: Mapping[str, Graph], samples: int, trained: set[str]
) -> tuple[GroupIR, ...]:
    """One entry a role and node: its turns at equal visit, item and call are compared with each other.

    The size is the number of episodes a task; fewer take part where a path isn't always reached.
    """
    groups = []
    for place in graphs_below(root, graphs):
        regions = Regions.of(place.graph)
        roles = {role.name: role for role in place.graph.roles}
        for node in place.graph.nodes:
            for name in speakers_of(node):
                role = roles.get(name)
                members = {place.prefix + m for m in role.members or (name,)} if role else set()
                if role is None or not members & trained:
                    continue
                marks = [mark for mark, holds in (
                    ("visit", bool(regions.cycle_of(node.name)) or place.graph.program is not None),
                    ("key", place.graph.program is not None),
                    ("item", node.foreach is not None),
                    ("copy", bool(role.members) and not role.is_family),
                    ("call", bool(role.tools)),
                ) if holds]  # fmt: skip
                path = place.prefix + node.name + (f"[{','.join(marks)}]" if marks else "")
                groups.append(
                    GroupIR(
                        ("task", place.prefix + name, path),
                        samples,
                        place.prefix + name,
                        place.prefix + node.name,
                    )
                )
    return tuple(groups)


def option_problems(loaded: Loaded[Experiment], graph: Graph | None, problems: list[Problem]) -> None:
    """Names and pairs of the experiment that don't fit the workflow."""
    spec, where = loaded.spec, loaded.source.where
    names = [r.name for r in graph.rewards] if graph else []
    if graph and spec.eval.metric is not None and spec.eval.metric not in names:
        problems.append(unknown(where("eval", "metric"), "reward", spec.eval.metric, names))
    if graph and not names and spec.train.steps > 0:
        message = f"workflow '{graph.name}' has no rewards, so nothing can be learned from its episodes"
        problems.append(Problem.at(graph.where, "warn-no-rewards", message, "add rewards:"))


def apply_passes(plan: Plan, loaded: Loaded[Experiment], problems: list[Problem]) -> Plan:
    """Each pass in the order written; order constraints checked first."""
    known = known_passes()
    chosen: list[tuple[str, Any, Where]] = []
    for name, settings, i in passes_of(loaded.spec):
        where = loaded.source.where(*(("algorithm", "use") if i is None else ("passes", i)))
        if name not in known:
            problems.append(unknown(where, "pass", name, known))
            continue
        try:
            chosen.append((name, known[name](**settings), where))
        except (ValidationError, TypeError) as error:
            problems.extend(_setting_problems(loaded, i, name, settings, error))
    names = [name for name, _, _ in chosen]
    for at, (name, one, where) in enumerate(chosen):
        if name in names[:at]:
            message = f"pass '{name}' is written twice, and one would undo the other"
            problems.append(Problem.at(where, "pass-twice", message, "remove one of the two"))
        early = [n for n in one.after if n in names[at + 1 :]] + [n for n in names[:at] if n in one.before]
        if early:
            message = f"pass '{name}' stands on the wrong side of '{early[0]}'"
            problems.append(Problem.at(where, "pass-order", message, "swap the two"))
    if problems_are_fatal(problems):
        return plan
    for name, one, where in chosen:
        before = plan_data(plan)
        try:
            plan = one.apply(plan)
        except SpecError as error:
            problems.extend(
                p if p.line else Problem.at(where, p.code, p.message, p.fix) for p in error.problems
            )
            return plan
        entry = {
            "name": name,
            "settings": one.model_dump(mode="json"),
            "changes": changes(before, plan_data(plan)),
        }
        plan = replace(plan, passes=(*plan.passes, entry))
    for name in (name for name in DEFAULT if name not in names and plan.root):
        plan = known[name]().apply(plan)
    return plan


def _setting_problems(
    loaded: Loaded[Experiment],
    i: int | None,
    name: str,
    settings: Mapping[str, Any],
    error: ValidationError | TypeError,
) -> list[Problem]:
    """What is wrong with a pass's settings, each on its own line."""
    at = ("algorithm", "use") if i is None else ("passes", i, name)
    if isinstance(error, TypeError):
        message = f"pass '{name}': {error}"
        return [Problem.at(loaded.source.where(*at), "pass-setting", message, "correct the setting")]

    def where(*path: str | int) -> Where:
        return loaded.source.where(*at, *path)

    found = problems_of(error, settings, where, loaded.source.under(*at).lines)
    return [replace(one, code="pass-setting", message=f"pass '{name}': {one.message}") for one in found]


def changes(before: Any, after: Any, at: str = "") -> list[str]:
    """What differs between two plans as data, one line a place."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [k for k in after if before.get(k) != after[k]] + [k for k in before if k not in after]
        return [c for k in keys for c in changes(before.get(k), after.get(k), f"{at}.{k}" if at else str(k))]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [c for i, (a, b) in pairs if a != b for c in changes(a, b, f"{at}[{i}]")]
    return [f"{at}: {_short(before)} -> {_short(after)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def problems_are_fatal(problems: Iterable[Problem]) -> bool:
    """Whether any is more than a warning."""
    return any(not p.code.startswith("warn-") for p in problems)


def default_sampler(algorithm: Algorithm) -> SamplerIR:
    return SamplerIR("trajectories", algorithm.samples or 8)
