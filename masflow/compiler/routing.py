"""Rewards as written → rewards routed: a function or a judge, a level, and whose turns are paid."""

from __future__ import annotations

from masflow.compiler.documents import Doc
from masflow.compiler.graph import FunctionIR, RewardIR
from masflow.errors import Problem
from masflow.spec.workflow import Reward

__all__ = ["BUILT_IN_REWARDS", "lower_rewards"]

BUILT_IN_REWARDS = ("well_formed",)
_JUDGE = "role:"


def lower_rewards(doc: Doc, problems: list[Problem]) -> tuple[RewardIR, ...]:
    """Every reward; a function's signature is read later, together with all others."""
    return tuple(_lower(doc, reward, i, problems) for i, reward in enumerate(doc.spec.rewards))


def _lower(doc: Doc, reward: Reward, i: int, problems: list[Problem]) -> RewardIR:
    function, judge = None, None
    if reward.use.startswith(_JUDGE):
        judge = reward.use.removeprefix(_JUDGE).strip()
    elif reward.use not in BUILT_IN_REWARDS:
        function = _function(doc, reward, i, problems)
    measure = reward.measure
    return RewardIR(
        name=reward.name,
        function=function,
        judge=judge,
        level="turn"
        if measure or (reward.use in BUILT_IN_REWARDS and not reward.level)
        else reward.level or "trajectory",
        args=reward.args,
        roles=reward.roles or (),
        nodes=reward.nodes or (),
        when=reward.when,
        weight=reward.weight,
        to=reward.to or (),
        otherwise=reward.otherwise,
        measure_after=measure.after if measure else (),
        measure_args=measure.args if measure else {},
        start=measure.start if measure else 0.0,
        pay=tuple((reward.pay or {}).items()),
        timeout_s=reward.timeout_s,
        batch=reward.batch,
        isolate=reward.isolate,
        memory_gb=reward.memory_gb,
        where=doc.where("rewards", i),
    )


def _function(doc: Doc, reward: Reward, i: int, problems: list[Problem]) -> FunctionIR | None:
    ref = doc.function(reward.use, problems, "rewards", i, "use")
    return FunctionIR(ref) if ref else None
