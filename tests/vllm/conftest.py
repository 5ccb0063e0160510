"""Tiny models on disk for vLLM, an engine around one, and the Hugging Face model that it is compared with.

vLLM has an environment of its own (`make test-vllm`); elsewhere these tests are skipped.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.models.bases import Base, make_model
from masflow.models.engine import Request, SamplingParams
from masflow.models.experience import Experience
from masflow.models.policies import Policies
from masflow.models.publishing import Probe
from masflow.models.tokens import ChatTokens
from masflow.models.vllm_engine import VllmEngine
from masflow.models.wordpiece import make_wordpiece
from masflow.spec.mapping import ConfigBase, Lora, Optimizer, Wordpiece
from masflow.trace import Message

WORDS = "red green blue what is the colour of sky grass sea say : answer one two three four five six stop END"
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**SMALL, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    "llama": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
CONTEXT = 640
"""More than four of vLLM's blocks on a CPU (128 tokens), so that prefixes are cached."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vllm isn't installed here: make test-vllm has an environment with it")
    for item in items:
        if Path(__file__).parent in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.vllm)
            if find_spec("vllm") is None:
                item.add_marker(missing)


@dataclass
class Side:
    """An engine, and beside it the weights that it should speak with."""

    engine: VllmEngine
    policies: Policies
    tokens: ChatTokens

    @property
    def model(self) -> Any:
        return self.policies.base.model

    def expected(
        self, policy: str, prompt_ids: Sequence[int], reply_ids: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Log-probs of Hugging Face's model, float32, at that temperature."""
        self.policies.switch(policy)
        ids_1T = torch.tensor([[*prompt_ids, *reply_ids]])
        with torch.no_grad():
            logits_TV = self.model(ids_1T).logits[0, len(prompt_ids) - 1 : -1] / temperature
        logprobs_TV = torch.log_softmax(logits_TV, -1)
        return [float(row[token]) for row, token in zip(logprobs_TV, reply_ids, strict=True)]

    def move(self, policy: str, seed: int, by: float = 0.05) -> None:
        """As an optimizer step would: other weights, the next version."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policies.learners[policy].parameters.values():
                parameter.add_(by * torch.randn(parameter.shape, generator=generator))
        self.policies.versions[policy] += 1

    def probe(self, policy: str) -> Probe:
        prompt, reply = tuple(range(5, 25)), (7, 9)
        return Probe(prompt, reply, tuple(self.expected(policy, prompt, reply)))

    def publish(self, policy: str, whole: bool = False) -> None:
        self.engine.receive(self.policies.payload(policy, self.probe(policy), whole=whole))

    def gap(self, policy: str) -> float:
        """What the proof of delivery measures."""
        probe = self.probe(policy)
        return probe.gap(self.engine.probe(policy, probe.prompt_ids, probe.reply_ids))


Make = Callable[..., Side]


@pytest.fixture(scope="session")
def words_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("words") / "words.jsonl"
    file.write_text(json.dumps({"text": WORDS}) + "\n")
    return file


@pytest.fixture(scope="session")
def base_of(words_file: Path) -> Callable[..., ConfigBase]:
    """`base_of(family, freeze=…)`: a config over the test's words."""

    def make(family: str = "qwen3", freeze: Sequence[str] = ()) -> ConfigBase:
        return ConfigBase.model_validate(
            {
                "config": {"model_type": family, "max_position_embeddings": CONTEXT, **FAMILIES[family]},
                "tokenizer": {"wordpiece": {"files": (str(words_file),)}},
                "init": {"embedding_std": 0.1},
                "freeze": tuple(freeze),
            }
        )

    return make


@pytest.fixture(scope="module")
def side(
    base_of: Callable[..., ConfigBase], words_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Make]:
    """`side(family, train, names, freeze)`: an engine and its comparison; the next one ends it."""
    running: list[VllmEngine] = []

    def make(
        family: str = "qwen3",
        train: str = "full",
        names: Sequence[str] = ("asker",),
        freeze: Sequence[str] = (),
    ) -> Side:
        while running:
            running.pop().close()
        torch.manual_seed(0)
        tokenizer: Any = make_wordpiece(Wordpiece(files=("words.jsonl",)), [words_file])
        base = base_of(family, freeze)
        folder = tmp_path_factory.mktemp(family)
        model = make_model(base, tokenizer, seed=1).float().eval().requires_grad_(False)
        model.save_pretrained(folder)
        if train == "lora":
            policies = tuple(PolicyIR(f"m/{n}", "m", n, (n,), True, Optimizer()) for n in names)
        else:
            policies = (PolicyIR("m", "m", None, tuple(names), train == "full", Optimizer()),)
        plan = ModelIR("m", base, "", train, policies, Lora(rank=4, alpha=8))  # type: ignore[arg-type]
        stop_ids = (int(tokenizer.eos_token_id),)
        tokens = ChatTokens(tokenizer, stop_ids)
        loaded = Base(copy.deepcopy(model), tokenizer, True, CONTEXT, stop_ids)
        engine = VllmEngine(
            plan,
            str(folder),
            tokens,
            Experience(),
            context=CONTEXT,
            dtype=torch.float32,
            memory_frac=0.1,
        )
        running.append(engine)
        return Side(engine, Policies(plan, loaded, seed=3), tokens)

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    yield make
    while running:
        running.pop().close()


@pytest.fixture(scope="session")
def ask() -> Callable[..., Request]:
    """`ask(number, text, policy=…, **sampling)`: one request."""

    def make(
        number: int, text: str = "what is the colour of sky", policy: str = "m", **sampling: Any
    ) -> Request:
        how = SamplingParams(**{"temperature": 1.0, "max_tokens": 16, **sampling})
        return Request(f"t{number}", policy, (Message("user", text),), how, seed=2**62 + 7 * number)

    return make
