"""Draws replies together: rows join by token budget, and a row that is done leaves at once.

Shapes: B rows, V vocabulary. Equal prompts are prefilled once, and so is a long beginning that prompts share.
Knows no text: a stop string is a question to `stops`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from masflow.models.backbone import Backbone
from masflow.models.engine import SamplingParams
from masflow.models.openings import Finder, open_rows
from masflow.models.sampling import NotFinite, Sampler
from masflow.models.speaking import ModuleSpeaker, Prefix, Speaker

__all__ = ["Drawing", "Job", "Memory", "Sampled", "decode"]

Stops = Callable[[int, list[int]], bool]
"""(job number, its reply ids so far) → whether a stop string is complete."""
_PATIENCE = 8
"""Steps that a job waits for company, while others speak."""


@dataclass(frozen=True)
class Job:
    """One reply to draw."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    adapter: str | None = None
    """PEFT's name of the adapter that speaks; None: the model as it is."""
    policy: str = ""
    """Whose cached prefixes fit."""
    is_kept: bool = False
    """Its row may be continued: keys and values go to the cache."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass
class Sampled:
    """One drawn reply. `finish`: `stop` or `length`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = "length"


class Memory(Finder, Protocol):
    """A prefix cache: `prefixes.PrefixCache`."""

    def keep(self, policy: str, ids: tuple[int, ...], prefix: Prefix) -> None:
        """`prefix` is of `ids`, all of them."""
        ...


def decode(
    backbone: Backbone,
    jobs: Sequence[Job],
    stop_ids: frozenset[int],
    stops: Stops | None = None,
    max_tokens: int | None = None,
    speaker: Speaker | None = None,
) -> list[Sampled]:
    """Draw all replies.

    Args:
        stop_ids: tokens that end a reply; they stay in its ids.
        max_tokens: of prompts and replies together, at any time; None: no bound.
        speaker: without any row; None: the modules, with whichever adapter is on.
    Returns:
        One reply a job, in order, with at most its `max_tokens` ids.
    Raises:
        NotFinite: the model's logits are NaN or infinite; `rows` are the numbers of those jobs.
    """
    drawing = Drawing(speaker or ModuleSpeaker(backbone), backbone.device, stop_ids, max_tokens, stops)
    drawing.add(jobs)
    done: dict[int, Sampled] = {}
    while not drawing.is_idle:
        done.update(drawing.advance())
    return [done[number] for number in range(len(jobs))]


class Drawing:
    """Jobs that wait and rows that speak on one backbone; jobs may be added at any time.

    A row draws the same whatever its company. Jobs are numbered in the order in which they are added.
    """

    def __init__(
        self,
        speaker: Speaker,
        device: torch.device,
        stop_ids: frozenset[int],
        max_tokens: int | None = None,
        stops: Stops | None = None,
        memory: Memory | None = None,
    ):
        self.num_batches = self.num_cached = 0
        """Admissions so far; prompt tokens whose keys and values were at hand."""
        self._speaker, self._stops, self._memory = speaker, stops, memory
        self._budget, self._device = max_tokens, device
        self._is_stop = np.zeros(max(stop_ids, default=0) + 2, dtype=bool)
        self._is_stop[list(stop_ids)] = True
        self._sampler = Sampler(device)
        self._waiting: deque[tuple[int, Job]] = deque()
        self._waited = self._added = 0
        self._fits: int | None = None
        """How many may join; None: that has to be found out."""
        self._jobs: list[Job] = []
        """By row, as what follows."""
        self._number_B = self._count_B = self._limit_B = np.empty(0, dtype=np.int64)
        self._ids_BT = np.empty((0, 0), dtype=np.int64)
        self._logprobs_BT = np.empty((0, 0))
        self._token_B = torch.empty(0, dtype=torch.int64, device=device)

    @property
    def is_idle(self) -> bool:
        """Nobody waits and nobody speaks."""
        return not self._waiting and not self._jobs

    def add(self, jobs: Sequence[Job]) -> list[int]:
        """Queue jobs, shortest prompts first; their numbers."""
        numbers = list(range(self._added, self._added + len(jobs)))
        self._added += len(jobs)
        self._fits = None
        together = zip(numbers, jobs, strict=True)
        self._waiting.extend(sorted(together, key=lambda pair: (len(pair[1].prompt_ids), pair[0])))
        return numbers

    @torch.no_grad()
    def advance(self) -> list[tuple[int, Sampled]]:
        """One token of every row, after those have joined that may; (number, reply) of rows that are done.

        Raises:
            NotFinite: `rows` are the numbers of the jobs that nothing can be drawn for.
        """
        logits = []
        if self._jobs:
            logits.append(self._speaker.step(self._token_B))
        if self._waiting and (joining := self._next_jobs()):
            logits.append(self._join(joining))
        return self._take(logits[0] if len(logits) == 1 else torch.cat(logits)) if logits else []

    # -- joining ----------------------------------------------------------------------------------

    def _next_jobs(self) -> list[tuple[int, Job]]:
        """The jobs that join now: as many as fit, once that is worth the trouble."""
        self._waited += 1
        if self._fits is None:
            self._fits = self._fitting()
        count, rows = self._fits, len(self._jobs)
        if count < len(self._waiting) and 4 * count < rows and self._waited < _PATIENCE:
            return []
        self._waited, self._fits = 0, None
        return [self._waiting.popleft() for _ in range(count)]

    def _fitting(self) -> int:
        """How many of those that wait the budget lets in; a job that alone exceeds it comes alone."""
        if self._budget is None:
            return len(self._waiting)
        rows, longest = len(self._jobs), max((j.num_tokens for j in self._jobs), default=0)
        shares = self._speaker.shares_prompts
        prompts = {(j.adapter, j.prompt_ids) for j in self._jobs} if shares else set()
        held = sum(len(ids) for _, ids in prompts) + sum(j.sampling.max_tokens for j in self._jobs)
        for count, (_, job) in enumerate(self._waiting):
            prompt = (job.adapter, job.prompt_ids)
            held += job.sampling.max_tokens + (len(job.prompt_ids) if prompt not in prompts else 0)
            prompts.add(prompt)
            rows, longest = rows + 1, max(longest, job.num_tokens)
            if (held if shares else rows * longest) > self._budget and rows > 1:
                return count
        return len(self._waiting)

    def _join(self, joining: Sequence[tuple[int, Job]]) -> Tensor:
        """Prefill; (n, V) logits of the new rows' first tokens."""
        rows, logits_nV, cached = open_rows(self._speaker, [job for _, job in joining], self._memory)
        self.num_batches, self.num_cached = self.num_batches + 1, self.num_cached + cached
        jobs = [joining[row][1] for row in rows]
        limits = [job.sampling.max_tokens for job in jobs]
        self._jobs += jobs
        self._number_B = np.append(self._number_B, [joining[row][0] for row in rows])
        self._limit_B = np.append(self._limit_B, limits)
        self._count_B = np.append(self._count_B, np.zeros(len(jobs), dtype=np.int64))
        width = max(self._ids_BT.shape[1], *limits)
        shape = (len(self._jobs), width)
        self._ids_BT, self._logprobs_BT = _enlarged(self._ids_BT, shape), _enlarged(self._logprobs_BT, shape)
        self._sampler.join([job.sampling for job in jobs], [job.seed for job in jobs])
        self._settle()
        return logits_nV

    def _settle(self) -> None:
        self._rows = np.arange(len(self._jobs))
        with_stops = [row for row, job in enumerate(self._jobs) if job.sampling.stop]
        self._with_stops = [] if self._stops is None else with_stops

    # -- drawing ----------------------------------------------------------------------------------

    def _take(self, logits_BV: Tensor) -> list[tuple[int, Sampled]]:
        """Draw one token a row and let go of the rows that are done."""
        self._token_B, logprob_B = self._sampler.draw(logits_BV)
        tokens, logprobs = self._token_B.cpu().numpy(), logprob_B.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise NotFinite(self._number_B[~np.isfinite(logprobs)].tolist())
        self._ids_BT[self._rows, self._count_B] = tokens
        self._logprobs_BT[self._rows, self._count_B] = logprobs
        self._count_B += 1
        stopped_B = self._stopped(tokens)
        done_B = stopped_B | (self._count_B >= self._limit_B)
        return self._leave(done_B, stopped_B) if done_B.any() else []

    def _stopped(self, tokens: np.ndarray) -> np.ndarray:
        """(B,) bool: rows that a token ended, or a stop string."""
        stopped_B = self._is_stop[np.minimum(tokens, len(self._is_stop) - 1)]
        for row in self._with_stops:
            assert self._stops is not None
            ids = self._ids_BT[row, : self._count_B[row]].tolist()
            stopped_B[row] = stopped_B[row] or self._stops(int(self._number_B[row]), ids)
        return stopped_B

    def _leave(self, done_B: np.ndarray, stopped_B: np.ndarray) -> list[tuple[int, Sampled]]:
        rows = done_B.nonzero()[0].tolist()
        self._fits = None
        wanted = [self._memory is not None and self._jobs[row].is_kept for row in rows]
        prefixes = self._speaker.leave(rows, wanted)
        found = []
        for row, prefix in zip(rows, prefixes, strict=True):
            job, count = self._jobs[row], self._count_B[row]
            ids = self._ids_BT[row, :count].tolist()
            if prefix is not None and self._memory is not None:
                self._memory.keep(job.policy, (*job.prompt_ids, *ids[:-1]), prefix)
            logprobs = self._logprobs_BT[row, :count].tolist()
            finish = "stop" if stopped_B[row] else "length"
            found.append((int(self._number_B[row]), Sampled(ids, logprobs, finish)))
        self._select((~done_B).nonzero()[0])
        return found

    def _select(self, stay: np.ndarray) -> None:
        self._jobs = [self._jobs[row] for row in stay]
        self._number_B, self._count_B = self._number_B[stay], self._count_B[stay]
        self._limit_B = self._limit_B[stay]
        self._ids_BT, self._logprobs_BT = self._ids_BT[stay], self._logprobs_BT[stay]
        self._sampler.select(stay)
        self._token_B = self._token_B[torch.from_numpy(stay).to(self._device)]
        self._settle()


def _enlarged(table: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    bigger = np.empty(shape, dtype=table.dtype)
    bigger[: table.shape[0], : table.shape[1]] = table
    return bigger
