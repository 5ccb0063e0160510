"""CISPO: the clipped ratio is a constant weight, so that no token loses its gradient."""

from masflow.algorithms import Preset

PRESET = Preset(
    name="cispo",
    paper="Chen et al. 2025 (MiniMax-M1), arXiv 2506.13585, eq. 4 and 5",
    says="REINFORCE on every token, times its ratio, held below a bound, as a constant; mean over tokens",
    fields={
        "advantage": "group_norm",
        "clip": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "weight": "token_mean",
    },
    fixed=("clip",),
    differs="weights lie between 0 (no lower bound, as in the paper) and 5 (the paper gives no number)",
)
