"""PPO with a turn as the action: a chain is one role's turns in one episode.

GAE (Schulman et al. 2015, arXiv 1506.02438, eq. 16) over the turns of a chain: what is paid between two
turns of a role belongs to the earlier. Defaults: g the workflow's `discount` a superstep, λ 0.95, ε 0.2, 2
passes, 1 sample, one critic a model.
"""

from masflow.algorithms import Preset
from masflow.spec.experiment import Critic, Gae

PRESET = Preset(
    name="turn_ppo",
    paper="Schulman et al. 2015, arXiv 1506.02438, eq. 16, with a turn as the step; the chains are ours",
    says="advantages of whole turns by a critic; rewards between two turns of a role accrue to the earlier",
    fields={
        "samples": 1,
        "advantage": "turn_gae",
        "epochs": 2,
        "critic": Critic(per="model"),
        "gae": Gae(lam=0.95),
    },
    fixed=("advantage",),
    differs="the discount is the workflow's, a superstep; lambda 0.95 is PPO's",
)
