"""GiGPO (Feng et al. 2025, arXiv 2505.10978): groups in groups.

A = A_episode + ω A_step (eq. 8): an episode's return among the task's (eq. 3), and a turn's discounted
return among the task's turns that were asked the same (eq. 5 to 7). Defaults: ω 1, 8 samples, ε 0.2.
"""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal


def refuse(facts: Facts) -> Iterator[Refusal]:
    if facts.individual and facts.credit == "own":
        message = (
            f"gigpo compares returns, and with 'credit: own' what '{facts.individual[0]}' pays stays with one"
            " turn"
        )
        yield Refusal("use", message, "write credit: return_to_go in the workflow, or use: grpo")


PRESET = Preset(
    name="gigpo",
    paper="Feng et al. 2025, arXiv 2505.10978, eq. 3, 5 to 8",
    says="the episode's advantage plus that among turns of a task with equal prompts",
    fields={"advantage": "group_norm", "group": "state", "step_weight": 1.0},
    fixed=("group",),
    refuse=refuse,
    differs="a state is a role's system prompt and last message at a node; the discount of a step is the"
    " workflow's `discount` (published: 0.95); an episode's return counts from the role's first turn; a"
    " state that is met twice in one episode is compared with itself, as published",
)
