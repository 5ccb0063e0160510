"""Pairs of an algorithm's fields that can't work together, or one without effect, whatever the preset."""

from __future__ import annotations

from collections.abc import Iterator

from masflow.algorithms import Facts, Refusal
from masflow.algorithms.critics import refuse_critic
from masflow.algorithms.wide_groups import refuse_wide_groups

__all__ = ["wrong_pairs"]

USELESS = "option-without-effect"


def wrong_pairs(facts: Facts) -> Iterator[Refusal]:
    """Every rule of this file."""
    yield from _group_of_one(facts)
    yield from _useless(facts)
    yield from _updates(facts)
    yield from _clips(facts)
    yield from _kl(facts)
    yield from _whole_batch(facts)
    yield from _dynamic(facts)
    yield from refuse_wide_groups(facts)
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
    for key in ("turn_loss", "sum_length"):
        if key in given and own.weight != "episode":
            message = (
                f"'{key}' has no effect: 'weight: {own.weight}' divides by tokens, whichever turn has them"
            )
            yield Refusal(key, message, "remove it, or write weight: episode", USELESS)


def _clips(facts: Facts) -> Iterator[Refusal]:
    own = facts.algorithm
    if own.dual_clip is not None and own.clip != "ppo":
        message = f"'dual_clip' bounds PPO's loss; 'clip: {own.clip}' has none that grows with the ratio"
        if own.clip == "none":
            message = "'dual_clip' bounds a clipped loss, and 'clip: none' clips nothing"
        yield Refusal("dual_clip", message, "remove it, or write clip: ppo", USELESS)
    for key in ("clip_low", "clip_high"):
        if key in facts.given and own.clip == "none":
            yield Refusal(key, f"'{key}' has no effect with clip: none", "remove it", USELESS)
    if own.clip != "none" and (own.clip_low or 0.0) > 1:
        message = f"'clip_low: {own.clip_low:g}' would hold ratios above {1 - (own.clip_low or 0.0):g}: none"
        yield Refusal(
            "clip_low", f"{message} is ever below 0", "write a share, like 0.2; 1 is no lower bound"
        )
    if own.importance is not None and own.importance.cap < 1:
        message = (
            f"'cap: {own.importance.cap:g}' cuts the weight 1 of tokens on which engine and trainer agree,"
            " and so is a factor on every loss"
        )
        yield Refusal("importance.cap", message, "write at least 1, like 2")


def _kl(facts: Facts) -> Iterator[Refusal]:
    own, said = facts.algorithm, facts.algorithm.kl.model_fields_set
    if own.kl.weight == 0:
        for key in ("estimator", "place"):
            if "kl" in facts.given and key in said and own.use != "reinforce_pp":
                message = f"'kl' has weight 0, so its {key} has no effect"
                yield Refusal(f"kl.{key}", message, "remove it, or give kl a weight", USELESS)
        return
    if own.kl.place != "reward":
        return
    if own.advantage in ("group_norm", "group_mean", "leave_one_out"):
        message = (
            f"a KL in the reward is one of each token, and '{own.advantage}' compares whole turns: what a"
            " token paid would be lost in the turn's mean"
        )
        yield Refusal("kl.place", message, "write place: loss, or use: reinforce_pp")
    if own.kl.estimator != "k1" and "estimator" in said:
        message = (
            f"a KL in the reward is k1, the log-ratio itself; '{own.kl.estimator}' isn't additive in tokens"
        )
        yield Refusal("kl.estimator", message, "remove it, or write place: loss")
    if own.ratio == "sequence" and own.advantage == "batch_norm":
        message = "with a KL in the reward each token has an advantage, and 'ratio: sequence' has one a turn"
        yield Refusal("ratio", message, "write ratio: token, or kl: {place: loss}")
    if own.negative_weight != 1.0 and own.advantage == "batch_norm":
        message = (
            "'negative_weight' weighs the advantages of turns; with a KL in the reward each token has one"
        )
        yield Refusal("negative_weight", message, "remove it, or write kl: {place: loss}")


def _whole_batch(facts: Facts) -> Iterator[Refusal]:
    if facts.algorithm.advantage != "batch_norm":
        return
    for key, what in (("group", "who is in a group doesn't matter"), ("singleton", "no turn stands alone")):
        if key in facts.given:
            message = f"'{key}' has no effect: 'batch_norm' compares a turn with all of its role's, so {what}"
            yield Refusal(key, message, "remove it", USELESS)


def _dynamic(facts: Facts) -> Iterator[Refusal]:
    """Dynamic sampling asks which tasks have a group that is learnable."""
    own = facts.algorithm
    if own.dynamic is None or own.dynamic.max_rounds == 1:
        return
    fix = "write dynamic: false" if "dynamic" not in facts.given else "remove 'dynamic'"
    if own.advantage in ("batch_norm", "gae", "turn_gae"):
        message = f"'dynamic' replaces tasks whose groups are all equal, and '{own.advantage}' has no groups"
        yield Refusal("dynamic", message, fix)
    elif own.samples == 1:
        message = (
            "'dynamic' replaces tasks whose episodes are all equal, and one episode says nothing of that"
        )
        yield Refusal("samples", message, f"write samples: 8, or {fix.removeprefix('write ')}")
    reasons = {
        "node_sampling": "redraws whole episodes, and 'node_sampling' draws actions within one",
        "top_k": "and 'top_k' both say which groups are trained on",
    }
    for name in sorted(set(reasons) & set(facts.passes)):
        yield Refusal("dynamic", f"'dynamic' {reasons[name]}", f"{fix}, or the pass")


def _updates(facts: Facts) -> Iterator[Refusal]:
    updates, tasks = facts.algorithm.updates_per_step or 1, facts.tasks_per_step
    if updates > tasks:
        message = f"updates_per_step {updates} is more than the {tasks} tasks of a step"
        yield Refusal("updates_per_step", message, f"write at most {tasks}", code="too-many-updates")
