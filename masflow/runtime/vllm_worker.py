"""A worker whose engine is vLLM: what is trained reaches vLLM as payloads, also within one process.

The Hugging Face model stays: it is the trainer's, or, where the process only speaks, the record of what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models.engine import Request
from masflow.models.publishing import Payload
from masflow.models.trainer import TrainItem
from masflow.models.vllm_engine import VllmEngine
from masflow.rl.chains import Link
from masflow.rl.losses import LossSpec
from masflow.runtime.backend import Actor
from masflow.runtime.worker import Answer, Delivery, Part, Worker
from masflow.spec.mapping import Optimizer

__all__ = ["VllmWorker", "worker_of"]


class VllmWorker(Worker):
    """As `Worker`. Where it trains too, vLLM sleeps meanwhile."""

    joins = False
    engine: VllmEngine

    def __init__(self, model: ModelIR, plan: Plan, run_dir: Path, store: Actor, part: Part):
        """
        Raises:
            RunError: as `Worker`; vLLM isn't installed, can't load the base, or would share weights with
                several processes that learn.
        """
        if part.speaks and part.world > 1:
            raise RunError(
                f"model '{model.name}': with vllm, processes that learn together can't speak too",
                "write 'placement: separate', or train with one worker",
            )
        super().__init__(model, plan, run_dir, store, part)
        if not part.speaks:
            return
        dtype = self.base.model.dtype
        if not part.learns and torch.cuda.is_available():
            self.base.model.to("cpu")  # the device is vLLM's
            torch.cuda.empty_cache()
        spec = model.place.rollout.engine or plan.runtime.engine
        self.engine = VllmEngine(
            model,
            self.base.model.name_or_path,
            self.tokens,
            self.experience,
            context=self.base.context,
            dtype=dtype,
            memory_frac=spec.memory_frac,
        )
        for policy in model.policies:
            if policy.init is not None:
                self.engine.receive(self.policies.payload(policy.name))

    # -- speaking ---------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> Answer:
        self.engine.wake()
        return super().generate(requests)

    # -- learning ---------------------------------------------------------------------------------

    def supervise(
        self, policy: str, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        self._sleep()
        return super().supervise(policy, turn_ids, optimizer, step, num_steps)

    def supervise_base(
        self, turn_ids: Sequence[str], optimizer: Optimizer, step: int, num_steps: int
    ) -> dict[str, float]:
        self._sleep()
        return super().supervise_base(turn_ids, optimizer, step, num_steps)

    def update(
        self,
        policy: str,
        items: Sequence[TrainItem],
        loss: LossSpec,
        step: int,
        num_steps: int,
        rescore: bool = False,
    ) -> dict[str, float]:
        self._sleep()
        return super().update(policy, items, loss, step, num_steps, rescore)

    def estimate(self, links: Mapping[str, Sequence[Link]]) -> dict[str, float]:
        self._sleep()
        return super().estimate(links)

    def _sleep(self) -> None:
        if self.part.speaks:
            self.engine.sleep()

    # -- publishing -------------------------------------------------------------------------------

    def prove(self, policy: str) -> Delivery:
        """Hand the policy over to vLLM in this process, and compare its log-probs of a probe.

        Raises:
            RunError: they differ by more than 1e-3 nats (half precision: 0.15), or aren't finite.
        """
        payload = self.payload(policy)
        self.engine.wake()
        self.engine.receive(payload)
        assert payload.probe is not None
        probe = payload.probe
        gap = probe.gap(self.engine.probe(policy, probe.prompt_ids, probe.reply_ids))
        return self._delivery(policy, payload.version, gap)

    def take(self, payload: Payload) -> None:
        """Let a published policy's weights be those that speak here."""
        self.engine.wake()
        super().take(payload)
        self.engine.receive(payload)

    def close(self) -> None:
        """End vLLM."""
        if isinstance(self.engine, VllmEngine):
            self.engine.close()


def worker_of(model: ModelIR, plan: Plan) -> type[Worker]:
    """What a process of a model is, by its engine."""
    engine = model.place.rollout.engine or plan.runtime.engine
    return VllmWorker if engine.use == "vllm" else Worker
