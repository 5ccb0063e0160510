"""MATPO (Mo et al. 2025, arXiv 2510.04678): planner and workers in one model.

A = (R - mean) / (std + 1e-6) of an episode among a task's; it goes to every token of planner and workers,
in a mean over the batch's tokens. Defaults: 8 samples, ε 0.2.
"""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal


def refuse(facts: Facts) -> Iterator[Refusal]:
    policies = [policy for policies in facts.models.values() for policy in policies]
    if len(policies) > 1:
        message = f"matpo trains one model that plays all roles; here {len(policies)} policies learn"
        yield Refusal("use", message, "use a mapping with one model, or use: dr_mas (or m_grpo)")


PRESET = Preset(
    name="matpo",
    paper="Mo et al. 2025, arXiv 2510.04678, credit across planner and worker rollouts",
    says="one reward an episode, compared among a task's episodes; planner and workers share the advantage",
    fields={
        "advantage": "group_norm",
        "group": "task",
        "weight": "token_mean",
    },
    fixed=("group",),
    refuse=refuse,
    differs="the mean over the batch's tokens is verl's default, on which the published code runs; an"
    " episode's reward is the mean over its turns' (published: 0.9 accuracy + 0.1 format of tool calls, which"
    " are the workflow's `weight`s)",
)
