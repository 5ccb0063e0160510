"""Dr. MAS (Feng et al. 2026, arXiv 2602.08847): GRPO whose mean and deviation are each agent's own.

A = (r - mean_k) / (std_k + 1e-6), over all turns of agent k in a task's episodes (agent-wise
normalisation). Defaults: 8 samples, ε 0.2.
"""

from masflow.algorithms import Preset

PRESET = Preset(
    name="dr_mas",
    paper="Feng et al. 2026, arXiv 2602.08847, agent-wise normalisation",
    says="each agent's turns in a task's episodes share one mean and one standard deviation",
    fields={"advantage": "group_norm", "group": "task_role"},
    fixed=("group",),
    differs="8 samples a task (published: 8 for mathematics, 5 for search); turns of one episode enter"
    " each other's baseline, as published: an agent that speaks more often in good episodes than in bad"
    " ones is held back",
)
