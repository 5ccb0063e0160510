"""`node_sampling`: several actions from one context at the turns of one base episode a task, instead of
several episodes.

Section 3 of JoyAgents-R1 (arXiv 2506.19846) branches at nodes; where it is silent the choices are ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from masflow.compiler.plan import Plan, SamplerIR, StageIR
from masflow.compiler.team import graphs_below
from masflow.errors import Problem, SpecError, Where
from masflow.spec.base import Spec

__all__ = ["NodeSampling"]


class NodeSampling(Spec):
    """Play one base episode a task; at its turns draw `samples` actions from the same context.

    The base episode's own action is one of them. The turns that are trained are these actions alone, the
    groups are the actions of one context, and E (the divisor of the loss) is tasks x samples.

    On a chain of N turns a task costs G·N actions and, with credit `rollout`, G·M·N(N-1)/2 suffix turns, of
    which N(N-1)/2 are the base episode's own.

        passes:
          - node_sampling: {samples: 5, temperature: 1.2}
    """

    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    samples: int = Field(default=5, ge=2)
    """Actions drawn from each context: G."""
    credit: Literal["rollout", "splice", "fixed_suffix", "local"] = "rollout"
    """`rollout`: the rest of the episode is played under the current policies behind every action, and what
    the action is credited with is the mean over its continuations: unbiased (with `group_mean` up to the
    factor (G-1)/G, with `leave_one_out` exactly). `splice`: a turn behind it is the base episode's own where
    its prompt is the same, byte for byte, else it is played: cheaper, and each action's value stays unbiased
    while turns come in the base's order.
    `fixed_suffix`: the base episode's replies stand behind every action, whatever it said (the paper's
    literal reading); only turns that the base episode never had are played: biased. `local`: only the turn's
    own rewards, nothing is played behind it: cheapest, and biased wherever later turns hang on the
    action."""
    continuations: int | None = Field(default=None, ge=1)
    """M: how often the rest is played behind each action. Default: 1; with the pass `top_k` and credit
    `rollout` 2, for one continuation can't tell an action's benefit from its luck."""
    max_nodes: int | None = Field(default=None, ge=1)
    """Turns of a base episode that are branched at, drawn uniformly; each then weighs N / `max_nodes`.
    Default: all. They are known only when the base episode is over, so that drawing takes two rounds."""
    advance: Literal["base", "best"] = "base"
    """Which action the episode goes on with: `base`, its own, as any policy would; `best`, the one of the
    context with the highest reward, at ties the first (AT-GRPO, arXiv 2510.11062, section 4.1). For `best`
    credit is `local`, for the rewards have to be known. Contexts further on are then better ones than the
    policy alone would get to, and so are the rewards that training reports."""
    temperature: float | None = Field(default=None, ge=1e-3, le=1e3)
    """In place of `algorithm.temperature`, for base episodes, actions and suffixes alike."""

    def apply(self, plan: Plan) -> Plan:
        """Raises SpecError: the settings contradict each other or the workflow's rewards."""
        problems = list(self._problems(plan))
        if problems:
            raise SpecError(problems)
        temperature = plan.algorithm.temperature if self.temperature is None else self.temperature
        options = {
            "credit": self.credit,
            "continuations": self.continuations or 1,
            **({"max_nodes": self.max_nodes} if self.max_nodes is not None else {}),
            **({"advance": self.advance} if self.advance != "base" else {}),
        }
        ops = {"sample": "nodes", "group": "siblings"}
        return replace(
            plan,
            algorithm=plan.algorithm.model_copy(update={"samples": self.samples, "temperature": temperature}),
            sampler=SamplerIR("nodes", self.samples, options),
            stages=tuple(StageIR(s.name, ops.get(s.name, s.op), s.options) for s in plan.stages),
            groups=tuple(replace(group, expected_size=self.samples) for group in plan.groups),
        )

    def _problems(self, plan: Plan) -> list[Problem]:
        where, found = Where(), []  # the compiler knows the line
        if self.credit != "rollout" and (self.continuations or 1) > 1:
            message = f"'continuations' belongs to credit 'rollout'; with '{self.credit}' it has no effect"
            found.append(Problem.at(where, "option-without-effect", message, "remove it"))
        if self.advance == "best" and (self.credit != "local" or self.max_nodes is not None):
            given = f"credit: {self.credit}" if self.credit != "local" else "max_nodes"
            message = (
                "'advance: best' has to know what every action earns before the episode goes on, and with"
                f" '{given}' it doesn't"
            )
            fix = "write credit: local" if self.credit != "local" else "remove max_nodes"
            found.append(Problem.at(where, "wrong-pair", message, f"{fix}, or advance: base"))
        graphs = [place.graph for place in graphs_below(plan.root, plan.workflows)]
        own = [r for g in graphs for r in g.rewards if r.level == "turn" and not r.allocator and r.weight]
        if self.credit == "local" and plan.graph.rewards and not own:
            message = (
                "credit 'local' sees a turn's own rewards only, and this workflow has none at level turn"
            )
            other = "credit: rollout" + (", advance: base" if self.advance == "best" else "")
            fix = (
                f"write passes: [node_sampling: {{{other}}}], or give the workflow a reward with level: turn"
            )
            found.append(Problem.at(where, "no-local-reward", message, fix))
        return found
