"""An algorithm in words: what its fields came to, without those that change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from masflow.algorithms import preset_of
from masflow.algorithms.critics import WITH_CRITIC, gae_of
from masflow.spec.experiment import Algorithm

__all__ = ["algorithm_words"]


def algorithm_words(algorithm: Algorithm) -> str:
    """Name, paper and settings, on one line.

    Args:
        algorithm: filled (`masflow.algorithms.filled`).
    """
    return f"{algorithm.use} ({preset_of(algorithm.use).paper}): {', '.join(_words(algorithm))}"


def _words(own: Algorithm) -> Iterator[str]:
    yield f"advantage {own.advantage}"
    yield f"weight {own.weight}"
    if own.weight == "episode":
        yield f"turn loss {own.turn_loss}"
    if own.ratio == "sequence":
        yield "ratio sequence"
    clip = f"clip -{own.clip_low:g} +{own.clip_high:g}"
    yield {"ppo": clip, "cispo": f"cispo {clip}"}.get(str(own.clip), "no clip")
    if own.dual_clip is not None:
        yield f"dual clip {own.dual_clip:g}"
    yield f"updates a step {own.updates_per_step}"
    if own.epochs != 1:
        yield f"passes {own.epochs}"
    if own.importance is not None:
        yield f"importance weights up to {own.importance.cap:g}"
    where = f" ({own.kl.estimator}, in the {own.kl.place})" if own.kl.weight else ""
    yield f"kl {own.kl.weight:g}{where}"
    yield f"entropy {own.entropy:g}"
    if own.overlong is not None and own.overlong.penalty:
        yield f"long replies pay up to {own.overlong.penalty:g}"
    if own.dynamic is not None and own.dynamic.max_rounds > 1:
        yield f"dynamic sampling, at most {own.dynamic.max_rounds} rounds"
    if own.advantage in WITH_CRITIC:
        yield f"gamma {gae_of(own).gamma:g}, lambda {gae_of(own).lam:g}"
