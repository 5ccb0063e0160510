"""Dr. MAS: GRPO whose mean and standard deviation are each agent's own, over all of its turns in a task."""

from masflow.algorithms import Preset

PRESET = Preset(
    name="dr_mas",
    paper="Feng et al. 2026, arXiv 2602.08847, agent-wise normalisation",
    says="each agent's turns in a task's episodes share one mean and one standard deviation",
    fields={"advantage": "group_norm", "group": "task_role"},
    fixed=("group",),
    differs="8 samples a task (published runs: 5 to 8); turns of one episode enter each other's baseline, as"
    " published: an agent that speaks more often in good episodes than in bad ones is held back",
)
