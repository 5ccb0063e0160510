"""What algorithms with a learned critic have in common: their settings, and what can't go with a critic."""

from __future__ import annotations

from collections.abc import Iterator

from masflow.algorithms import Facts, Refusal
from masflow.spec.experiment import Algorithm, Critic, Gae

__all__ = ["WITH_CRITIC", "critic_of", "gae_of", "refuse_central", "refuse_critic"]

WITH_CRITIC = ("gae", "turn_gae")
"""Advantages that are differences to a critic's values."""
USELESS = "option-without-effect"


def critic_of(algorithm: Algorithm) -> Critic | None:
    """The critic of a filled algorithm, with `per`; None: its baselines are other samples."""
    if algorithm.advantage not in WITH_CRITIC:
        return None
    critic = algorithm.critic or Critic()
    return critic if critic.per else critic.model_copy(update={"per": "model"})


def gae_of(algorithm: Algorithm) -> Gae:
    """Lambda, and the discount of a token, of a filled algorithm."""
    gae = algorithm.gae or Gae()
    return gae if gae.gamma is not None else gae.model_copy(update={"gamma": 1.0})


def refuse_critic(facts: Facts) -> Iterator[Refusal]:
    """Pairs of any advantage with or without a critic."""
    own, critic = facts.algorithm, critic_of(facts.algorithm)
    if critic is None:
        for key in ("critic", "gae"):
            if key in facts.given:
                message = f"'{key}' has no effect: '{own.advantage}' compares samples, and asks no critic"
                fix = f"remove '{key}', or write advantage: gae (or turn_gae)"
                yield Refusal(key, message, fix, USELESS)
        return
    for name in facts.passes:
        if name in ("node_sampling", "top_k"):
            message = f"'{name}' compares actions drawn from one context, and a critic compares none"
            yield Refusal("advantage", message, f"remove the pass '{name}', or use: grpo")
    if own.singleton != "skip":
        message = "'singleton' has no effect: with a critic no turn needs others to be compared with"
        yield Refusal("singleton", message, "remove it", USELESS)
    if own.negative_weight != 1.0 and own.advantage == "gae":
        message = "'negative_weight' weighs the advantages of turns, and 'gae' has one a token"
        yield Refusal("negative_weight", message, "remove it, or write advantage: turn_gae")
    if own.kl.weight and own.kl.place == "reward":
        message = "with a critic the KL stands in the loss: values would have to foresee the penalty"
        yield Refusal("kl.place", message, "write place: loss")
    if own.advantage == "turn_gae" and own.gae is not None and own.gae.gamma is not None:
        message = "'gamma' is a token's discount; between turns the workflow's 'discount' holds"
        yield Refusal("gae.gamma", message, "remove it; write discount: … in the workflow", USELESS)
    if own.ratio == "sequence" and own.advantage == "gae":
        message = "one ratio a turn ('ratio: sequence') adds up the advantages that 'gae' gives its tokens"
        yield Refusal("ratio", message, "write ratio: token, or advantage: turn_gae")
    if facts.steps and critic.warmup_steps >= facts.steps:
        message = (
            f"critics alone learn for {critic.warmup_steps} steps, and the run has {facts.steps}: no policy"
            " would ever learn"
        )
        fix = f"write at most {facts.steps - 1}, or raise train.steps"
        yield Refusal("critic.warmup_steps", message, fix)
    if critic.per == "team" and own.advantage == "gae":
        message = "a central critic values what the team was asked, turn by turn, and not single tokens"
        yield Refusal("critic.per", message, "write advantage: turn_gae, or per: model (or role)")


def refuse_central(facts: Facts) -> Iterator[Refusal]:
    """Of algorithms that are what they are by who shares a critic."""
    wanted = {"mappo": "team", "ippo": "role"}[facts.algorithm.use]
    critic = critic_of(facts.algorithm)
    if critic is not None and critic.per != wanted:
        message = f"'per: {wanted}' is what makes {facts.algorithm.use}; '{critic.per}' is another algorithm"
        yield Refusal("critic.per", message, "remove 'per', or write use: turn_ppo", "fixed-by-algorithm")
