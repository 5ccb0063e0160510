"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no critic and no groups.

Each token has r - β Σ log π_old / π_ref, summed over itself and all later tokens (eq. 8), normalised by
mean and standard deviation over all tokens of the role's batch, whatever task (eq. 10); then PPO's clip
(eq. 9). Defaults: β 0.01, ε 0.2, 8 samples.
"""

from masflow.algorithms import Preset
from masflow.spec.experiment import Kl

PRESET = Preset(
    name="reinforce_pp",
    paper="Hu et al. 2025, arXiv 2501.03262, eq. 8 to 10",
    says="each token's reward less its KL to come, normalised over all tokens of the role's batch",
    fields={
        "advantage": "batch_norm",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl": Kl(weight=0.01, estimator="k1", place="reward"),
    },
    fixed=("advantage",),
    differs="normalised for each role and policy by itself; 8 samples a task where the paper draws 1 or more",
)
