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
    embedding_std,
    embeddings_move,
    engine,
    four_bits,
    kinds,
    knows,
    members,
    moves,
    num_tokens,
    path,
    prompt,
    rank,
    rate_at,
    scaling,
    setting,
    starts_from,
    targets,
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


# -- what is written ------------------------------------------------------------------------------

OPTIMIZER = (
    "optimizer: {lr: 0.006, betas: [0.5, 0.75], weight_decay: 0.25, eps: 1.0e-4, warmup_steps: 2,"
    " schedule: linear, final_lr_frac: 0.5, max_grad_norm: 0.001}"
)
LORA = "lora: {rank: 3, alpha: 4.5, targets: [q_proj]}"
USUAL = "usual: {roles: [echoer]}"
OWN = (
    f"{{told: {{roles: [caller], {OPTIMIZER}, gradient_checkpointing: true, context: 48,"
    " base: {config: {CONFIG24}, init: {embedding_std: 0.2}, freeze: [embeddings],"
    " tokenizer: {wordpiece: {files: [words.jsonl, other.jsonl], size: 145}}},"
    " chat: {template: chat.jinja, thinking: true, options: {colour: blue}, tools: template}},"
    " usual: {roles: [echoer], base: {config: {CONFIG}, tokenizer: {wordpiece: {files: [words.jsonl]}}}}}"
)
WHOLE = (
    "{told: {roles: [caller], dtype: bfloat16, base: {config: {CONFIG},"
    " tokenizer: {wordpiece: {files: [words.jsonl], whole_words: false}}}}, USUAL}"
)
FROZEN = "{told: {roles: [caller], base: FOLDER, train: frozen}, USUAL}"
HALVED = "{told: {roles: [caller], base: FOLDER, train: frozen, quantize: 4bit}, USUAL}"
FOLDER = "{told: {roles: [caller], base: {config: {CONFIG}, tokenizer: FOLDER}}, USUAL}"
EARLIER = "{told: {roles: [caller], init: EARLIER}, USUAL}"
PER_MODEL = "{m: {roles: rest, per: role}}"
SHAPED = f"{{told: {{roles: [caller], train: lora, {LORA}}}, usual: {{roles: [echoer], train: lora}}}}"
ADAPTERS = (
    "{m: {roles: rest, train: lora, adapters: {told: {roles: [caller], "
    f"{LORA}, {OPTIMIZER}}}, usual: [echoer]}}}}}}"
)
PER_ROLE = "{m: {roles: rest, train: lora, adapters: per_role}}"
EACH = "{m: {roles: rest, train: lora, adapters: {own: {roles: rest, per: role}}}}"
ADAPTED = (
    "{m: {roles: rest, train: lora, adapters: {told: {roles: [caller], init: ADAPTED}, usual: [echoer]}}}"
)
SERVED = (
    "{told: {roles: [caller], model: told, endpoint: {url: 'URL/a', key_env: TOLD_KEY, max_concurrent: 1,"
    " retries: 0, options: {top_logprobs: 3}}}, usual: {roles: [echoer], model: usual, endpoint: 'URL'}}"
)
PACED = SERVED.replace("retries: 0", "retries: 0, per_minute: 1, timeout_s: 0.1")
PLAIN = "{told: {roles: [caller]}, USUAL}"
APART = "told: {placement: separate}"
PLACED = (
    "told: {placement: separate, rollout: {workers: 2, cpus: 3, gpus: 0.5, engine: {max_batch_tokens: 77,"
    " prefix_cache_bytes: 0, decoder: modules}}, trainer: {workers: 2, cpus: 4, gpus: 0.25, strategy: fsdp2}}"
)
VLLM = "told: {rollout: {engine: {use: vllm, memory_frac: 0.25}}}, usual: {rollout: {engine: vllm}}"
USES = "told: {rollout: {engine: vllm}}"


@dataclass(frozen=True)
class Case:
    """The mapping, what is looked at, and what is seen at the side that is told and at the usual one."""

    mapping: str
    see: Callable[[Side], Any]
    told: Any
    usual: Any
    place: str = ""

    @property
    def sides(self) -> tuple[str, str]:
        return SIDES.get(self.mapping, ("told", "usual"))


SIDES = {
    PER_MODEL: ("m.caller", "m.echoer"),
    SHAPED: ("told/default", "usual/default"),
    ADAPTERS: ("m/told", "m/usual"),
    ADAPTED: ("m/told", "m/usual"),
    PER_ROLE: ("m/caller", "m/echoer"),
    EACH: ("m/own.caller", "m/own.echoer"),
}
ROLES = ["caller"], ["echoer"]
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


# -- the table ------------------------------------------------------------------------------------


def _adamw(mapping: str) -> dict[str, Case]:
    """The experiment's at the other side: a constant 0.01. Told: 0.003, 0.006, 0.006, 0.003 a step."""
    return {
        "optimizer.lr": Case(mapping, rate_at(2), 0.006, 0.01),
        "optimizer.warmup_steps": Case(mapping, rate_at(0), 0.003, 0.01),
        "optimizer.schedule": Case(
            mapping, lambda side: rate_at(3)(side) < rate_at(2)(side), told=True, usual=False
        ),
        "optimizer.final_lr_frac": Case(mapping, rate_at(3), 0.003, 0.01),
        "optimizer.betas": Case(mapping, setting("betas"), (0.5, 0.75), (0.9, 0.99)),
        "optimizer.weight_decay": Case(mapping, setting("weight_decay"), 0.25, 0.0),
        "optimizer.eps": Case(mapping, setting("eps"), 1e-4, 1e-8),
        "optimizer.max_grad_norm": Case(mapping, lambda side: round(side.learned.norm, 4), 0.001, 1.0),
    }


def _shape(mapping: str) -> dict[str, Case]:
    return {
        "lora.rank": Case(mapping, rank, 3, 16),
        "lora.alpha": Case(mapping, scaling, 4.5 / 3, 32 / 16),
        "lora.targets": Case(mapping, targets, {"q_proj"}, LINEAR),
    }


CASES: dict[str, Case] = {
    "roles": Case(PLAIN, members, *ROLES),
    "per": Case(PER_MODEL, members, *ROLES),
    "train": Case(FROZEN, moves, "frozen", "full"),
    **_shape(SHAPED),
    "adapters": Case(PER_ROLE, members, *ROLES),
    "adapters.roles": Case(ADAPTERS, members, *ROLES),
    "adapters.per": Case(EACH, members, *ROLES),
    **{f"adapters.{name}": case for name, case in (_adamw(ADAPTERS) | _shape(ADAPTERS)).items()},
    "adapters.init": Case(ADAPTED, starts_from("adapted", "m/m.told"), True, False),
    **_adamw(OWN),
    "init": Case(EARLIER, starts_from("earlier", "policy/policy"), True, False),
    "context": Case(OWN, lambda side: side.ask(text="say " * 14)[0].finish == "prompt_too_long", True, False),
    "dtype": Case(WHOLE, lambda side: side.worker.base.model.dtype, torch.bfloat16, torch.float32),
    "quantize": Case(HALVED, four_bits, True, False),
    "gradient_checkpointing": Case(OWN, lambda side: side.learned.passes, 8, 4),
    "base": Case(FROZEN, lambda side: side.worker.base.model.config.model_type, "llama", "qwen3"),
    "base.config": Case(OWN, lambda side: side.worker.base.model.config.hidden_size, 24, 16),
    "base.init.embedding_std": Case(OWN, embedding_std, 0.2, 0.0),
    "base.freeze": Case(OWN, embeddings_move, False, True),
    "base.tokenizer": Case(FOLDER, num_tokens("zebra"), 1, 5),
    "base.tokenizer.wordpiece.files": Case(OWN, knows("\u00e9"), True, False),
    "base.tokenizer.wordpiece.whole_words": Case(WHOLE, num_tokens("brown"), 5, 1),
    "base.tokenizer.wordpiece.size": Case(OWN, lambda side: len(side.worker.base.tokenizer), 145, 151),
    "chat.template": Case(OWN, lambda side: prompt(side).partition("[")[0], "<user>say red", ""),
    "chat.thinking": Case(OWN, lambda side: "[True" in prompt(side), True, False),
    "chat.options": Case(OWN, lambda side: "blue]" in prompt(side), True, False),
    "chat.tools": Case(OWN, lambda side: side.worker.tokens.chat.dialect.name, "hermes", "text"),
    "model": Case(SERVED, body("model"), "told", "usual"),
    "endpoint.url": Case(SERVED, path, "/v1/a/chat/completions", "/v1/chat/completions"),
    "endpoint.key_env": Case(SERVED, bearer, "Bearer told", None),
    "endpoint.max_concurrent": Case(SERVED, at_once, 1, 2),
    "endpoint.per_minute": Case(PACED, waits, [False, True], [False, False]),
    "endpoint.retries": Case(SERVED, answered(status=503), False, True),
    "endpoint.timeout_s": Case(PACED, answered(text="yes", after_s=0.5), False, True),
    "endpoint.options": Case(SERVED, body("top_logprobs"), 3, None),
    "placement": Case(PLAIN, kinds, ["rollout0", "trainer0"], ["worker0"], APART),
    "rollout.workers": Case(PLAIN, lambda side: len(side.group.speakers), 2, 1, PLACED),
    "rollout.cpus": Case(PLAIN, lambda side: side.ask_of("rollout").cpus, 3, 0, PLACED),
    "rollout.gpus": Case(PLAIN, lambda side: side.ask_of("rollout").gpus, 0.5, 0, PLACED),
    "rollout.engine.use": Case(
        PLAIN, lambda side: worker_of(side.model, side.plan).__name__, "VllmWorker", "Worker", USES
    ),
    "rollout.engine.max_batch_tokens": Case(PLAIN, engine("max_batch_tokens"), 77, 16384, PLACED),
    "rollout.engine.prefix_cache_bytes": Case(
        PLAIN, lambda side: engine("_prefixes")(side) is None, True, False, PLACED
    ),
    "rollout.engine.decoder": Case(
        PLAIN, lambda side: isinstance(engine("speaker")(side)(), BareSpeaker), False, True, PLACED
    ),
    "rollout.engine.memory_frac": Case(PLAIN, engine("memory_frac"), 0.25, 0.85, VLLM),
    "trainer.workers": Case(PLAIN, worlds, [(0, 2), (1, 2)], [(0, 1)], PLACED),
    "trainer.cpus": Case(PLAIN, lambda side: side.ask_of("trainer").cpus, 4, 0, PLACED),
    "trainer.gpus": Case(PLAIN, lambda side: side.ask_of("trainer").gpus, 0.25, 0, PLACED),
    "trainer.strategy": Case(PLAIN, lambda side: side.worker.part.strategy, "fsdp2", "ddp", PLACED),
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
    (folder / "other.jsonl").write_text('{"text": "zebra caf\u00e9"}\n', encoding="utf-8")
    (folder / "chat.jinja").write_text(TEMPLATE)


class ToldOnly:
    """In vLLM's place, which isn't here: what its engine would be told."""

    def __init__(self, *_: Any, memory_frac: float, **__: Any):
        self.memory_frac = memory_frac


@pytest.fixture(scope="module")
def sides(around: Path, toy_at: Callable[..., Path]) -> Iterator[Callable[[Case, Any], list[Side]]]:
    """The sides of a case: made once for all cases of one mapping, but asked anew where a server plays."""
    with ExitStack() as stack:
        made: dict[tuple[str, str], list[Side]] = {}

        def make(case: Case, server: Any) -> list[Side]:
            key = (case.mapping.replace("URL", server.url), case.place)
            if key not in made:
                made[key] = _made(
                    case,
                    server,
                    around,
                    toy_at(around / f"case{len(made)}", *_texts(key[0], case, around), workflow=TOOLS),
                    stack,
                )
            return made[key]

        yield make


def _texts(mapping: str, case: Case, around: Path) -> tuple[tuple[str, str], ...]:
    """Changes of the toy's experiment."""
    words = {"EARLIER": f"{around}/earlier", "ADAPTED": f"{around}/adapted", "USUAL": USUAL}
    words |= {"FOLDER": f"{around}/made/base/policy", "CONFIG24": CONFIG.replace("16", "24", 1)}
    for word, meant in (words | {"CONFIG": CONFIG}).items():
        mapping = mapping.replace(word, meant)
    runtime = f"runtime: {{backend: ray, threads: 1, models: {{{case.place}}}}}\n" if case.place else ""
    return (SHARED, f"mapping: {{models: {mapping}}}"), ("algorithm:", f"{runtime}algorithm:")


def _made(case: Case, server: Any, around: Path, experiment: Path, stack: ExitStack) -> list[Side]:
    _files(experiment.parent)
    plan = compile_experiment(experiment)
    models = {p.name: m for m in plan.models for p in m.policies}
    out = experiment.parent / "run"
    return [Side(plan, models[name], name, out, around, stack, server) for name in case.sides]


@pytest.mark.parametrize("name", CASES)
def test_mapping__a_models_own_setting_is_ignored__each_field_reaches_where_it_acts_and_its_own_side_only(
    name: str,
    sides: Callable[[Case, Any], list[Side]],
    chat_server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES[name]
    monkeypatch.setenv("TOLD_KEY", "told")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if name.endswith("memory_frac"):
        monkeypatch.setattr(vllm_worker, "VllmEngine", ToldOnly)
    assert [case.see(side) for side in sides(case, chat_server)] == [case.told, case.usual]
