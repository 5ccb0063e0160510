"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO with four changes.

Clip-higher: ratios are held within 1 - 0.2 and 1 + 0.28 (eq. 10). Token mean: the sum over all tokens of a
batch over their number (eq. 8). Overlong shaping: in the last L_cache tokens of the budget L_max a reply
pays (|y| - (L_max - L_cache)) / L_cache, a truncated one 1 (eq. 13). Dynamic sampling: tasks whose samples
are all equal are replaced by the next ones, in task order (eq. 11). Defaults: 8 samples, L_cache a fifth of
the role's `max_tokens`, at most 4 rounds of drawing.
"""

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
    says="upper clip 0.28; mean over the batch's tokens; long replies pay; tasks without a lesson make room",
    fields={
        "advantage": "group_norm",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "weight": "token_mean",
        "overlong": Overlong(penalty=1.0),
        "dynamic": Dynamic(max_rounds=4),
    },
    refuse=refuse,
    differs="the penalty begins at four fifths of the role's own `max_tokens`; `max_rounds` of drawing: ours",
)
