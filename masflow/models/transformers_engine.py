"""The embedded rollout engine: requests in, replies out, rows kept by turn id.

Implements `RolloutEngine`. Requests of all policies that share the backbone are one batch, which others may
join at any time. Knows policies only by name; the model group says how one is switched on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.decoding import Drawing, Job, Sampled, decode
from masflow.models.drawn import fits, is_stopped, reply_of, row_of, too_long
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.experience import Experience, Row
from masflow.models.prefixes import PrefixCache
from masflow.models.publishing import PROBE_TOKENS, Probe
from masflow.models.sampling import NotFinite
from masflow.models.speaking import ModuleSpeaker, Opening, Speaker
from masflow.models.tokens import ChatTokens, Prompt
from masflow.models.trainer import Trainer

__all__ = ["TransformersEngine", "not_finite"]


@dataclass(frozen=True)
class _Asked:
    request: Request
    prompt: Prompt
    version: int


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
        adapter_of: Callable[[str], str | None] | None = None,
        speaker: Callable[[], Speaker] | None = None,
        refresh: Callable[[], None] | None = None,
        continued: Callable[[Request], bool] = lambda request: False,
        prefix_cache_bytes: int = 0,
    ):
        """
        Args:
            switch: `switch(policy)` makes a policy speak and returns its version.
            adapter_of: the adapter of a policy, where the speaker's rows may each have their own; None:
                policies speak one after the other.
            speaker: makes what speaks; default: the backbone's modules.
            refresh: lets what the speaker holds of the weights be looked up again.
            continued: whether a later prompt may go on from this request's row.
            prefix_cache_bytes: of keys and values that rows leave behind; 0: none are kept.
        """
        self.num_replies = self.num_batches = self.num_cached = 0
        self.backbone, self.tokens, self.experience = backbone, tokens, experience
        self.context, self.max_batch_tokens, self.switch = context, max_batch_tokens, switch
        self._adapter_of, self._continued, self._refresh = adapter_of, continued, refresh
        self._make_speaker = speaker or (lambda: ModuleSpeaker(backbone))
        self._prefixes = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
        self._speaker: Speaker | None = None
        self._drawing: Drawing | None = None
        self._asked: dict[int, _Asked] = {}
        """By job number: those that speak, or wait in the drawing."""
        self._queued: dict[str, list[_Asked]] = {}
        """By policy: those that wait until it is switched on."""
        self._done: list[Reply] = []

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order. After an error or an interruption nothing is under way."""
        missing = {request.turn_id for request in requests}
        others: list[Reply] = []
        found: dict[str, Reply] = {}
        with ExitStack() as stack:
            stack.callback(self.drop)
            self.admit(requests)
            while missing:
                for reply in self.advance():
                    if reply.turn_id in missing:
                        found[reply.turn_id] = reply
                        missing.discard(reply.turn_id)
                    else:
                        others.append(reply)
            stack.pop_all()
        self._done += others
        return [found[request.turn_id] for request in requests]

    # -- as they come -----------------------------------------------------------------------------

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue requests; `advance` draws their replies, together with those that are being drawn."""
        fresh: list[_Asked] = []
        for request in requests:
            prompt = self.tokens.prompt(request.messages, self.experience.get(request.parent), request.node)
            version = self.switch(request.policy) if self._adapter_of else -1
            asked = _Asked(request, prompt, version)
            if not fits(request, prompt, self.context):
                version = version if self._adapter_of else self.switch(request.policy)
                self._done.append(too_long(request, prompt, self.context, version))
            elif self._adapter_of is not None:
                fresh.append(asked)
            else:
                self._queued.setdefault(request.policy, []).append(asked)
        if fresh:
            self._add(fresh)

    def advance(self, max_steps: int | None = None) -> list[Reply]:
        """Draw until a reply is done, or for so many steps; those that are done. Whatever waits is queued.

        Raises:
            RunError: non-finite logits, with the turns that have them; nothing is under way then.
        """
        steps = 0
        while not self._done and steps != max_steps:
            steps += 1
            if self._drawing is None or self._drawing.is_idle:
                if not self._queued:
                    return []
                policy = next(iter(self._queued))
                version = self.switch(policy)
                waiting = self._queued.pop(policy)
                self._add([_Asked(one.request, one.prompt, version) for one in waiting])
            assert self._drawing is not None
            before = self._drawing.num_batches, self._drawing.num_cached
            try:
                drawn = self._drawing.advance()
            except NotFinite as error:
                asked = [self._asked[number] for number in error.rows]
                self.drop()
                turns = [
                    one.request.turn_id for one in asked if one.request.policy == asked[0].request.policy
                ]
                raise not_finite(asked[0].request.policy, asked[0].version, turns) from error
            self.num_batches += self._drawing.num_batches - before[0]
            self.num_cached += self._drawing.num_cached - before[1]
            self._finish(drawn)
        done, self._done = self._done, []
        return done

    def _add(self, fresh: Sequence[_Asked]) -> None:
        drawing = self._drawing
        if drawing is None:
            drawing = self._drawing = Drawing(
                self.speaker(),
                self.backbone.device,
                self.tokens.stop_ids,
                self.max_batch_tokens,
                self._is_stopped,
                self._prefixes,
            )
        numbers = drawing.add([self._job(one) for one in fresh])
        self._asked.update(zip(numbers, fresh, strict=True))

    def _job(self, asked: _Asked) -> Job:
        request = asked.request
        adapter = self._adapter(request.policy)
        is_kept = self._prefixes is not None and self._continued(request)
        policy = f"{asked.version} {request.policy}"
        return Job(asked.prompt.ids, request.sampling, request.seed, adapter, policy, is_kept)

    def _is_stopped(self, number: int, ids: list[int]) -> bool:
        return is_stopped(ids, self._asked[number].request.sampling.stop, self.tokens)

    def _finish(self, drawn: Sequence[tuple[int, Sampled]]) -> None:
        rows: list[Row] = []
        for number, sampled in drawn:
            one = self._asked.pop(number)
            row = row_of(one.request, one.prompt, sampled.ids, sampled.logprobs, one.version, self.tokens)
            rows.append(row)
            self._done.append(reply_of(row, sampled.finish))
        self.num_replies += len(rows)
        self.experience.add(rows)

    # -- weights ----------------------------------------------------------------------------------

    def speaker(self) -> Speaker:
        """What speaks here, made when it is first needed."""
        if self._speaker is None:
            self._speaker = self._make_speaker()
        return self._speaker

    def drop(self) -> None:
        """Forget what is under way."""
        self._drawing = self._speaker = None
        self._asked.clear()
        self._queued.clear()
        self._done.clear()

    def moved(self) -> None:
        """Weights are others now: nothing that was computed with the old ones is used again."""
        self.forget()
        if self._refresh is not None:
            self._refresh()

    def forget(self) -> None:
        """Keys and values of rows that are done go: a step is over."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def probe_gap(self, policy: str, prompt_ids: Sequence[int], trainer: Trainer) -> float:
        """Mean gap, nats, of this engine's and the trainer's log-probs of greedy tokens of a policy that is
        on, or NaN."""
        num = max(1, min(PROBE_TOKENS, self.context - len(prompt_ids)))
        greedy = SamplingParams(temperature=0.0, max_tokens=num)
        job = Job(tuple(prompt_ids), greedy, 0, self._adapter(policy))
        try:
            drawn = decode(self.backbone, [job], frozenset(), speaker=self._idle_speaker())[0]
        except NotFinite:
            self.drop()
            return math.nan
        reply_ids, logprobs = tuple(drawn.ids), tuple(drawn.logprobs)
        row = Row("probe", "", tuple(prompt_ids), reply_ids, logprobs, 0, "", "")
        return Probe(row.prompt_ids, reply_ids, logprobs).gap(trainer.logprobs([row], [1.0])[0])

    def probe(self, policy: str, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given reply under a policy as it speaks here, nats, at temperature 1."""
        self.switch(policy)
        speaker = self._idle_speaker()
        found = []
        with torch.no_grad():
            logits_1V = speaker.admit([Opening(tuple(prompt_ids), self._adapter(policy))])
            for place, token in enumerate(reply_ids):
                found.append(float(torch.log_softmax(logits_1V, -1)[0, token]))
                if place + 1 < len(reply_ids):
                    logits_1V = speaker.step(torch.tensor([token], device=self.backbone.device))
            speaker.leave([0], [False])
        return found

    def _adapter(self, policy: str) -> str | None:
        return self._adapter_of(policy) if self._adapter_of is not None else None

    def _idle_speaker(self) -> Speaker:
        speaker = self.speaker()
        if speaker.num_rows:
            raise RunError("weights are looked at while rows speak with them", "collect their replies first")
        return speaker


def not_finite(policy: str, version: int, turns: Sequence[str] = ()) -> RunError:
    """What to say of weights whose logits are NaN or infinite."""
    which = f" for turns {', '.join(turns[:8])}{' …' if len(turns) > 8 else ''}" if turns else ""
    return RunError(
        f"policy '{policy}', version {version}: non-finite logits{which}; its weights have blown up",
        "lower the learning rate and start from an earlier checkpoint; if nothing was trained yet, the base"
        " itself is damaged",
    )
