"""MAPPO (Yu et al. 2021, arXiv 2103.01955): one critic for the team, which sees what every role was asked.

The advantages are GAE's over all turns of an episode, on the team's reward (section 3, appendix A).
Defaults: as `turn_ppo`, but one critic for the team.
"""

from masflow.algorithms import Preset
from masflow.algorithms.critics import refuse_central
from masflow.spec.experiment import Critic, Gae

PRESET = Preset(
    name="mappo",
    paper="Yu et al. 2021, arXiv 2103.01955, section 3 and appendix A",
    says="one central critic on the team's reward; it reads the last prompt and reply of every other role"
    " beside the acting role's prompt; chains cross roles",
    fields={
        "samples": 1,
        "advantage": "turn_gae",
        "epochs": 2,
        "critic": Critic(per="team"),
        "gae": Gae(lam=0.95),
    },
    fixed=("advantage",),
    refuse=refuse_central,
    differs="values aren't normalised by a running mean (paper: PopArt); one value head a role",
)
