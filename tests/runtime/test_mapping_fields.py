"""Every field that a mapping or a runtime has for a model, a policy or a server, followed to where it acts.

Two sides of a team differ in one field; what each side does, or holds where it does it, is compared.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler import compile_experiment
from masflow.models.bare import BareSpeaker
from masflow.runtime import vllm_worker
from masflow.runtime.controller import train
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.vllm_worker import worker_of
from masflow.spec.base import Spec
from masflow.spec.mapping import Model
from masflow.spec.runtime import Place
from tests.runtime.mapping_sides import (
    Side,
    answered,
    at_once,
    bearer,
    body,
    clipped_norm,
    embeddings_move,
    engine,
    four_bits,
    group_of,
    kinds,
    members,
    moves,
    passes,
    path,
    prompt,
    rank,
    rates,
    scaling,
    starts_from,
    strategy,
    targets,
    tokens_of,
    waits,
    worlds,
)

TOOLS = (
    ("roles:\n", "tools: {calc: {use: calculator}}\nroles:\n"),
    ("caller: {prompt", "caller: {tools: [calc], max_calls: 2, prompt"),
    ("echoer: {prompt", "echoer: {tools: [calc], max_calls: 2, prompt"),
)
SHARED = "mapping: {models: {policy: {roles: rest}}}"
WARM = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}"
CONFIG = (
    "model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64,"
    " tie_word_embeddings: true"
)
WORDS = "{wordpiece: {files: [words.jsonl]}}"
TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "[{{ enable_thinking }} {{ colour }}]"
)


# -- the table ------------------------------------------------------------------------------------

MODELS = "{told: {roles: [caller], %s}, usual: {roles: [echoer]}}"
LORA = "{told: {roles: [caller], train: lora, %s}, usual: {roles: [echoer], train: lora}}"
ADAPTER = "{m: {roles: rest, train: lora, adapters: {told: {roles: [caller], %s}, usual: [echoer]}}}"
SPOKEN = (
    "{told: {roles: [caller], chat: {template: chat.jinja, %s}},"
    " usual: {roles: [echoer], chat: {template: chat.jinja}}}"
)
SERVED = (
    "{told: {roles: [caller], model: big, endpoint: {url: 'URL', %s}},"
    " usual: {roles: [echoer], model: big, endpoint: 'URL'}}"
)


@dataclass(frozen=True)
class Case:
    """What stands in the mapping, what is looked at, and what is seen at both sides."""

    mapping: str
    see: Callable[[Side], Any]
    told: Any
    usual: Any
    runtime: str = ""
    sides: tuple[str, str] = ("told", "usual")


def _own(says: str, see: Callable[[Side], Any], told: Any, usual: Any, template: str = MODELS) -> Case:
    sides = {LORA: ("told/default", "usual/default"), ADAPTER: ("m/told", "m/usual")}
    return Case(template % says, see, told, usual, sides=sides.get(template, ("told", "usual")))


def _base(says: str, see: Callable[[Side], Any], told: Any, usual: Any) -> Case:
    return _own(f"base: {{{says}}}", see, told, usual)


def _place(says: str, see: Callable[[Side], Any], told: Any, usual: Any, more: str = "") -> Case:
    runtime = f"runtime: {{backend: ray, threads: 1, {more}models: {{told: {{{says}}}}}}}\n"
    return Case(MODELS.replace(", %s", ""), see, told, usual, runtime)


def _optimizer(template: str) -> dict[str, Case]:
    """AdamW's settings, those of the experiment at the other side; lr 0.01 there."""
    constant = [0.01] * 4
    cases = {
        "lr": ("lr: 0.004", rates, [0.004] * 4, constant),
        "betas": ("betas: [0.5, 0.75]", group_of("betas"), (0.5, 0.75), (0.9, 0.99)),
        "weight_decay": ("weight_decay: 0.25", group_of("weight_decay"), 0.25, 0.0),
        "eps": ("eps: 1.0e-4", group_of("eps"), 1e-4, 1e-8),
        "warmup_steps": ("lr: 0.004, warmup_steps: 2", rates, [0.002, 0.004, 0.004, 0.004], constant),
        "schedule": ("lr: 0.003, schedule: linear", rates, [0.003, 0.002, 0.001, 0.0], constant),
        "final_lr_frac": (
            "lr: 0.006, schedule: linear, final_lr_frac: 0.5",
            rates,
            [0.006, 0.005, 0.004, 0.003],
            constant,
        ),
        "max_grad_norm": ("max_grad_norm: 0.001", clipped_norm, 0.001, 1.0),
    }
    return {
        f"optimizer.{k}": _own(f"optimizer: {{{says}}}", see, told, usual, template)
        for k, (says, see, told, usual) in cases.items()
    }


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def _lora(template: str) -> dict[str, Case]:
    return {
        "lora.rank": _own("lora: {rank: 3}", rank, 3, 16, template),
        "lora.alpha": _own("lora: {alpha: 4}", scaling, 4 / 16, 32 / 16, template),
        "lora.targets": _own("lora: {targets: [q_proj]}", targets, {"q_proj"}, LINEAR, template),
    }


ROLES = ["caller"], ["echoer"]
CASES: dict[str, Case] = {
    "roles": Case(MODELS.replace(", %s", ""), members, *ROLES),
    "per": Case("{m: {roles: rest, per: role}}", members, *ROLES, sides=("m.caller", "m.echoer")),
    "train": _own("train: frozen", moves, "frozen", "full"),
    **_lora(LORA),
    "adapters": Case(
        "{m: {roles: rest, train: lora, adapters: per_role}}", members, *ROLES, sides=("m/caller", "m/echoer")
    ),
    "adapters.roles": Case(ADAPTER.replace(", %s", ""), members, *ROLES, sides=("m/told", "m/usual")),
    "adapters.per": Case(
        "{m: {roles: rest, train: lora, adapters: {own: {roles: rest, per: role}}}}",
        members,
        *ROLES,
        sides=("m/own.caller", "m/own.echoer"),
    ),
    **{f"adapters.{name}": case for name, case in (_optimizer(ADAPTER) | _lora(ADAPTER)).items()},
    "adapters.init": _own("init: ADAPTED", starts_from("adapted", "m/m.told"), True, False, ADAPTER),
    **_optimizer(MODELS),
    "init": _own("init: EARLIER", starts_from("earlier", "policy/policy"), True, False),
    "context": _own(
        "context: 8",
        lambda side: side.ask(text="say " * 12)[0].finish == "prompt_too_long",
        True,
        False,
    ),
    "dtype": _own(
        "dtype: bfloat16", lambda side: side.worker.base.model.dtype, torch.bfloat16, torch.float32
    ),
    "quantize": _own("base: FOLDER, train: frozen, quantize: 4bit", four_bits, True, False),
    "gradient_checkpointing": _own("gradient_checkpointing: true", passes, 2, 1),
    "base": _own("base: FOLDER", lambda side: side.worker.base.model.config.model_type, "llama", "qwen3"),
    "base.config": _base(
        f"config: {{{CONFIG.replace('hidden_size: 16', 'hidden_size: 24')}}}, tokenizer: {WORDS}",
        lambda side: side.worker.base.model.config.hidden_size,
        24,
        16,
    ),
    "base.init.embedding_std": _base(
        f"config: {{{CONFIG}}}, tokenizer: {WORDS}, init: {{embedding_std: 3}}",
        lambda side: round(float(side.worker.base.model.get_input_embeddings().weight.std())),
        3,
        0,
    ),
    "base.freeze": _base(
        f"config: {{{CONFIG}}}, tokenizer: {WORDS}, freeze: [embeddings]", embeddings_move, False, True
    ),
    "base.tokenizer": _base(f"config: {{{CONFIG}}}, tokenizer: FOLDER", tokens_of("zebra"), 1, 5),
    "base.tokenizer.wordpiece.files": _base(
        f"config: {{{CONFIG}}}, tokenizer: {{wordpiece: {{files: [words.jsonl, other.jsonl]}}}}",
        tokens_of("zebra"),
        1,
        5,
    ),
    "base.tokenizer.wordpiece.whole_words": _base(
        f"config: {{{CONFIG}}}, tokenizer: {{wordpiece: {{files: [words.jsonl], whole_words: false}}}}",
        tokens_of("brown"),
        5,
        1,
    ),
    "base.tokenizer.wordpiece.size": _base(
        f"config: {{{CONFIG}}}, tokenizer: {{wordpiece: {{files: [words.jsonl], size: 143}}}}",
        lambda side: len(side.worker.base.tokenizer),
        143,
        151,
    ),
    "chat.template": _own("chat: {template: chat.jinja}", prompt, "<user>say red[ ]", "[BOS]say red\n"),
    "chat.thinking": _own("thinking: true", prompt, "<user>say red[True ]", "<user>say red[ ]", SPOKEN),
    "chat.options": _own(
        "options: {colour: blue}", prompt, "<user>say red[ blue]", "<user>say red[ ]", SPOKEN
    ),
    "chat.tools": _own(
        "tools: template", lambda side: side.worker.tokens.chat.dialect.name, "hermes", "text", SPOKEN
    ),
    "model": Case(SERVED.replace(", %s", "").replace("big", "told", 1), body("model"), "told", "big"),
    "endpoint.url": Case(
        SERVED.replace(", %s", "").replace("URL", "URL/a", 1),
        path,
        "/v1/a/chat/completions",
        "/v1/chat/completions",
    ),
    "endpoint.key_env": _own("key_env: TOLD_KEY", bearer, "Bearer told", None, SERVED),
    "endpoint.max_concurrent": _own("max_concurrent: 1", at_once, 1, 2, SERVED),
    "endpoint.per_minute": _own("per_minute: 1", waits, [False, True], [False, False], SERVED),
    "endpoint.retries": _own("retries: 0", answered(status=503), False, True, SERVED),
    "endpoint.timeout_s": _own(
        "timeout_s: 0.1, retries: 0", answered(text="yes", after_s=0.4), False, True, SERVED
    ),
    "endpoint.options": _own("options: {top_logprobs: 3}", body("top_logprobs"), 3, None, SERVED),
    "placement": _place("placement: separate", kinds, ["rollout0", "trainer0"], ["worker0"]),
    "rollout.workers": _place("rollout: {workers: 2}", lambda side: len(side.group.speakers), 2, 1),
    "rollout.cpus": _place("rollout: {cpus: 3}", lambda side: side.ask_of("worker").cpus, 3, 0),
    "rollout.gpus": _place("rollout: {gpus: 0.5}", lambda side: side.ask_of("worker").gpus, 0.5, 0),
    "rollout.engine.use": _place(
        "rollout: {engine: vllm}",
        lambda side: worker_of(side.model, side.plan).__name__,
        "VllmWorker",
        "Worker",
    ),
    "rollout.engine.max_batch_tokens": _place(
        "rollout: {engine: {max_batch_tokens: 77}}", engine("max_batch_tokens"), 77, 16384
    ),
    "rollout.engine.prefix_cache_bytes": _place(
        "rollout: {engine: {prefix_cache_bytes: 0}}",
        lambda side: side.worker.engine._prefixes is None,
        True,
        False,
    ),
    "rollout.engine.decoder": _place(
        "rollout: {engine: {decoder: modules}}",
        lambda side: isinstance(side.worker.engine.speaker(), BareSpeaker),
        False,
        True,
    ),
    "rollout.engine.memory_frac": _place(
        "rollout: {engine: {use: vllm, memory_frac: 0.25}}",
        engine("memory_frac"),
        0.25,
        0.85,
        "engine: vllm, ",
    ),
    "trainer.workers": _place("trainer: {workers: 2}", worlds, [(0, 2), (1, 2)], [(0, 1)]),
    "trainer.cpus": _place(
        "placement: separate, trainer: {cpus: 3}",
        lambda side: side.ask_of("trainer").cpus,
        3,
        0,
        "defaults: {placement: separate}, ",
    ),
    "trainer.gpus": _place(
        "placement: separate, trainer: {gpus: 0.5}",
        lambda side: side.ask_of("trainer").gpus,
        0.5,
        0,
        "defaults: {placement: separate}, ",
    ),
    "trainer.strategy": _place(
        "placement: separate, trainer: {workers: 2, strategy: fsdp2}", strategy, "fsdp2", "ddp"
    ),
}


# -- the tests ------------------------------------------------------------------------------------


def fields(spec: type[Spec], prefix: str = "") -> Iterator[str]:
    """The fields of a document's part, dotted; of a choice between a word and a part, both."""
    for name, info in spec.model_fields.items():
        plain, parts = _told_apart(info.annotation)
        if plain:
            yield prefix + name
        for part in parts:
            yield from fields(part, f"{prefix}{name}.")


def _told_apart(annotation: Any) -> tuple[bool, list[type[Spec]]]:
    """Whether a value may be plain, and the parts that it may be."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return False, [annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _told_apart(inner[0])
    if origin in (typing.Union, types.UnionType) or (origin is dict and inner):
        wanted = inner[1:] if origin is dict else [one for one in inner if one is not type(None)]
        found = [_told_apart(one) for one in wanted]
        return any(plain for plain, _ in found), [part for _, parts in found for part in parts]
    return True, []


def test_every_field_is_followed() -> None:
    assert sorted(CASES) == sorted({*fields(Model), *fields(Place)})


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory, toy_at: Callable[..., Path]) -> Path:
    """What a mapping may name: two earlier runs, and a model's folder."""
    root = tmp_path_factory.mktemp("around")
    short = ("steps: 4, tasks", "steps: 1, tasks"), (WARM, "")
    train(compile_experiment(toy_at(root / "a", *short)), root / "earlier")
    adapted = "mapping: {models: {m: {roles: rest, train: lora, adapters: {told: [caller], usual: rest}}}}"
    train(compile_experiment(toy_at(root / "b", *short, (SHARED, adapted))), root / "adapted")
    llama = ("qwen3", "llama"), (" head_dim: 8,", ""), ("[words.jsonl]", "[words.jsonl, other.jsonl]")
    experiment = toy_at(root / "c", *llama)
    _files(experiment.parent)
    plan = compile_experiment(experiment)
    ModelGroup(plan.models[0], plan, root / "made").close()
    return root


def _files(folder: Path) -> None:
    (folder / "other.jsonl").write_text('{"text": "zebra"}\n')
    (folder / "chat.jinja").write_text(TEMPLATE)


class ToldOnly:
    """In vLLM's place, which isn't here: what its engine would be told."""

    def __init__(self, *_: Any, memory_frac: float, **__: Any):
        self.memory_frac = memory_frac


@pytest.mark.parametrize("name", CASES)
def test_a_field_reaches_where_it_acts_and_only_its_own_side(
    name: str,
    toy: Callable[..., Path],
    around: Path,
    chat_server: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    case = CASES[name]
    monkeypatch.setenv("TOLD_KEY", "told")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if name.endswith("memory_frac"):
        monkeypatch.setattr(vllm_worker, "VllmEngine", ToldOnly)
    names = {"URL": chat_server.url, "EARLIER": f"{around}/earlier", "ADAPTED": f"{around}/adapted"}
    mapping = f"mapping: {{models: {case.mapping}}}"
    for word, meant in (names | {"FOLDER": f"{around}/made/base/policy"}).items():
        mapping = mapping.replace(word, meant)
    experiment = toy((SHARED, mapping), ("algorithm:", f"{case.runtime}algorithm:"), workflow=TOOLS)
    _files(experiment.parent)
    plan = compile_experiment(experiment)
    with ExitStack() as stack:
        seen = []
        for policy in case.sides:
            [model] = [m for m in plan.models if policy in [p.name for p in m.policies]]
            seen.append(case.see(Side(plan, model, policy, tmp_path / "run", around, stack, chat_server)))
    assert seen == [case.told, case.usual]
