"""vLLM itself, in this process: draws tokens, takes weights and adapters, sleeps. The only importer of vllm.

Speaks of prompts as ids and of adapters by name; knows no turns. Written against vLLM 0.32.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from masflow.errors import RunError, boundary
from masflow.models.engine import SamplingParams
from masflow.models.publishing import as_tensor
from masflow.spec.mapping import Lora

__all__ = ["Adapter", "Ask", "Drawn", "VllmCore"]

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters, that vLLM has room for."""
NUM_WINDOWS = 64
"""On a CPU, replies of full length that the cache holds."""
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: nothing to serialise, one to end
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Ask:
    """One reply to draw."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    adapter: str | None = None


@dataclass
class Drawn:
    """One drawn reply. `finish`: `stop` or `length`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the distribution sampled from, nats; of a greedy reply, at temperature 1."""
    finish: str = "length"


@dataclass(frozen=True)
class Adapter:
    """An adapter as vLLM knows it: a new number for each version, so that nothing cached is stale."""

    name: str
    number: int
    folder: Path


class VllmCore:
    """One vLLM engine with its adapters."""

    def __init__(
        self,
        folder: str,
        *,
        context: int,
        dtype: torch.dtype,
        memory_frac: float,
        loras: Mapping[str, Lora] = MappingProxyType({}),
    ):
        """Load the model that stands in `folder`.

        Args:
            loras: the shapes of its adapters by name, if it has any.
        Raises:
            RunError: vLLM isn't installed, or can't load the model.
        """
        if find_spec("vllm") is None:
            raise RunError("the engine vllm isn't installed", "pip install 'masflow[vllm]'")
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        self.folder = folder
        self._loras = loras
        self._adapters: dict[str, Adapter] = {}
        self._numbers = itertools.count(1)
        self._place = tempfile.TemporaryDirectory(prefix="masflow-adapters-")
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": context,
            "gpu_memory_utilization": memory_frac,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "enforce_eager": not torch.cuda.is_available(),
            "enable_sleep_mode": torch.cuda.is_available(),
            "worker_extension_cls": "masflow.models.vllm_worker.TakesWeights",
            "generation_config": "vllm",  # the model's own sampling defaults stay out
        }
        if loras:
            most = max(lora.rank for lora in loras.values())
            rank = next((r for r in RANKS if r >= most), None)
            if rank is None:
                raise RunError(f"vLLM holds adapters up to rank {RANKS[-1]}, not {most}", "lower lora.rank")
            options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": len(loras)}
        with _vllm("can't load the model"):
            if not torch.cuda.is_available():
                options["kv_cache_memory_bytes"] = _cache_bytes(folder, context, dtype, memory_frac)
            self._vllm: Any = import_module("vllm")
            self._llm: Any = self._vllm.LLM(folder, **options)
            self._engine = self._llm.llm_engine

    # -- speaking ---------------------------------------------------------------------------------

    def draw(
        self, asks: Sequence[Ask], stop_ids: Sequence[int], stopped: Callable[[int, list[int]], bool]
    ) -> list[Drawn]:
        """All replies, in order; vLLM batches them as they go.

        Args:
            stop_ids: tokens that end a reply; they stay in its ids.
            stopped: (ask's number, its ids so far) → whether a stop string is complete.
        """
        drawn = [Drawn() for _ in asks]
        names = [f"{number}" for number in range(len(asks))]
        with _vllm("can't draw replies"):
            try:
                for name, ask in zip(names, asks, strict=True):
                    self._add(name, ask, stop_ids)
                while self._engine.has_unfinished_requests():
                    self._step(asks, drawn, stopped)
            finally:
                self._engine.abort_request(names)
        return drawn

    def _add(self, name: str, ask: Ask, stop_ids: Sequence[int]) -> None:
        how = ask.sampling
        params = self._vllm.SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            seed=ask.seed % 2**63,
            max_tokens=how.max_tokens,
            stop_token_ids=list(stop_ids),
            logprobs=0,
            detokenize=False,
            output_kind=self._kind("DELTA" if how.stop else "FINAL_ONLY"),
        )
        prompt = {"prompt_token_ids": list(ask.prompt_ids)}
        self._engine.add_request(name, prompt, params, lora_request=self._request_of(ask.adapter))

    def _kind(self, name: str) -> Any:
        return import_module("vllm.sampling_params").RequestOutputKind[name]

    def _step(
        self, asks: Sequence[Ask], drawn: list[Drawn], stopped: Callable[[int, list[int]], bool]
    ) -> None:
        over = []
        for output in self._engine.step():
            number, part = int(output.request_id), output.outputs[0]
            reply = drawn[number]
            for token, place in zip(part.token_ids, part.logprobs, strict=True):
                reply.ids.append(int(token))
                reply.logprobs.append(float(place[token].logprob))
                if asks[number].sampling.stop and stopped(number, reply.ids):
                    reply.finish = "stop"
                    over.append(output.request_id)
                    break
            if part.finish_reason is not None and reply.finish != "stop":
                reply.finish = str(part.finish_reason)
        if over:
            self._engine.abort_request(over)

    def logprobs(
        self, prompt_ids: Sequence[int], reply_ids: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        """Of a given reply at temperature 1, nats; nothing cached is used."""
        ids = [*prompt_ids, *reply_ids]
        params = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        with _vllm("can't score a reply"):
            [output] = self._llm.generate(
                [{"prompt_token_ids": ids}], params, use_tqdm=False, lora_request=self._request_of(adapter)
            )
        places = output.prompt_logprobs[len(prompt_ids) :]
        return [float(place[token].logprob) for token, place in zip(reply_ids, places, strict=True)]

    # -- weights ----------------------------------------------------------------------------------

    def take_weights(self, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
        """Replace weights of the model in place; what is cached of the old ones goes."""
        with _vllm("can't take new weights"):
            self._llm.collective_rpc("take_weights", args=(dict(arrays), dict(dtypes), self.folder))
            self._forget()
            for adapter in self._adapters.values():  # a reload of the base drops them
                self._engine.add_lora(self._lora_request(adapter))

    def take_adapter(
        self, name: str, version: int, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str]
    ) -> None:
        """Replace an adapter, or add it."""
        number = next(self._numbers)
        folder = Path(self._place.name) / f"{number}"
        folder.mkdir()
        tensors = {f"base_model.model.{n}": as_tensor(a, dtypes[n]).contiguous() for n, a in arrays.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = sorted({n.rpartition(".lora_")[0].rpartition(".")[2] for n in arrays})
        config = {"peft_type": "LORA", "r": self._loras[name].rank, "lora_alpha": self._loras[name].alpha}
        (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
        new, old = Adapter(f"{name}@{version}", number, folder), self._adapters.get(name)
        with _vllm(f"can't take the adapter '{name}'"):
            if old is not None:
                self._engine.remove_lora(old.number)
            self._engine.add_lora(self._lora_request(new))
        self._adapters[name] = new

    def _request_of(self, adapter: str | None) -> Any:
        found = self._adapters.get(adapter) if adapter is not None else None
        return None if found is None else self._lora_request(found)

    def _lora_request(self, adapter: Adapter) -> Any:
        request = import_module("vllm.lora.request").LoRARequest
        return request(adapter.name, adapter.number, str(adapter.folder))

    def _forget(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RunError(
                "vLLM keeps cached prefixes of the old weights", "this is masflow's mistake: report it"
            )

    # -- life -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the device's memory back: weights go to main memory, caches go. On a CPU there is none to
        give."""
        with _vllm("can't sleep"):
            self._forget()
            if torch.cuda.is_available():
                self._llm.sleep(level=1)

    def wake(self) -> None:
        """The reverse of `sleep`."""
        with _vllm("can't wake up"):
            if torch.cuda.is_available():
                self._llm.wake_up()

    def close(self) -> None:
        """End the engine and its processes."""
        with _vllm("can't end"):
            self._engine.engine_core.shutdown()
        self._place.cleanup()


def _cache_bytes(folder: str, context: int, dtype: torch.dtype, memory_frac: float) -> int:
    """Of keys and values on a CPU: windows of `NUM_WINDOWS` replies, at most that share of free memory.

    vLLM itself would take the share of the whole machine, less what this process holds for whatever reason.
    """
    config: Any = AutoConfig.from_pretrained(folder)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    token_bytes = 2 * config.num_hidden_layers * kept * size * dtype.itemsize
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(NUM_WINDOWS * context * token_bytes, int(memory_frac * free_bytes))


@contextmanager
def _vllm(what: str) -> Iterator[None]:
    """Raises RunError for whatever vLLM raises."""
    with boundary("vllm") as caught:
        yield
    if caught.error:
        raise RunError(f"vLLM {what}: {caught.error}", "see vLLM's own log: VLLM_LOGGING_LEVEL=INFO")
