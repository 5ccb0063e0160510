"""DAPO: GRPO with a higher upper clip, a mean over the batch's tokens, soft lengths and dynamic sampling."""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal
from masflow.spec.experiment import Dynamic, Overlong


def refuse(facts: Facts) -> Iterator[Refusal]:
    own = facts.algorithm
    if own.weight != "token_mean":
        message = f"dapo's loss is a mean over the batch's tokens; 'weight: {own.weight}' is another's"
        yield Refusal("weight", message, "remove it, or write use: grpo with clip_high: 0.28")


PRESET = Preset(
    name="dapo",
    paper="Yu et al. 2025, arXiv 2503.14476, eq. 8, 10, 11, 13",
    says="upper clip 0.28; mean over the batch's tokens; long replies pay; tasks without a lesson are redrawn",
    fields={
        "advantage": "group_norm",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "weight": "token_mean",
        "overlong": Overlong(),
        "dynamic": Dynamic(),
    },
    refuse=refuse,
    differs="the penalty begins at four fifths of the role's own `max_tokens`; `max_rounds` of drawing: ours",
)
