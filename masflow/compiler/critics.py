"""The critics of a plan: who shares one, what it is made from, and where it can't be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from masflow.algorithms.critics import critic_of
from masflow.compiler.bases import resolve_base
from masflow.compiler.graph import Graph
from masflow.compiler.plan import CriticIR, ModelIR, Plan
from masflow.compiler.sizes import estimate
from masflow.compiler.usage import below
from masflow.errors import Problem, SpecError
from masflow.project import Loaded
from masflow.spec.experiment import Algorithm, Critic, Experiment

__all__ = ["critic_facts", "link_critics"]


def link_critics(
    algorithm: Algorithm,
    models: Sequence[ModelIR],
    graphs: Mapping[str, Graph],
    experiment: Loaded[Experiment],
    problems: list[Problem],
) -> tuple[CriticIR, ...]:
    """One record a network, complete; none where the algorithm has no critic."""
    critic = critic_of(algorithm)
    hosts = [model for model in models if model.train != "frozen" and any(p.train for p in model.policies)]
    if critic is None or not hosts:
        return ()
    problems.extend(_process_problems(hosts if critic.per != "team" else hosts[:1], experiment))
    if critic.per == "team":
        problems.extend(_team_problems(graphs, {role for host in hosts for role in _trained(host)}))
    base = None
    if critic.base is not None:
        try:
            where = ("algorithm", "critic", "base")
            base = resolve_base(critic.base, experiment.source, where, experiment.path, experiment.root)
        except SpecError as error:
            problems.extend(error.problems)
    return tuple(_critics(critic, hosts, base))


def critic_facts(plan: Plan, critic: CriticIR) -> dict[str, Any]:
    """What `explain` tells of one; `size` is that of its base, whose language head it leaves out."""
    like = replace(plan.model(critic.model), base=critic.base, train="full", dtype="auto", quantize=None)
    return {
        "name": critic.name,
        "model": critic.model,
        "roles": list(critic.roles),
        "central": critic.central,
        "base_hash": critic.base_hash,
        "lr": critic.optimizer.lr,
        "size": estimate(like),
    }


def _critics(critic: Critic, hosts: Sequence[ModelIR], base: tuple | None) -> Iterator[CriticIR]:
    def made(name: str, host: ModelIR, roles: Sequence[str], central: bool = False) -> CriticIR:
        own, digest = base or (host.base, host.base_hash)
        return CriticIR(name, host.name, tuple(roles), own, digest, critic.optimizer, central)

    if critic.per == "team":
        yield made("team", hosts[0], [role for host in hosts for role in _trained(host)], True)
    for host in hosts if critic.per != "team" else ():
        if critic.per == "model":
            yield made(host.name, host, _trained(host))
        else:
            yield from (made(role, host, [role]) for role in _trained(host))


def _trained(model: ModelIR) -> list[str]:
    return [role for policy in model.policies if policy.train for role in policy.roles]


def _process_problems(hosts: Sequence[ModelIR], experiment: Loaded[Experiment]) -> Iterator[Problem]:
    for host in hosts:
        place = host.place
        together = place.placement == "colocated"
        number = max(place.trainer.workers, place.rollout.workers) if together else place.trainer.workers
        if number > 1:
            message = f"a critic is trained by one process, and model '{host.name}' has {number} that train"
            fix = "write trainer: {workers: 1} for it in the runtime (rollout may have several), or use: grpo"
            where = experiment.source.where("algorithm", "use")
            yield Problem.at(where, "critic-with-several-trainers", message, fix)


def _team_problems(graphs: Mapping[str, Graph], trained: set[str]) -> Iterator[Problem]:
    """A chain crosses roles, so at its end all must be paid alike."""
    for graph in graphs.values():
        for reward in graph.rewards:
            if reward.level == "turn" or not reward.weight or reward.pay or reward.allocator:
                continue
            named = {*reward.to, *reward.roles}
            if named and not {role.rpartition("/")[2] for role in trained} <= named:
                who = ", ".join(sorted(named))
                message = (
                    f"reward '{reward.name}' is due to {who} when the episode ends, and not to the team: a"
                    " central critic's chains cross roles"
                )
                fix = "pay it to every trained role, or use: ippo"
                yield Problem.at(below(reward.where, "to"), "not-the-teams-reward", message, fix)
