"""Tiny models of three families, made in memory and seeded, and a group around one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.models.backbone import Backbone
from masflow.models.bases import make_model
from masflow.models.wordpiece import make_wordpiece
from masflow.spec.mapping import ConfigBase, Lora, Optimizer, Wordpiece
from masflow.spec.runtime import Engine, Runtime

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**SMALL, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "llama": {**SMALL, "num_key_value_heads": 2},
    "mistral": {**SMALL, "num_key_value_heads": 1, "sliding_window": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
}
TEXT = "red green blue what is the colour of sky grass sea say: answer one two three"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def words_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("words") / "words.jsonl"
    file.write_text(json.dumps({"text": TEXT}) + "\n")
    return file


@pytest.fixture(scope="session")
def tokenizer(words_file: Path) -> Any:
    return make_wordpiece(Wordpiece(files=("words.jsonl",)), [words_file])


@pytest.fixture(scope="session")
def config_base(words_file: Path) -> Callable[..., ConfigBase]:
    """`config_base(family, **fields)`: a base of that family over the test's words."""

    def make(
        family: str = "qwen3", freeze: tuple[str, ...] = (), std: float | None = 0.1, **config: Any
    ) -> ConfigBase:
        settings = {"model_type": family, "max_position_embeddings": 128, **FAMILIES[family], **config}
        if family == "gpt2":
            settings.pop("max_position_embeddings")
        words = {"wordpiece": {"files": (str(words_file),)}}
        return ConfigBase.model_validate(
            {"config": settings, "tokenizer": words, "freeze": freeze, "init": {"embedding_std": std}}
        )

    return make


@pytest.fixture(scope="session")
def backbone(config_base: Callable[..., ConfigBase], tokenizer: Any) -> Callable[..., Backbone]:
    """`backbone(family, dtype)`: a model of random weights, gradients off."""

    def make(family: str = "qwen3", dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Backbone:
        model = make_model(config_base(family), tokenizer, seed=1)
        model.set_attn_implementation(attention)
        return Backbone(model.to(dtype).requires_grad_(False))

    return make


@pytest.fixture
def group_plan(config_base: Callable[..., ConfigBase]) -> Callable[..., Plan]:
    """`group_plan(train, names, …)`: a plan with one model and one policy a name."""

    def make(
        train: str = "full",
        names: Sequence[str] = ("asker",),
        base: ConfigBase | str | None = None,
        optimizer: Optimizer | None = None,
        init: str | None = None,
        seed: int = 0,
        max_batch_tokens: int = 4096,
    ) -> Plan:
        optimizer = optimizer or Optimizer(lr=1e-2)
        if train == "lora":
            policies = tuple(PolicyIR(f"m/{n}", "m", n, (n,), True, optimizer, init) for n in names)
        else:
            policies = (PolicyIR("m", "m", None, tuple(names), train == "full", optimizer, init),)
        model = ModelIR("m", base or config_base(), "hash", train, policies, Lora(rank=4, alpha=8))  # type: ignore[arg-type]
        runtime = Runtime(engine=Engine(max_batch_tokens=max_batch_tokens))
        plan = Plan("flow", {}, models=(model,), runtime=runtime)
        return Plan(**{**plan.__dict__, "train": plan.train.model_copy(update={"seed": seed})})

    return make
