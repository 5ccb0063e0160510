"""PPO (Schulman et al. 2017, arXiv 1707.06347): a critic's values of every token as the baseline.

A_t = Σ_l (g λ)^l (r_{t+l} + g V_{t+l+1} - V_{t+l}) (GAE, arXiv 1506.02438, eq. 16), whitened a role; then
-min(w A, clip(w, 1 - ε, 1 + ε) A) (eq. 7). Values may move by 0.2 a step. Defaults: g 1, λ 0.95, ε 0.2, 2
passes, 1 sample, one critic a model.
"""

from masflow.algorithms import Preset
from masflow.spec.experiment import Critic, Gae

PRESET = Preset(
    name="ppo",
    paper="Schulman et al. 2017, arXiv 1707.06347, eq. 7 and 11; 2015, arXiv 1506.02438, eq. 16",
    says="advantages of single tokens by a learned critic, whitened a role; what a turn is paid comes with"
    " its last token",
    fields={
        "samples": 1,
        "advantage": "gae",
        "epochs": 2,
        "critic": Critic(per="model"),
        "gae": Gae(lam=0.95),
    },
    fixed=("advantage",),
    differs="gamma 1 and 2 epochs (paper: 0.99 and 3 to 15, for other tasks); the critic is a network of its"
    " own, so there is no joint loss",
)
