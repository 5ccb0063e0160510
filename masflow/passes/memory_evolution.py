"""`memory_evolution`: roles are reminded of what worked in similar situations, and rewards decide what stays.

After the memory modules of JoyAgents-R1 (arXiv 2506.19846); `masflow.memory.evolve` says which choices are
ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import ClassVar

from pydantic import Field

from masflow.compiler.graph import Graph
from masflow.compiler.plan import Plan, StageIR
from masflow.compiler.team import graphs_below, speakers_of
from masflow.errors import Problem, SpecError, Where, unknown
from masflow.memory.rules import Rules
from masflow.spec.base import Spec

__all__ = ["MemoryEvolution"]


class MemoryEvolution(Spec):
    """Give every role a memory of its own, or several roles one together.

    A record is a situation (the prompt without memory) and a strategy (the reply; of a role that calls tools
    its calls, too). Before a role speaks, the most similar records stand in `memory`, a list of `{situation,
    strategy, score}` that its prompt may use; a prompt that doesn't is given them at the end of its system
    message. Records of the same task (equal visible fields) are never recalled, and nothing of an evaluation
    split is kept.

    Where the experiment has a `warm_start`, its demonstrations come first (`demonstrations`): their turns are
    paid and evolve the empty memory as those of a step 0 (where all are paid the same, all of them are good),
    and every second demonstration, drawn by the seed, is taught with what this memory recalls in its prompts,
    the others without, as a memory may know nothing. So a role has seen such prompts before it learns from
    rewards. (JoyAgents-R1 fine-tunes with memory in the prompts; what is in it then, and how often, is ours.)
    A run that starts from another one's weights (`init`) begins with these records, too, and with nothing of
    that run's memory.

        passes:
          - memory_evolution: {rewards: [correct, well_formed], capacity: 512}

        roles: {solver: {prompt: "{% for m in memory %}{{ m.strategy }}\\n{% endfor %}{{ question }}"}}
    """

    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    rewards: tuple[str, ...] = Field(min_length=1)
    """What decides: the mean of these rewards' values for a turn. Take those that say whether a reply is
    right and well-formed; one that pays for being short would fill the memory with short replies."""
    roles: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Those that have a memory, by qualified name (`research/worker`). Default: all that speak."""
    share: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Name of a store → the roles that have it together."""
    demonstrations: bool = True
    """Whether the warm start's demonstrations are the memory's first experience, and are taught with it."""
    recall: int = Field(default=3, ge=1, le=64)
    """Records that a turn is reminded of at most."""
    capacity: int = Field(default=Rules.capacity, ge=1, le=100_000)
    """Records a store; the lowest scores are evicted."""
    window: int = Field(default=Rules.window, ge=2)
    """Latest rewards of a store that the bounds come from. Below 40 of them they are mean ± 1.96 sigma."""
    upper: float = Field(default=Rules.upper, gt=50, le=100)
    """Percentile: a turn at or above it is remembered. Of binary rewards: every success."""
    lower: float = Field(default=Rules.lower, ge=0, lt=50)
    """Percentile: what a turn below it had recalled is penalised."""
    merge: float = Field(default=Rules.merge, gt=0, le=1)
    """Similarity of two situations from which on only the better record stays."""
    floor: float = Rules.floor
    """Records whose score falls below it are deleted."""
    alpha: float = Field(default=Rules.alpha, gt=0)
    """Score per unit of reward above or below the window's mean."""
    beta: float = Field(default=Rules.beta, ge=0)
    """Speed of decay."""
    decay_steps: float = Field(default=Rules.decay_steps, gt=0)
    """Training steps in which, with `beta` 1, a score falls to 1/e."""

    def apply(self, plan: Plan) -> Plan:
        """Raises SpecError: unknown roles or rewards, or a role with two stores."""
        speaking = list(dict.fromkeys(_speaking(plan)))
        problems = list(self._problems(plan, speaking))
        if problems:
            raise SpecError(problems)
        own = set(self.roles if self.roles is not None else speaking)
        shared = {role for roles in self.share.values() for role in roles}
        stores = {name: list(roles) for name, roles in self.share.items()}
        stores |= {role: [role] for role in speaking if role in own - shared}
        rules = {name: getattr(self, name) for name in asdict(Rules())}
        options = {"stores": stores, "rewards": list(self.rewards), "recall": self.recall, "rules": rules}
        options["demonstrations"] = self.demonstrations and bool(plan.data.get("warm_start"))
        stages = tuple(StageIR(s.name, "memory", options) if s.name == "evolve" else s for s in plan.stages)
        return replace(plan, stages=stages)

    def _problems(self, plan: Plan, speaking: list[str]) -> Iterator[Problem]:
        where = Where()  # the compiler knows the line
        rewards = list(_rewards(plan.graph, plan.workflows, ""))
        for name in self.rewards:
            if name not in rewards:
                yield unknown(where, "reward", name, rewards)
        shared = [role for roles in self.share.values() for role in roles]
        for role in dict.fromkeys((*(self.roles or ()), *shared)):
            if role not in speaking:
                yield unknown(where, "role", role, speaking)
        for role, times in Counter(shared).items():
            if times > 1:
                message = f"'share' names role '{role}' {times} times, and a role has one memory"
                yield Problem.at(where, "memory-twice", message, f"leave '{role}' in one of the stores")
        for name in self.share:
            if name in speaking and name not in self.share[name]:
                message = f"the shared store '{name}' has the name of a role that doesn't share it"
                yield Problem.at(where, "memory-name", message, f"give it another name, or add '{name}'")


def _speaking(plan: Plan) -> Iterator[str]:
    """Qualified roles that nodes speak as, or that stand in for people."""
    for place in graphs_below(plan.root, plan.workflows):
        for node in place.graph.nodes:
            answers = node.human.in_training if node.human else None
            stand_in = (str(answers["role"]),) if isinstance(answers, dict) and "role" in answers else ()
            yield from (place.prefix + role for role in (*speakers_of(node), *stand_in))


def _rewards(graph: Graph, workflows: Mapping[str, Graph], prefix: str) -> Iterator[str]:
    """Rewards that are paid in an episode, under the names that the trace has for them."""
    yield from (prefix + reward.name for reward in graph.rewards)
    for node in graph.nodes:
        if node.keep_rewards and node.workflow:
            yield from _rewards(workflows[node.workflow], workflows, f"{prefix}{node.name}/")
