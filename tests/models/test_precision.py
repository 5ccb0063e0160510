"""In which numbers weights are held: the rule, bfloat16 for real, and 4 bits where they can't be had."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.bases import load_base
from masflow.models.decoding import Job, decode
from masflow.models.engine import SamplingParams
from masflow.models.experience import Row
from masflow.models.policies import Policies
from masflow.models.precision import dtype_of, slow_halves
from masflow.models.trainer import Trainer
from masflow.spec.mapping import ConfigBase, Lora, Optimizer

MakeBase = Callable[..., ConfigBase]
BIG, SMALL = 5_000_000, 4_999_999
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("asked", "train", "size", "device", "wanted"),
    [
        ("auto", "full", BIG, "cpu", SINGLE),
        ("auto", "full", BIG, "cuda", SINGLE),
        ("auto", "lora", BIG, "cpu", SINGLE),
        ("auto", "lora", BIG, "cuda", HALF),
        ("auto", "frozen", BIG, "cpu", SINGLE),
        ("auto", "frozen", BIG, "cuda", HALF),
        ("auto", "lora", SMALL, "cuda", SINGLE),
        ("auto", "frozen", SMALL, "cuda", SINGLE),
        ("float32", "frozen", BIG, "cuda", SINGLE),
        ("bfloat16", "frozen", SMALL, "cpu", HALF),
        ("bfloat16", "full", BIG, "cuda", HALF),
    ],
)
def test_the_rule(asked: str, train: str, size: int, device: str, wanted: torch.dtype) -> None:
    assert dtype_of(asked, train, size, device) == wanted


def _model(base: str, **fields: Any) -> ModelIR:
    policy = PolicyIR("m/a", "m", "a", ("a",), True, Optimizer(lr=3e-2))
    return ModelIR("m", base, "hash", "lora", (policy,), Lora(rank=4, alpha=8), **fields)


@pytest.fixture
def folder(config_base: MakeBase, tmp_path: Path) -> str:
    made = ModelIR("made", config_base("llama"), "hash", "full", ())
    load_base(made, tmp_path, seed=0)
    return str(tmp_path / "base/made")


@pytest.mark.parametrize("train", ["lora", "full"])
def test_bfloat16_trains_without_nan_and_the_engine_agrees(folder: str, tmp_path: Path, train: str) -> None:
    model = _model(folder, dtype="bfloat16")
    if train == "full":
        model = replace(model, train="full", policies=(replace(model.policies[0], adapter=None),))
    base = load_base(model, tmp_path, 0)
    backbone, policies = Backbone(base.model), Policies(model, base, 0)
    trainer = Trainer(backbone, tmp_path / "nonfinite")
    types = {p.dtype for p in policies.learners["m/a"].parameters.values()}
    assert types == {SINGLE if train == "lora" else HALF} and base.model.dtype == HALF
    rows = [Row(f"t{i}", "m/a", (5, 6, 7 + i), (8, 9, 1), (), -1, "", "") for i in range(4)]
    losses = []
    for step in range(12):
        with policies.learning("m/a") as learner:
            losses.append(trainer.supervise(learner, rows, model.policies[0].optimizer, step, 12)["loss"])
    assert losses[-1] < losses[0] - 0.2 and all(loss == loss for loss in losses)
    drawn = decode(backbone, [Job((5, 6, 7), SamplingParams(0.0, max_tokens=4), 0)], frozenset())[0]
    row = Row("p", "", (5, 6, 7), tuple(drawn.ids), tuple(drawn.logprobs), 0, "", "")
    gaps = [abs(a - b) for a, b in zip(drawn.logprobs, trainer.logprobs([row], [1.0])[0], strict=True)]
    assert max(gaps) < 0.1


def test_four_bits_without_a_gpu_say_what_is_missing_and_how_to_get_it(folder: str, tmp_path: Path) -> None:
    model = _model(folder, quantize="4bit")
    with pytest.raises(RunError, match="'m': 4 bits need a GPU") as caught:
        load_base(model, tmp_path, 0, torch.device("cpu"))
    has_it = importlib.util.find_spec("bitsandbytes") is not None
    assert ("pip install bitsandbytes" in str(caught.value)) is not has_it
    assert ("bitsandbytes, which isn't installed" in str(caught.value)) is not has_it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_adapters_learn_on_four_bits(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = _model(folder, quantize="4bit")
    base = load_base(model, tmp_path, 0)
    backbone, policies = Backbone(base.model, recompute=True), Policies(model, base, 0)
    trainer = Trainer(backbone, tmp_path / "nonfinite")
    frozen = {n: p.detach().clone() for n, p in base.model.named_parameters() if "lora_" not in n}
    rows = [Row(f"t{i}", "m/a", (5, 6, 7 + i), (8, 9, 1), (), -1, "", "") for i in range(4)]
    losses = []
    for step in range(12):
        with policies.learning("m/a") as learner:
            losses.append(trainer.supervise(learner, rows, model.policies[0].optimizer, step, 12)["loss"])
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.equal(frozen[n], p) for n, p in base.model.named_parameters() if n in frozen)


def test_in_half_precision_positions_are_encoded_as_the_library_does(folder: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = load_base(_model(folder, dtype="bfloat16"), tmp_path, 0, torch.device("cpu")).model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    frequencies = dict(theirs.named_buffers())
    assert any("inv_freq" in name for name in frequencies)
    assert all(torch.equal(buffer, frequencies[name]) for name, buffer in ours.named_buffers())
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("dtype", "device", "flags", "said"),
    [
        (HALF, "cpu", "fpu avx2 avx512f", 1),
        (HALF, "cpu", "fpu avx512_bf16 avx512f", 0),
        (HALF, "cpu", "fpu amx_bf16", 0),
        (HALF, "cpu", "asimd bf16 i8mm", 0),
        (HALF, "cuda", "fpu", 0),
        (SINGLE, "cpu", "fpu", 0),
    ],
)
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_noted(
    tmp_path: Path, dtype: torch.dtype, device: str, flags: str, said: int
):
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags : {flags}\n")
    notes = slow_halves(dtype, device, tmp_path / "cpuinfo")
    assert len(notes) == said and all("dtype: auto" in note for note in notes)
    assert slow_halves(dtype, device, tmp_path / "nowhere") == []
