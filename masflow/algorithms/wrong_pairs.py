"""Pairs of an algorithm's fields that can't work together, or one without effect, whatever the preset."""

from __future__ import annotations

from collections.abc import Iterator

from masflow.algorithms import Facts, Refusal
from masflow.algorithms.critics import refuse_critic

__all__ = ["wrong_pairs"]

USELESS = "option-without-effect"


def wrong_pairs(facts: Facts) -> Iterator[Refusal]:
    """Every rule of this file."""
    yield from _group_of_one(facts)
    yield from _useless(facts)
    yield from _updates(facts)
    yield from refuse_critic(facts)


def _group_of_one(facts: Facts) -> Iterator[Refusal]:
    own = facts.algorithm
    if own.samples != 1 or own.advantage not in ("group_norm", "group_mean", "leave_one_out"):
        return
    if own.singleton == "skip":
        message = f"one sample a task leaves '{own.advantage}' without a baseline: nothing would train"
        yield Refusal(
            "samples", message, "write samples: 8, or singleton: role_baseline", code="group-of-one"
        )
    elif facts.tasks_per_step == 1:
        message = "one episode a step leaves 'role_baseline' nothing to compare with"
        yield Refusal("singleton", message, "raise samples, or train.tasks_per_step", code="group-of-one")


def _useless(facts: Facts) -> Iterator[Refusal]:
    own, given = facts.algorithm, facts.given
    if "sum_length" in given and own.turn_loss == "mean":
        yield Refusal("sum_length", "'sum_length' has no effect with turn_loss: mean", "remove it", USELESS)
    if "kl" in given and own.kl.weight == 0 and "estimator" in own.kl.model_fields_set:
        yield Refusal("kl", "'kl' has weight 0, so its estimator has no effect", "remove it", USELESS)


def _updates(facts: Facts) -> Iterator[Refusal]:
    updates, tasks = facts.algorithm.updates_per_step or 1, facts.tasks_per_step
    if updates > tasks:
        message = f"updates_per_step {updates} is more than the {tasks} tasks of a step"
        yield Refusal("updates_per_step", message, f"write at most {tasks}", code="too-many-updates")
