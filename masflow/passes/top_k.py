"""`top_k`: only the groups from which most can be learned are trained on.

Section 3.2 of JoyAgents-R1 (arXiv 2506.19846), with the correction that `masflow.rl.selection` explains;
where the paper is silent the choices are ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from masflow.compiler.plan import Plan, StageIR
from masflow.errors import Problem, SpecError, Where
from masflow.spec.base import Fault, Spec

__all__ = ["TopK"]

NO_GROUPS = ("batch_norm", "gae", "turn_gae")


def _number_or_share(value: Any) -> Any:
    if value == "all":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value < 1:
            return value
        if value >= 1 and value % 1 == 0:
            return int(value)
    message = f"'k' is {value}; it is a number of groups, a share of them below 1, or all"
    raise Fault(message, code="pass-setting", fix="write a number like 5, a share like 0.25, or all")


class TopK(Spec):
    """Train on the K groups of largest benefit: the variance of what their actions bring, less the part of
    it that is the luck of what came later.

    A group is selected only where its benefit is above 0. The divisor of the loss and the weights of turns
    stay what they were. A policy without a selected group is not updated in that step. What is selected is
    selected by the very rewards that form its gradient, which is biased.

        passes:
          - node_sampling: {samples: 5, temperature: 1.2}
          - top_k: {k: 5}

    With `node_sampling` and credit `rollout`, `continuations` becomes 2 unless it is written. With one, and
    with whole episodes, nothing tells luck from benefit, and the plain variance counts: early turns win.
    """

    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ("node_sampling",)

    k: Annotated[int | float | Literal["all"], BeforeValidator(_number_or_share)] = 5
    """How many groups, or below 1 which share of them, rounded up. `all`: every group whose benefit is above
    0."""
    scope: Literal["task", "batch"] = "task"
    """K groups of each task, or K of the whole step."""
    normalize: Literal["none", "role_range"] = "none"
    """`role_range`: benefits are divided by the square of the range of the role's values in the step, for
    teams whose roles are paid on different scales."""

    def apply(self, plan: Plan) -> Plan:
        """Raises SpecError: the algorithm has no groups to choose from."""
        algorithm = plan.algorithm
        if algorithm.advantage in NO_GROUPS or algorithm.group == "state":
            what = f"'{algorithm.advantage}' has no groups, it judges every turn by itself"
            if algorithm.group == "state":
                what = "'group: state' compares each turn twice, in two groups"
            message = f"'top_k' chooses among groups of compared turns, and {what}"
            fix = "remove the pass, or choose an algorithm with groups, like use: grpo"
            raise SpecError([Problem.at(Where(), "wrong-pair", message, fix)])
        sampler = plan.sampler
        if sampler.kind == "nodes" and sampler.options["credit"] == "rollout" and not _said(plan):
            sampler = replace(sampler, options={**sampler.options, "continuations": 2})
        is_mean = sampler.kind == "nodes" and sampler.options["continuations"] > 1
        options: dict[str, Any] = {
            "k": self.k,
            "scope": self.scope,
            "normalize": self.normalize,
            "corrected": is_mean,
        }
        stages = (StageIR("select", "top_k", options) if s.name == "select" else s for s in plan.stages)
        return replace(plan, sampler=sampler, stages=tuple(stages))


def _said(plan: Plan) -> bool:
    """Whether the experiment says how often node sampling continues."""
    settings = [p["settings"] for p in plan.passes if p["name"] == "node_sampling"]
    return any(s.get("continuations") is not None for s in settings)
