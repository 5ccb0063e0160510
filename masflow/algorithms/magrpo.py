"""MAGRPO (Liu et al. 2025, arXiv 2508.04652): agents that act for one team reward.

A = R_t - mean over the group of the team's return from turn t on (eq. 1); each agent's plain policy
gradient, -A Σ log π without a clip (eq. 2). Defaults: 4 samples, log-probs divided by the role's
`max_tokens`.
"""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal


def refuse(facts: Facts) -> Iterator[Refusal]:
    if facts.individual and facts.credit == "own":
        message = (
            f"magrpo's agents share one reward, and '{facts.individual[0]}' pays some turns alone, which with"
            " 'credit: own' nobody else gets"
        )
        yield Refusal("use", message, "write credit: return_to_go in the workflow, or use: grpo")


PRESET = Preset(
    name="magrpo",
    paper="Liu et al. 2025, arXiv 2508.04652, eq. 1, 2 and algorithm 1",
    says="the team's return from a turn on, less the group's mean at that turn; a plain policy gradient",
    fields={
        "samples": 4,
        "advantage": "group_mean",
        "group": "task_role_path",
        "clip": "none",
        "turn_loss": "sum",
    },
    fixed=("group",),
    refuse=refuse,
    differs="a log-probability is a sum over tokens, divided by the role's `max_tokens`; episodes are drawn"
    " whole, where the published code also branches at turns; 4 samples: ours",
)
