"""GRPO: a group's mean and standard deviation in place of a critic."""

from masflow.algorithms import Preset

PRESET = Preset(
    name="grpo",
    paper="Shao et al. 2024, arXiv 2402.03300, eq. 3 and section 4.1.2",
    says="reward minus the group's mean, divided by its standard deviation; mean over a turn's tokens",
    fields={"advantage": "group_norm", "turn_loss": "mean"},
    differs="no KL unless `kl.weight` is given (paper: 0.04)",
)
