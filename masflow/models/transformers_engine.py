"""The embedded rollout engine: requests in, replies out, rows kept by turn id.

Implements `RolloutEngine`. Knows policies only by name; the model group says how one is switched on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.decoding import Job, decode, split_batches
from masflow.models.drawn import fits, is_stopped, reply_of, row_of, too_long
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.experience import Experience, Row
from masflow.models.sampling import NotFinite
from masflow.models.tokens import ChatTokens, Prompt
from masflow.models.trainer import Trainer

__all__ = ["TransformersEngine"]


class TransformersEngine:
    """Draws replies with a Hugging Face model in this process."""

    repeats = True
    """Equal requests give equal replies under equal weights."""

    def __init__(
        self,
        backbone: Backbone,
        tokens: ChatTokens,
        experience: Experience,
        *,
        context: int,
        max_batch_tokens: int,
        switch: Callable[[str], int],
    ):
        """`switch(policy)` makes a policy speak and returns its version."""
        self.num_replies, self.num_batches = 0, 0
        self.backbone, self.tokens, self.experience = backbone, tokens, experience
        self.context, self.max_batch_tokens, self.switch = context, max_batch_tokens, switch

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; policies speak one after the other, by their first request."""
        prompts = [self.tokens.prompt(r.messages, self.experience.get(r.parent), r.node) for r in requests]
        replies: dict[int, Reply] = {}
        for policy in dict.fromkeys(r.policy for r in requests):
            version = self.switch(policy)
            numbers = [i for i, r in enumerate(requests) if r.policy == policy]
            for i in numbers:
                if not fits(requests[i], prompts[i], self.context):
                    replies[i] = too_long(requests[i], prompts[i], self.context, version)
            self._speak([i for i in numbers if i not in replies], requests, prompts, version, replies)
        return [replies[i] for i in range(len(requests))]

    def _speak(
        self,
        numbers: list[int],
        requests: Sequence[Request],
        prompts: list[Prompt],
        version: int,
        replies: dict[int, Reply],
    ) -> None:
        jobs = [Job(prompts[i].ids, requests[i].sampling, requests[i].seed) for i in numbers]
        rows: list[Row] = []
        for batch in split_batches(jobs, self.max_batch_tokens):
            stops = [jobs[b].sampling.stop for b in batch]
            check = (
                (lambda n, ids, stops=stops: is_stopped(ids, stops[n], self.tokens)) if any(stops) else None
            )
            try:
                drawn = decode(self.backbone, [jobs[b] for b in batch], self.tokens.stop_ids, check)
            except NotFinite as error:
                asked = [requests[numbers[batch[row]]] for row in error.rows]
                raise not_finite(asked[0].policy, version, [r.turn_id for r in asked]) from error
            self.num_replies, self.num_batches = self.num_replies + len(batch), self.num_batches + 1
            for b, sampled in zip(batch, drawn, strict=True):
                i = numbers[b]
                row = row_of(requests[i], prompts[i], sampled.ids, sampled.logprobs, version, self.tokens)
                rows.append(row)
                replies[i] = reply_of(row, sampled.finish)
        self.experience.add(rows)

    def probe_gap(self, prompt_ids: Sequence[int], trainer: Trainer) -> float:
        """Largest gap, nats, of this engine's and the trainer's log-probs of two greedy tokens, or NaN."""
        greedy = SamplingParams(temperature=0.0, max_tokens=2)
        try:
            drawn = decode(self.backbone, [Job(tuple(prompt_ids), greedy, 0)], frozenset())[0]
        except NotFinite:
            return math.nan
        row = Row("probe", "", tuple(prompt_ids), tuple(drawn.ids), tuple(drawn.logprobs), 0, "", "")
        return max(abs(a - b) for a, b in zip(drawn.logprobs, trainer.logprobs([row], [1.0])[0], strict=True))

    def probe(self, policy: str, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given reply under a policy as it speaks here, nats, at temperature 1."""
        self.switch(policy)
        ids_1T = torch.tensor([[*prompt_ids, *reply_ids]], device=self.backbone.device)
        with torch.no_grad():
            hidden_TD = self.backbone.hidden(ids_1T)[0, len(prompt_ids) - 1 : -1]
            logprobs_TV = torch.log_softmax(self.backbone.logits(hidden_TD), -1)
        return [float(row_V[token]) for row_V, token in zip(logprobs_TV, reply_ids, strict=True)]


def not_finite(policy: str, version: int, turns: Sequence[str] = ()) -> RunError:
    """What to say of weights whose logits are NaN or infinite."""
    which = f" for turns {', '.join(turns[:8])}{' …' if len(turns) > 8 else ''}" if turns else ""
    return RunError(
        f"policy '{policy}', version {version}: non-finite logits{which}; its weights have blown up",
        "lower the learning rate and start from an earlier checkpoint; if nothing was trained yet, the base"
        " itself is damaged",
    )
