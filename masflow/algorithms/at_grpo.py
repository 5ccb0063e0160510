"""AT-GRPO (Zhao et al. 2025, arXiv 2510.11062): at each agent's turn a group of candidates from one context.

Candidates of one agent at one turn are compared as GRPO does; the episode goes on with the best (section
4.1). Defaults: 4 candidates, a turn's own reward, ε 0.2.
"""

from masflow.algorithms import Preset

PRESET = Preset(
    name="at_grpo",
    paper="Zhao et al. 2025, arXiv 2510.11062, section 4.1",
    says="candidates of one agent at one turn are compared; the episode goes on with the best",
    fields={"advantage": "group_norm", "group": "task_role_path"},
    passes={"node_sampling": {"samples": 4, "credit": "local", "advance": "best"}},
    fixed=("group",),
    differs="4 candidates: ours; a turn's reward is the workflow's turn rewards with their `weight`s"
    " (published: the team's plus the agent's own); training rewards are of the best candidates, and so"
    " higher than evaluation's",
)
