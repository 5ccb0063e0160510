"""Declare a team of language-model agents; a compiler turns it into multi-agent reinforcement learning.

Light on purpose: importing this package imports neither torch nor ray.
"""

from masflow.errors import EpisodeError, MasflowError, Problem, RunError, SpecError

__all__ = ["EpisodeError", "MasflowError", "Problem", "RunError", "SpecError", "__version__"]

__version__ = "0.1.0"
