"""The batched decoding loop over a Hugging Face model with its cache.

Shapes: U unique prompts, B rows, T tokens, L cached tokens, V vocabulary. Equal prompts are prefilled once
and their cache repeated; prompts are padded on the left; finished rows leave the batch. Knows no text: a stop
string is a question to `stops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from masflow.models.backbone import Backbone
from masflow.models.cache import make_cache, select_rows
from masflow.models.engine import SamplingParams
from masflow.models.sampling import NotFinite, Sampler

__all__ = ["Job", "Sampled", "decode", "split_batches"]

Stops = Callable[[int, list[int]], bool]
"""(job number, its reply ids so far) → whether a stop string is complete."""


@dataclass(frozen=True)
class Job:
    """One reply to draw."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int


@dataclass
class Sampled:
    """One drawn reply. `finish`: `stop` or `length`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = "length"


def split_batches(jobs: Sequence[Job], max_tokens: int) -> list[list[int]]:
    """Job numbers in batches of at most `max_tokens` with padding: shortest prompts first, ties in order.

    A job that alone exceeds the budget is a batch of its own.
    """
    order = sorted(range(len(jobs)), key=lambda i: (len(jobs[i].prompt_ids), i))
    batches: list[list[int]] = []
    reply = 0
    for i in order:
        reply = max(reply, jobs[i].sampling.max_tokens)
        if batches and (len(batches[-1]) + 1) * (len(jobs[i].prompt_ids) + reply) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
            reply = jobs[i].sampling.max_tokens
    return batches


def decode(
    backbone: Backbone, jobs: Sequence[Job], stop_ids: frozenset[int], stops: Stops | None = None
) -> list[Sampled]:
    """Draw all replies of one batch together.

    Args:
        stop_ids: tokens that end a reply; they stay in its ids.
    Returns:
        One reply a job, in order, with at most its `max_tokens` ids.
    Raises:
        NotFinite: the model's logits are NaN or infinite; `rows` are the numbers of those jobs.
    """
    with torch.no_grad():
        return _Batch(backbone, jobs, stop_ids, stops).run()


class _Batch:
    """The rows that are still being drawn: `active` holds their job numbers."""

    def __init__(
        self, backbone: Backbone, jobs: Sequence[Job], stop_ids: frozenset[int], stops: Stops | None
    ):
        self.backbone, self.jobs, self.stops = backbone, jobs, stops
        self.stop_ids = stop_ids
        self.out = [Sampled() for _ in jobs]
        self.active = list(range(len(jobs)))
        self.sampler = Sampler([j.sampling for j in jobs], [j.seed for j in jobs], backbone.device)

    def run(self) -> list[Sampled]:
        logits_BV = self._prefill()
        place = 0
        while True:
            try:
                token_B, logprob_B = self.sampler.draw(logits_BV, place)
            except NotFinite as error:
                raise NotFinite([self.active[row] for row in error.rows]) from None
            stay = self._take(token_B.tolist(), logprob_B.tolist())
            if not stay:
                return self.out
            if len(stay) < len(self.active):
                token_B = self._select(stay, token_B)
            logits_BV = self._step(token_B)
            place += 1

    def _prefill(self) -> Tensor:
        """Run every unique prompt once; logits (B, V) of the first reply token."""
        unique = list(dict.fromkeys(job.prompt_ids for job in self.jobs))
        number = {ids: u for u, ids in enumerate(unique)}
        device = self.backbone.device
        length = max(map(len, unique))
        ids_UT = torch.tensor([[0] * (length - len(ids)) + list(ids) for ids in unique], device=device)
        start_U = torch.tensor([length - len(ids) for ids in unique], device=device)
        self.is_padded = bool((start_U > 0).any())
        self.cache = make_cache(self.backbone.model.config)
        mask, positions_UT = _prefill_mask(start_U, length) if self.is_padded else (None, None)
        hidden_UD = self.backbone.hidden(ids_UT, mask, positions_UT, self.cache)[:, -1]
        index_B = torch.tensor([number[job.prompt_ids] for job in self.jobs], device=device)
        if len(unique) < len(self.jobs):
            select_rows(self.cache, index_B)
        self.start_B, self.length = start_U[index_B], length
        return self.backbone.logits(hidden_UD)[index_B]

    def _take(self, tokens: list[int], logprobs: list[float]) -> list[int]:
        """Append one token a row; the places in the batch of the rows that go on."""
        stay = []
        for place, (job, token, logprob) in enumerate(zip(self.active, tokens, logprobs, strict=True)):
            reply = self.out[job]
            reply.ids.append(token)
            reply.logprobs.append(logprob)
            if token in self.stop_ids or (self.stops is not None and self.stops(job, reply.ids)):
                reply.finish = "stop"
            elif len(reply.ids) < self.jobs[job].sampling.max_tokens:
                stay.append(place)
        return stay

    def _select(self, stay: list[int], token_B: Tensor) -> Tensor:
        keep_B = torch.tensor(stay, device=token_B.device)
        self.active = [self.active[place] for place in stay]
        select_rows(self.cache, keep_B)
        self.sampler.select(keep_B)
        self.start_B = self.start_B[keep_B]
        return token_B[keep_B]

    def _step(self, token_B: Tensor) -> Tensor:
        """Feed one token a row; logits (B, V) of the next."""
        mask = None
        if self.is_padded:
            mask = (torch.arange(self.length + 1, device=token_B.device) >= self.start_B[:, None])[
                :, None, None, :
            ]
        positions_B1 = (self.length - self.start_B)[:, None]
        hidden_BD = self.backbone.hidden(token_B[:, None], mask, positions_B1, self.cache)[:, -1]
        self.length += 1
        return self.backbone.logits(hidden_BD)


def _prefill_mask(start_U: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Causal mask (U, 1, T, T) bool without the padding on the left; positions (U, T) from the first token.

    Padding looks at itself, so that no row of the mask is empty.
    """
    place_T = torch.arange(length, device=start_U.device)
    causal_TT = place_T[None, :] <= place_T[:, None]
    itself_TT = place_T[None, :] == place_T[:, None]
    mask = (causal_TT & (place_T >= start_U[:, None])[:, None, :]) | itself_TT
    return mask[:, None], (place_T - start_U[:, None]).clamp(min=0)
