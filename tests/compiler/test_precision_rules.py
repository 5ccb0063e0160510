"""What can be known of 4 bits and bfloat16 before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from masflow.compiler import check, compile_experiment
from masflow.compiler.sizes import estimate
from masflow.errors import SpecError

Write = Callable[[dict[str, str]], Path]
MADE = "{config: {model_type: qwen3, hidden_size: 8}, tokenizer: {wordpiece: {files: [rows.jsonl]}}}"
CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,'
    ' "num_attention_heads": 2, "vocab_size": 1000, "tie_word_embeddings": true}'
)


def _files(
    tiny: dict[str, str], model: str, runtime: str = "{backend: local}", base: str = "base"
) -> dict[str, str]:
    text = tiny["tiny.yaml"].replace("{models: {policy: {roles: rest}}}", f"{{models: {{policy: {model}}}}}")
    text = text.replace("some/base", base) + f"runtime: {runtime}\n"
    return {**tiny, "tiny.yaml": text, "base/config.json": CONFIG}


@pytest.mark.parametrize(
    ("runtime", "base", "message"),
    [
        ("{backend: local}", MADE, "its base is made from a config"),
        ("{backend: ray}", "base", "its place in the runtime gives it none"),
        ("{backend: ray, defaults: {rollout: {gpus: 1}, trainer: {gpus: 1, workers: 2, strategy: fsdp2}}}",
         "base", "can't be sharded"),
    ],
)  # fmt: skip
def test_four_bits_where_they_cannot_be_had_are_refused(
    project: Write, tiny: dict[str, str], runtime: str, base: str, message: str
) -> None:
    # FIELD_PROBLEMS, Silent failures: a backend silently ignores an option.
    files = _files(tiny, "{roles: rest, train: lora, quantize: 4bit}", runtime, base)
    with pytest.raises(SpecError, match=message) as caught:
        compile_experiment(project(files))
    assert [p.code for p in caught.value.problems if message in p.message] == ["bad-quantize"]


def test_four_bits_take_an_eighth_of_the_room_of_the_layers(project: Write, tiny: dict[str, str]) -> None:
    plain = compile_experiment(project(_files(tiny, "{roles: rest, train: frozen, dtype: float32}")))
    small = compile_experiment(project(_files(tiny, "{roles: rest, train: frozen, quantize: 4bit}")))
    sizes = [estimate(plan.models[0]) for plan in (plain, small)]
    assert sizes[0] is not None and sizes[1] is not None
    # 2 layers of 4 · 64² + 3 · 64 · 128 weights; 64 000 of the embedding and 5 · 64 of norms.
    layers, others = 2 * (4 * 64**2 + 3 * 64 * 128), 64_000 + 5 * 64
    assert sizes[0].memory_bytes == 4 * (layers + others)
    assert sizes[1].memory_bytes == int(0.516 * layers) + 2 * others


def test_training_in_bfloat16_is_warned_of(project: Write, tiny: dict[str, str]) -> None:
    def warned(model: str) -> bool:
        found = check(project(_files(tiny, model)))
        return "warn-bfloat16-training" in {p.code for p in found}

    assert warned("{roles: rest, dtype: bfloat16}")
    assert not warned("{roles: rest, dtype: bfloat16, train: lora}") and not warned("{roles: rest}")
