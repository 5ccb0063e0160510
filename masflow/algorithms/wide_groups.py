"""What can't go with groups that are wider than one place of a task (`group:` task_role, task_call, task,
state)."""

from __future__ import annotations

from collections.abc import Iterator

from masflow.algorithms import Facts, Refusal

__all__ = ["refuse_wide_groups"]

COMPARING = ("group_norm", "group_mean", "leave_one_out")
"""Advantages within groups."""
USELESS = "option-without-effect"


def refuse_wide_groups(facts: Facts) -> Iterator[Refusal]:
    """Pairs of any algorithm with a `group`."""
    own = facts.algorithm
    if "step_weight" in facts.given and own.group != "state":
        message = "'step_weight' has no effect: turns that were asked the same aren't compared"
        yield Refusal("step_weight", message, "remove it, or write use: gigpo", USELESS)
    if own.group == "task_role_path":
        return
    if own.advantage == "batch_norm":
        return  # refused whatever the group
    if own.advantage not in COMPARING:
        message = f"'group: {own.group}' has no effect: '{own.advantage}' compares no groups"
        yield Refusal("group", message, "remove it, or write advantage: group_norm", USELESS)
        return
    if "node_sampling" in facts.passes:
        message = (
            f"'node_sampling' compares actions drawn from one context, and 'group: {own.group}' mixes them"
        )
        yield Refusal("group", message, "remove the pass 'node_sampling', or use: grpo (or at_grpo)")
    if own.singleton != "skip":
        message = f"'role_baseline' knows turns at one place only, and 'group: {own.group}' is wider"
        yield Refusal("singleton", message, "remove it, or write group: task_role_path")
    if own.group in ("task", "task_call") and facts.credit == "return_to_go":
        message = f"'group: {own.group}' gives turns one number, and under 'return_to_go' each has its own"
        yield Refusal("group", message, "write credit: own in the workflow, or use: dr_mas (or grpo)")
