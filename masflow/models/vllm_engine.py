"""The rollout engine on vLLM: requests in, replies out, rows kept by turn id; policies come as payloads.

Implements `RolloutEngine` by the rules of the embedded one: own tokens in and out, log-probs of the
distribution sampled from, stop strings and windows alike. vLLM itself is behind `vllm_core`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from masflow.compiler.plan import ModelIR
from masflow.errors import RunError
from masflow.models.drawn import fits, is_stopped, reply_of, row_of, too_long
from masflow.models.engine import Reply, Request
from masflow.models.experience import Experience
from masflow.models.publishing import Payload
from masflow.models.tokens import ChatTokens, Prompt
from masflow.models.transformers_engine import not_finite
from masflow.models.vllm_core import Ask, VllmCore

__all__ = ["VllmEngine"]


class VllmEngine:
    """Draws replies with vLLM in this process. Until a policy is received, the base speaks for it."""

    repeats = False
    """Sums depend on what is decoded together."""

    def __init__(
        self,
        model: ModelIR,
        folder: str,
        tokens: ChatTokens,
        experience: Experience,
        *,
        context: int,
        dtype: torch.dtype,
        memory_frac: float,
    ):
        """
        Args:
            folder: of the base, or its id.
            memory_frac: share of the device's memory that vLLM may take, its weights included.
        Raises:
            RunError: vLLM isn't installed, or can't load the base.
        """
        self.model, self.tokens, self.experience, self.context = model, tokens, experience, context
        self.versions = {policy.name: 0 for policy in model.policies}
        """Of each policy, as it speaks here."""
        self.num_replies = self.num_batches = self.num_cached = 0
        self._asleep = False
        self._under: dict[str, np.ndarray] = {}
        """Weights beside the policy's own that aren't the base's."""
        self._dtypes: dict[str, str] = {}
        self._adapters: set[str] = set()
        has_adapters = model.train == "lora"
        self.core = VllmCore(
            folder,
            context=context,
            dtype=dtype,
            memory_frac=memory_frac,
            loras={p.name: model.lora_of(p) for p in model.policies} if has_adapters else {},
        )

    # -- speaking ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order; policies speak together.

        Raises:
            RunError: the engine sleeps, a policy is unknown, or its logits aren't finite.
        """
        if self._asleep:
            raise RunError(f"the engine of '{self.model.name}' sleeps", "wake it before it speaks")
        prompts = [self.tokens.prompt(r.messages, self.experience.get(r.parent), r.node) for r in requests]
        fitting = [i for i, r in enumerate(requests) if fits(r, prompts[i], self.context)]
        replies = {
            i: too_long(requests[i], prompts[i], self.context, self._version(requests[i].policy))
            for i in range(len(requests))
            if i not in set(fitting)
        }
        self._speak(fitting, requests, prompts, replies)
        return [replies[i] for i in range(len(requests))]

    def _speak(
        self,
        numbers: Sequence[int],
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        replies: dict[int, Reply],
    ) -> None:
        asks = [
            Ask(prompts[i].ids, requests[i].sampling, requests[i].seed, self._adapter(requests[i].policy))
            for i in numbers
        ]
        if not asks:
            return

        def stopped(number: int, ids: list[int]) -> bool:
            return is_stopped(ids, asks[number].sampling.stop, self.tokens)

        drawn = self.core.draw(asks, sorted(self.tokens.stop_ids), stopped)
        self.num_replies, self.num_batches = self.num_replies + len(asks), self.num_batches + 1
        rows = []
        for i, one in zip(numbers, drawn, strict=True):
            version = self._version(requests[i].policy)
            if not all(map(math.isfinite, one.logprobs)):
                raise not_finite(requests[i].policy, version, [requests[i].turn_id])
            row = row_of(requests[i], prompts[i], one.ids, one.logprobs, version, self.tokens)
            rows.append(row)
            replies[i] = reply_of(row, one.finish)
        self.experience.add(rows)

    def probe(self, policy: str, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> list[float]:
        """Log-probs of a given reply under a policy as it speaks here, nats, at temperature 1."""
        self._version(policy)
        return self.core.logprobs(prompt_ids, reply_ids, self._adapter(policy))

    def _version(self, policy: str) -> int:
        if policy not in self.versions:
            known = ", ".join(self.versions)
            raise RunError(f"model '{self.model.name}' has no policy '{policy}'; it has: {known}")
        return self.versions[policy]

    def _adapter(self, policy: str) -> str | None:
        return policy if policy in self._adapters else None

    # -- weights ----------------------------------------------------------------------------------

    def receive(self, payload: Payload) -> None:
        """Let a published policy speak from now on; nothing that was computed with older weights is used.

        Raises:
            RunError: a tensor isn't what was sent, or vLLM can't take it.
        """
        self._version(payload.policy)
        payload.verify()
        self._under |= payload.base
        self._dtypes |= payload.dtypes
        if self.model.train == "lora":
            if payload.base:
                self.core.take_weights(self._under, self._dtypes)
            self.core.take_adapter(payload.policy, payload.version, payload.tensors, payload.dtypes)
            self._adapters.add(payload.policy)
        else:
            self.core.take_weights({**self._under, **payload.tensors}, self._dtypes)
        self.versions[payload.policy] = payload.version

    # -- life -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the device's memory back until `wake`; on a CPU only what is cached goes."""
        if not self._asleep:
            self.core.sleep()
            self._asleep = True

    def wake(self) -> None:
        """Be ready to speak again."""
        if self._asleep:
            self.core.wake()
            self._asleep = False

    def close(self) -> None:
        """End vLLM."""
        self.core.close()
