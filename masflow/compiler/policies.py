"""Mapping + team → models and policies: every role has exactly one, and every model is resolved
completely.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from masflow.compiler.bases import resolve_base
from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.compiler.team import Speaker
from masflow.errors import Problem, SpecError, Where, unknown
from masflow.project import Loaded, Source
from masflow.spec.experiment import Experiment
from masflow.spec.mapping import Adapter, ConfigBase, Model, Roles
from masflow.spec.mapping import Mapping as MappingSpec

__all__ = ["Names", "link_models"]


@dataclass(frozen=True)
class Names:
    """What mappings may name: members, roles (which stand for their members), and globs over both."""

    members: tuple[str, ...]
    of_role: Mapping[str, tuple[str, ...]]
    unused: frozenset[str] = frozenset()
    """Declared roles that no node speaks as; they may be named and get nothing."""

    @classmethod
    def of(cls, team: Iterable[Speaker], declared: Iterable[str] = ()) -> Names:
        of_role = {speaker.name: speaker.members for speaker in team}
        members = tuple(dict.fromkeys(m for found in of_role.values() for m in found))
        return cls(members, of_role, frozenset(declared) - set(of_role))

    @property
    def known(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.of_role, *self.members)))

    def match(self, pattern: str) -> tuple[str, ...]:
        if pattern in self.of_role:
            return self.of_role[pattern]
        if pattern in self.members:
            return (pattern,)
        if not any(sign in pattern for sign in "*?["):
            return ()
        roles = [name for name in self.of_role if fnmatchcase(name, pattern)]
        found = {m for role in roles for m in self.of_role[role]} | {
            m for m in self.members if fnmatchcase(m, pattern)
        }
        return tuple(m for m in self.members if m in found)


@dataclass
class _Split:
    """Members dealt out to named takers; `rest` takes what is left."""

    names: Names
    source: Source
    problems: list[Problem]
    given: dict[str, list[str]] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)

    def deal(
        self, takers: Mapping[str, tuple[Roles, tuple[str | int, ...]]], among: Iterable[str], kind: str
    ) -> None:
        """Args: takers: name → (its `roles`, the place where they stand)."""
        among = list(among)
        rest = [name for name, (roles, _) in takers.items() if roles == "rest"]
        for name, (roles, at) in takers.items():
            self.given[name] = []
            if roles != "rest":
                for i, pattern in enumerate(roles):
                    self._take(name, pattern, among, self.source.where(*at, i), kind)
        for name in rest[1:]:
            message = f"two {kind}s take 'rest': {rest[0]} and {name}"
            where = self.source.where(*takers[name][1])
            self.problems.append(Problem.at(where, "two-rests", message, "name the roles of one of them"))
        if rest:
            self.given[rest[0]] = [m for m in among if m not in self.taken]
            self.taken |= dict.fromkeys(self.given[rest[0]], rest[0])

    def _take(self, name: str, pattern: str, among: list[str], where: Where, kind: str) -> None:
        found = [m for m in self.names.match(pattern) if m in among]
        if not found and pattern not in self.names.unused:
            if any(sign in pattern for sign in "*?["):
                message = f"'{pattern}' matches no role; known: {', '.join(among)}"
                self.problems.append(
                    Problem.at(where, "glob-matches-nothing", message, "correct or remove it")
                )
            else:
                known = [n for n in self.names.known if n in among or n in self.names.of_role]
                self.problems.append(unknown(where, "role", pattern, known))
        for member in found:
            other = self.taken.get(member)
            if other is not None and other != name:
                message = f"role '{member}' has two {kind}s: {other} and {name}"
                self.problems.append(
                    Problem.at(where, "doubled-role", message, f"remove it from '{other}' or '{name}'")
                )
            elif other is None:
                self.taken[member] = name
                self.given[name].append(member)


def link_models(
    mapping: Loaded[MappingSpec],
    experiment: Loaded[Experiment],
    names: Names,
    problems: list[Problem],
) -> tuple[ModelIR, ...]:
    """Every model with its policies, base, optimizer and window. Ensures: each member has one policy, or a
    problem.
    """
    source = mapping.source
    split = _Split(names, source, problems)
    models = mapping.spec.models
    split.deal({n: (m.roles, ("models", n, "roles")) for n, m in models.items()}, names.members, "model")
    missing = [m for m in names.members if m not in split.taken]
    if missing:
        message = f"no model plays {', '.join(missing)}"
        fix = "add them to a model, or give one model 'roles: rest'"
        problems.append(Problem.at(source.where("models"), "unmapped-role", message, fix))
    found: list[ModelIR] = []
    for name, model in models.items():
        members = split.given[name]
        if not members:
            message = f"model '{name}' plays no role, so it isn't loaded"
            problems.append(
                Problem.at(source.where("models", name), "warn-model-without-role", message, "remove it")
            )
            continue
        base, base_hash = None, ""
        if model.endpoint is None:
            base, base_hash = _base(model, name, mapping, experiment, problems)
        parts = {f"{name}.{_flat(m)}": [m] for m in members} if model.per == "role" else {name: members}
        for part, played in parts.items():
            policies = _policies(part, name, model, played, experiment.spec, names, source, problems)
            found.append(
                ModelIR(
                    name=part,
                    base=base,
                    base_hash=base_hash,
                    train=_training(model),
                    policies=policies,
                    lora=model.lora,
                    context=model.context,
                    dtype=model.dtype,
                    chat=model.chat,
                    quantize=model.quantize,
                    gradient_checkpointing=model.gradient_checkpointing,
                    endpoint=model.endpoint,
                    served=model.model,
                    where=source.where("models", name),
                )
            )
    return tuple(found)


def _training(model: Model) -> Literal["full", "lora", "frozen"]:
    return "frozen" if model.endpoint is not None else model.train


def _flat(name: str) -> str:
    return name.replace("/", ".")


def _policies(
    part: str,
    name: str,
    model: Model,
    members: list[str],
    experiment: Experiment,
    names: Names,
    source: Source,
    problems: list[Problem],
) -> tuple[PolicyIR, ...]:
    def policy(adapter: str | None, roles: Iterable[str], own: Adapter | None = None) -> PolicyIR:
        lora = own.lora if own and own.lora != model.lora else None
        return PolicyIR(
            name=part if adapter is None else f"{part}/{adapter}",
            model=part,
            adapter=adapter,
            roles=tuple(roles),
            train=_training(model) != "frozen",
            optimizer=(own and own.optimizer) or model.optimizer or experiment.train.optimizer,
            init=(own and own.init) or model.init,
            lora=lora,
        )

    if _training(model) != "lora":
        return (policy(None, members),)
    if model.adapters is None or model.per == "role":
        return (policy("default", members),)
    if model.adapters == "per_role":
        return tuple(policy(_flat(member), [member]) for member in members)
    split = _Split(names, source, problems)
    at = ("models", name, "adapters")
    split.deal(
        {a: (one.roles, _roles_at(source, *at, a)) for a, one in model.adapters.items()}, members, "adapter"
    )
    missing = [m for m in members if m not in split.taken]
    if missing:
        message = f"no adapter of '{name}' plays {', '.join(missing)}"
        fix = "add them to an adapter, or give one adapter 'rest'"
        problems.append(Problem.at(source.where(*at), "unmapped-role", message, fix))
    found = []
    for adapter, roles in split.given.items():
        own = model.adapters[adapter]
        parts = {f"{adapter}.{_flat(m)}": [m] for m in roles} if own.per == "role" else {adapter: roles}
        found += [policy(part, played, own) for part, played in parts.items() if played]
    return tuple(found)


def _roles_at(source: Source, *adapter: str) -> tuple[str, ...]:
    """Where an adapter's roles stand: in its short form they are all of it."""
    long = (*adapter, "roles")
    return long if long in source.lines else adapter


def _base(
    model: Model,
    name: str,
    mapping: Loaded[MappingSpec],
    experiment: Loaded[Experiment],
    problems: list[Problem],
) -> tuple[str | ConfigBase | None, str]:
    own = model.base is not None
    base = model.base if own else experiment.spec.base
    document = mapping if own else experiment
    at: tuple[str, ...] = ("models", name, "base") if own else ("base",)
    if base is None:
        message = f"model '{name}' has no base, and the experiment has none either"
        fix = "write 'base: Qwen/Qwen2.5-0.5B-Instruct', a folder, or a config"
        problems.append(Problem.at(experiment.source.where(), "no-base", message, fix))
        return None, ""
    try:
        return resolve_base(base, document.source, at, document.path, document.root)
    except SpecError as error:
        problems.extend(error.problems)
        return base, ""
