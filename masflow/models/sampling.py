"""Draws tokens: each row's draw depends only on its own seed, its own logits and the token's place.

Shapes: B rows, V vocabulary. The uniforms of a row come from a counter-based generator keyed by its seed,
and a token is the inverse of the cumulative distribution at its uniform: the company in a batch changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Sampler:
    """The sampling state of the rows of one batch; `select` follows the rows that stay."""

    def __init__(self, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device):
        self.device = device
        self._generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
        self._rows = np.arange(len(params))
        self._blocks = np.empty((len(params), 0))
        self._start = 0
        self.temperature_B1 = torch.tensor(
            [[p.temperature] for p in params], dtype=torch.float32, device=device
        )
        self.top_k_B = torch.tensor([p.top_k for p in params], device=device)
        self.top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self._is_plain = all(p.top_k <= 0 and p.top_p >= 1.0 for p in params)
        self._any_greedy = any(p.temperature <= 0 for p in params)

    def select(self, keep_B: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self._rows = self._rows[keep_B.cpu().numpy()]
        self.temperature_B1 = self.temperature_B1[keep_B]
        self.top_k_B, self.top_p_B = self.top_k_B[keep_B], self.top_p_B[keep_B]

    def draw(self, logits_BV: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Tokens (B,) int64 and their log-probs (B,) float32 under the distribution sampled from.

        A greedy row (temperature 0) takes the largest logit; its log-prob is the one at temperature 1.
        """
        uniform_B = torch.from_numpy(self._uniforms(place)).to(self.device)
        if not self._any_greedy:
            return draw(self._shape(logits_BV / self.temperature_B1), uniform_B)
        greedy_B = self.temperature_B1[:, 0] <= 0
        scaled_BV = logits_BV / torch.where(self.temperature_B1 > 0, self.temperature_B1, 1.0)
        token_B, logprob_B = draw(self._shape(scaled_BV), uniform_B)
        best_B = logits_BV.argmax(-1)
        best_logprob_B = torch.log_softmax(logits_BV, -1).gather(-1, best_B[:, None])[:, 0]
        return torch.where(greedy_B, best_B, token_B), torch.where(greedy_B, best_logprob_B, logprob_B)

    def _shape(self, logits_BV: Tensor) -> Tensor:
        return logits_BV if self._is_plain else filter_logits(logits_BV, self.top_k_B, self.top_p_B)

    def _uniforms(self, place: int) -> np.ndarray:
        """(B,) float64 in [0, 1): the `place`-th number of each row's stream."""
        if place >= self._start + self._blocks.shape[1]:
            self._start, self._blocks = place - place % _BLOCK, np.empty((len(self._generators), _BLOCK))
            for row in self._rows:
                self._blocks[row] = self._generators[row].random(_BLOCK)
        return self._blocks[self._rows, place - self._start]


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
    top_B1 = logits_BV.amax(-1, keepdim=True)
    finite_B = top_B1[:, 0].isfinite()
    if not bool(finite_B.all()):
        raise NotFinite((~finite_B).nonzero()[:, 0].tolist())
    mass_BV = (logits_BV.float() - top_B1).exp()
    slices_BKS = torch.nn.functional.pad(mass_BV, (0, -mass_BV.shape[-1] % _SLICE)).unflatten(
        -1, (-1, _SLICE)
    )
    ends_BK = slices_BKS.sum(-1).double().cumsum(-1)
    total_B = ends_BK[:, -1]
    aim_B1 = (uniform_B * total_B)[:, None]
    slice_B1 = _first_above(ends_BK, aim_B1)
    before_B1 = torch.where(slice_B1 > 0, ends_BK.gather(-1, (slice_B1 - 1).clamp(min=0)), 0.0)
    chosen_BS = slices_BKS.gather(1, slice_B1[:, :, None].expand(-1, -1, _SLICE))[:, 0].double().cumsum(-1)
    token_B = slice_B1[:, 0] * _SLICE + _first_above(chosen_BS, aim_B1 - before_B1)[:, 0]
    logprob_B = logits_BV.gather(-1, token_B[:, None])[:, 0] - top_B1[:, 0] - total_B.log().float()
    return token_B, logprob_B.float()


def _first_above(sums_BN: Tensor, aim_B1: Tensor) -> Tensor:
    """Place (B, 1) of the first cumulative sum above the aim; rounding never leads beyond the last mass."""
    last_B1 = sums_BN[:, -1:]
    return torch.searchsorted(
        sums_BN, torch.minimum(aim_B1, torch.nextafter(last_B1, last_B1 - 1)), right=True
    )


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
