"""Draws tokens: each row's draw depends only on its own seed, its own logits and its own place.

Shapes: B rows, V vocabulary. The uniforms of a row come from a counter-based generator keyed by its seed,
and a token is the inverse of the cumulative distribution at its uniform: the company in a batch changes
nothing. Rows may join and leave at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from masflow.models.engine import SamplingParams

__all__ = ["NotFinite", "Sampler", "draw", "filter_logits"]

_BLOCK = 64
"""Uniforms that a row draws at once."""
_SLICE = 64
"""Vocabulary entries of a slice."""


class NotFinite(ArithmeticError):
    """Logits from which nothing can be drawn: NaN or infinite. `rows` are their places in the batch."""

    def __init__(self, rows: Sequence[int]):
        super().__init__(rows)
        self.rows = list(rows)


class Streams:
    """Numbers in [0, 1) by seed and place: the stream of `Generator(Philox(key=seed)).random()`."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._state: Any = self._philox.state

    def block(self, seed: int, number: int) -> np.ndarray:
        """(64,) float64: those from place 64 · `number` on."""
        state = self._state
        state["state"]["key"][:] = seed & (2**64 - 1), seed >> 64
        state["state"]["counter"][:] = number * _BLOCK // 4, 0, 0, 0
        self._philox.state = state
        return self._generator.random(_BLOCK)


class Sampler:
    """The sampling state of the rows of one batch, in their order."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams = Streams()
        self._seeds: list[int] = []
        self._uniforms = np.empty((0, _BLOCK))
        self._place_B = np.empty(0, dtype=np.int64)
        self._params: list[SamplingParams] = []
        self._settle()

    def join(self, params: Sequence[SamplingParams], seeds: Sequence[int]) -> None:
        """New rows behind those that are here."""
        blocks = [self._streams.block(seed, 0) for seed in seeds]
        self._seeds += seeds
        self._uniforms = np.concatenate([self._uniforms, blocks]) if blocks else self._uniforms
        self._place_B = np.concatenate([self._place_B, np.zeros(len(seeds), dtype=np.int64)])
        self._params += params
        self._settle()

    def select(self, stay: np.ndarray) -> None:
        """Keep these rows, (n,) int64, in this order."""
        self._seeds = [self._seeds[row] for row in stay]
        self._params = [self._params[row] for row in stay]
        self._uniforms, self._place_B = self._uniforms[stay], self._place_B[stay]
        self._settle()

    def _settle(self) -> None:
        params = self._params
        heats = [p.temperature for p in params]
        self._first_B = np.arange(len(params)) * _BLOCK
        self._left = int((_BLOCK - self._place_B % _BLOCK).min(initial=_BLOCK))
        """Steps until the first row has used up its block."""
        self._is_plain = all(p.top_k <= 0 and p.top_p >= 1.0 for p in params)
        self._is_greedy = all(heat <= 0 for heat in heats)
        self._any_greedy = any(heat <= 0 for heat in heats)
        self._is_at_one = all(heat == 1.0 for heat in heats)
        self._temperature_B1 = torch.tensor(heats, dtype=torch.float32, device=self.device)[:, None]
        if not self._is_plain:
            self._top_k_B = torch.tensor([p.top_k for p in params], device=self.device)
            self._top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=self.device)

    def draw(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (B,) int64 and their log-probs (B,) float32 under the distribution sampled from; every row
        is then one place further.

        A greedy row (temperature 0) takes the largest logit; its log-prob is the one at temperature 1. Where
        nothing can be drawn the log-prob isn't finite.
        """
        uniform_B = self._next()
        if self._is_greedy:
            return _greedy(logits_BV)
        if self._is_at_one:
            return _invert(self._shape(logits_BV), uniform_B)
        if not self._any_greedy:
            return _invert(self._shape(logits_BV / self._temperature_B1), uniform_B)
        is_greedy_B = self._temperature_B1[:, 0] <= 0
        scaled_BV = logits_BV / torch.where(self._temperature_B1 > 0, self._temperature_B1, 1.0)
        token_B, logprob_B = _invert(self._shape(scaled_BV), uniform_B)
        best_B, best_logprob_B = _greedy(logits_BV)
        token_B = torch.where(is_greedy_B, best_B, token_B)
        return token_B, torch.where(is_greedy_B, best_logprob_B, logprob_B)

    def _shape(self, logits_BV: Tensor) -> Tensor:
        return logits_BV if self._is_plain else filter_logits(logits_BV, self._top_k_B, self._top_p_B)

    def _next(self) -> Tensor:
        """(B,) float64 in [0, 1): the next number of each row's stream."""
        uniform_B = self._uniforms.take(self._first_B + self._place_B % _BLOCK)
        self._place_B += 1
        self._left -= 1
        if not self._left:
            for row in (self._place_B % _BLOCK == 0).nonzero()[0]:
                self._uniforms[row] = self._streams.block(self._seeds[row], int(self._place_B[row]) // _BLOCK)
            self._left = int((_BLOCK - self._place_B % _BLOCK).min())
        return torch.from_numpy(uniform_B).to(self.device)


def draw(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the cumulative distribution of softmax(logits) at the uniforms.

    In two stages, since a cumulative sum over the whole vocabulary is slow: first the slice of it, then the
    token in the slice. Sums across slices are float64.

    Args:
        logits_BV: (B, V); -inf is never drawn.
        uniform_B: (B,) float64 in [0, 1).
    Returns:
        (B,) int64 tokens; (B,) float32 log-probs.
    Raises:
        NotFinite: rows with NaN, with +inf, or with nothing to draw.
    """
    token_B, logprob_B = _invert(logits_BV, uniform_B)
    finite_B = logprob_B.isfinite()
    if not bool(finite_B.all()):
        raise NotFinite((~finite_B).nonzero()[:, 0].tolist())
    return token_B, logprob_B


def _greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    top_B, best_B = logits_BV.max(-1)
    return best_B, (top_B - logits_BV.logsumexp(-1)).float()


def _invert(logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """As `draw`; where nothing can be drawn the log-prob is NaN and the token any."""
    probs_BV = torch.softmax(logits_BV, -1, dtype=torch.float32)
    size = probs_BV.shape[-1]
    if size % _SLICE:
        probs_BV = torch.nn.functional.pad(probs_BV, (0, -size % _SLICE))
    slices_BKS = probs_BV.unflatten(-1, (-1, _SLICE))
    ends_BK = slices_BKS.sum(-1).cumsum(-1, dtype=torch.float64)
    aim_B1 = (uniform_B * ends_BK[:, -1])[:, None]
    slice_B1 = _first_above(ends_BK, aim_B1)
    before_B1 = torch.where(slice_B1 > 0, ends_BK.gather(-1, (slice_B1 - 1).clamp_(min=0)), 0.0)
    chosen_BS = slices_BKS[torch.arange(len(logits_BV), device=logits_BV.device), slice_B1[:, 0]]
    place_B1 = _first_above(chosen_BS.cumsum(-1, dtype=torch.float64), aim_B1 - before_B1)
    token_B1 = (slice_B1 * _SLICE + place_B1).clamp_(max=size - 1)
    return token_B1[:, 0], chosen_BS.gather(-1, place_B1)[:, 0].log()


def _first_above(sums_BN: Tensor, aim_B1: Tensor) -> Tensor:
    """Place (B, 1) of the first cumulative sum above the aim; rounding never leads beyond the last mass."""
    last_B1 = sums_BN[:, -1:]
    aim_B1 = torch.minimum(aim_B1, torch.nextafter(last_B1, last_B1 - 1))
    return torch.searchsorted(sums_BN, aim_B1, right=True).clamp_(max=sums_BN.shape[-1] - 1)


def filter_logits(logits_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor) -> Tensor:
    """Set to -inf what a row's top-k, then its top-p (nucleus, arXiv 1904.09751) leave out.

    Args:
        top_k_B: (B,) int64, 0 is off.
        top_p_B: (B,) float32, 1 is off. The token that crosses the threshold stays.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    limit_B1 = torch.where(top_k_B > 0, top_k_B, logits_BV.shape[-1])[:, None]
    sorted_BV = sorted_BV.masked_fill(rank_V >= limit_B1, -torch.inf)
    probs_BV = sorted_BV.softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    out_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1) & (rank_V > 0)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV.masked_fill(out_BV, -torch.inf))
