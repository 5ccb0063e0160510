"""M-GRPO (Hong et al. 2025, arXiv 2511.13288): a main agent's episodes and a sub-agent's calls, apart.

A = (r - mean) / (std + 1e-6), one number an episode or call, shared by its turns; each call weighs one over
the calls of its episode. Defaults: 8 samples, ε 0.2.
"""

from collections.abc import Iterator

from masflow.algorithms import Facts, Preset, Refusal


def refuse(facts: Facts) -> Iterator[Refusal]:
    members = [member for roles in facts.roles.values() for member in roles]
    if members and not any("/" in member for member in members):
        message = "m_grpo has a main agent and sub-agents, and no role that learns stands in a sub-workflow"
        yield Refusal("use", message, "put the sub-agents in a sub-workflow, or use: dr_mas (or grpo)")


PRESET = Preset(
    name="m_grpo",
    paper="Hong et al. 2025, arXiv 2511.13288, the advantages of main and sub-agents, trajectory alignment",
    says="the main agent's episodes, and a sub-agent's calls, are compared among those of one task",
    fields={"advantage": "group_norm", "group": "task_call", "weight": "call_mean"},
    fixed=("group",),
    refuse=refuse,
    differs="sub-agents' calls aren't copied or dropped at random until each episode has as many: each weighs"
    " one over its episode's, the expectation of that; calls of one episode are compared with each other, as"
    " published; the upper clip is 0.2 (published code: 0.28); the weights of format, correctness and the"
    " expert's verdict are the workflow's `weight`s, for the paper gives none",
)
