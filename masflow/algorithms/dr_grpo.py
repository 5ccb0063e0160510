"""Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): GRPO without its two biases.

A = r - mean, not divided by the standard deviation, which would weigh easy and hard tasks more (eq. 4); the
tokens' losses are summed and divided by a constant, not by the reply's length, which would favour long
wrong replies (section 3.2). Defaults: 8 samples, ε 0.2, the constant is the role's `max_tokens`.
"""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal


def refuse(facts: Facts) -> Iterator[Refusal]:
    own = facts.algorithm
    if own.advantage == "group_norm":
        message = (
            "dr_grpo doesn't divide by the group's standard deviation: easy and hard tasks weigh more so"
        )
        yield Refusal("advantage", message, "remove it, or write use: grpo")
    if own.weight != "episode":
        message = f"'weight: {own.weight}' divides by lengths again, which dr_grpo does away with"
        yield Refusal("weight", message, "remove it, or write use: dapo")


PRESET = Preset(
    name="dr_grpo",
    paper="Liu et al. 2025, arXiv 2503.20783, eq. 4 and section 3.2",
    says="reward minus the group's mean; tokens are summed over a constant length, not averaged",
    fields={"advantage": "group_mean", "turn_loss": "sum"},
    fixed=("turn_loss",),
    refuse=refuse,
    differs="the constant is the role's `max_tokens` unless `sum_length` is given",
)
