"""REINFORCE++: no critic, no groups; advantages are normalised over the batch, KL is part of the reward."""

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
