"""RLOO (Ahmadian et al. 2024, arXiv 2402.14740): the mean of the other samples as an unbiased baseline.

A_i = r_i - mean of the group's others (eq. 8), that is n / (n - 1) times the difference to the mean of all.
Defaults: 8 samples; a clip of 0.2, which only shows with several updates a batch.
"""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal


def refuse(facts: Facts) -> Iterator[Refusal]:
    if facts.algorithm.advantage == "group_norm":
        message = (
            "a leave-one-out baseline isn't divided by a standard deviation: the others' is 0 whenever they"
            " agree, and the quotient explodes"
        )
        yield Refusal("advantage", message, "remove it, or write use: grpo")


PRESET = Preset(
    name="rloo",
    paper="Ahmadian et al. 2024, arXiv 2402.14740, eq. 8",
    says="reward minus the mean of the group's others, never divided by a standard deviation",
    fields={"advantage": "leave_one_out"},
    refuse=refuse,
    differs="turns' losses are means over their tokens; ratios are clipped, which one update never notices",
)
