"""IPPO (de Witt et al. 2020, arXiv 2011.09533): every role learns by itself, with a critic of its own.

The advantages are GAE's over a role's own turns (section 3). Defaults: as `turn_ppo`, but one critic a
role.
"""

from masflow.algorithms import Preset
from masflow.algorithms.critics import refuse_central
from masflow.spec.experiment import Critic, Gae

PRESET = Preset(
    name="ippo",
    paper="de Witt et al. 2020, arXiv 2011.09533, section 3",
    says="one critic a role, which sees what that role was asked; chains of that role's turns",
    fields={
        "samples": 1,
        "advantage": "turn_gae",
        "epochs": 2,
        "critic": Critic(per="role"),
        "gae": Gae(lam=0.95),
    },
    fixed=("advantage",),
    refuse=refuse_central,
    differs="the paper's agents share weights; here the mapping says who does",
)
