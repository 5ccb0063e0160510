"""GSPO (Zheng et al. 2025, arXiv 2507.18071): one ratio a turn, with a very narrow clip.

s = (π(y) / π_old(y))^(1/|y|) (eq. 7); a turn's loss is -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A) (eq. 5,
section 5.1), A as GRPO's (eq. 6). Defaults: 8 samples, one mini-batch a step.
"""

from masflow.algorithms import Preset

PRESET = Preset(
    name="gspo",
    paper="Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7 and section 5.1",
    says="one probability ratio a turn, clipped as a whole",
    fields={
        "advantage": "group_norm",
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "turn_loss": "mean",
        "weight": "episode",
    },
    fixed=("ratio",),
    differs="1 mini-batch a step (paper: 4), so that no ratio leaves 1 unless `updates_per_step` is raised",
)
