"""GRPO (Shao et al. 2024, arXiv 2402.03300): a group's mean and standard deviation in place of a critic.

A = (r - mean) / (std + 1e-6) over a task's samples (section 4.1.2); a turn's loss is the mean over its
tokens of -min(w A, clip(w, 1 - ε, 1 + ε) A), w being a token's probability ratio (eq. 3). Defaults: 8
samples, ε 0.2, no KL.
"""

from masflow.algorithms import Preset

PRESET = Preset(
    name="grpo",
    paper="Shao et al. 2024, arXiv 2402.03300, eq. 3 and section 4.1.2",
    says="reward minus the group's mean, divided by its standard deviation; mean over a turn's tokens",
    fields={"advantage": "group_norm", "turn_loss": "mean"},
    differs="no KL unless `kl.weight` is given (paper: 0.04)",
)
