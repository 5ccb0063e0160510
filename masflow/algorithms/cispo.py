"""CISPO (Chen et al. 2025, MiniMax-M1, arXiv 2506.13585): no token loses its gradient.

-sg(min(w, 1 + ε_high)) A log π, sg being a constant and w a token's ratio, in a mean over the batch's
tokens (eq. 4, 5); A as GRPO's. Defaults: ε_high 4, no lower bound (`clip_low: 1`), 8 samples.
"""

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
