"""Exported folders load with transformers and PEFT alone, and say what the checkpoint's policies say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.models import export
from masflow.models.bases import load_base
from masflow.models.policies import Policies
from masflow.models.tokens import ChatTokens
from masflow.spec.mapping import Lora, Optimizer
from masflow.trace import Message

IDS = [[3, 5, 8, 4, 9, 6, 3, 7]]
MESSAGES = (Message("system", "be short"), Message("user", "what is the colour of sky"))
CHILD = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
found = {}
for name, (folder, base) in json.load(open(sys.argv[1])).items():
    model = AutoModelForCausalLM.from_pretrained(base or folder, dtype="auto")
    if base:
        model = PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(json.loads(sys.argv[2]))).logits
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(json.loads(sys.argv[3]), add_generation_prompt=True, tokenize=False)
    found[name] = (logits, tokenizer(text, add_special_tokens=False)["input_ids"])
assert not [name for name in sys.modules if name.startswith("masflow")]
torch.save(found, sys.argv[4])
"""


@dataclass
class Case:
    """A policy as the checkpoint has it, and the folder that was written of it."""

    logits: torch.Tensor
    prompt: tuple[int, ...]
    folder: Path
    base: Path | None = None


def _model(base: Any, train: str, names: tuple[str, ...] = ("asker", "judge")) -> ModelIR:
    def policy(name: str, adapter: str | None, roles: tuple[str, ...]) -> PolicyIR:
        return PolicyIR(name, "m", adapter, roles, True, Optimizer())

    policies = (policy("m", None, names),)
    if train == "lora":
        policies = tuple(policy(f"m/{name}", name, (name,)) for name in names)
    return ModelIR("m", base, "hash", train, policies, Lora(rank=3, alpha=6))  # type: ignore[arg-type]


def _trained(model: ModelIR, root: Path, moves_backbone: bool = True) -> tuple[Policies, export.Source]:
    """A checkpoint of a model all of whose weights have moved."""
    policies = Policies(model, load_base(model, root, 0, torch.device("cpu")), 0)
    generator = torch.Generator().manual_seed(1)
    learners = list(policies.learners.values())
    if policies.has_adapters and moves_backbone:
        with policies.learning_backbone():
            learners.append(policies.backbone)
    for learner in learners:
        for parameter in learner.parameters.values():
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.data += noise.to(parameter.dtype)
    (root / "saved").mkdir(parents=True)
    policies.save(root / "saved")
    return policies, export.Source(model, root, 0, root / "saved")


def _said(policies: Policies, policy: str) -> tuple[torch.Tensor, tuple[int, ...]]:
    policies.switch(policy)
    tokens = ChatTokens(policies.base.tokenizer, policies.base.stop_ids)
    with torch.no_grad():
        logits = policies.base.model(input_ids=torch.tensor(IDS)).logits.clone()
    return logits, tokens.prompt(MESSAGES).ids


@pytest.fixture(scope="module")
def cases(config_base: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every family, full and with adapters; frozen embeddings; one adapter merged."""
    torch.set_num_threads(1)
    root, found = tmp_path_factory.mktemp("export"), {}
    for name, family, train in (
        ("tied full", "qwen3", "full"),
        ("full", "llama", "full"),
        ("conv1d full", "gpt2", "full"),
        ("adapter", "qwen3", "lora"),
        ("conv1d adapter", "gpt2", "lora"),
    ):
        freeze = ("embeddings",) if family == "qwen3" else ()
        place = root / name.replace(" ", "_")
        policies, source = _trained(_model(config_base(family, freeze), train), place)
        last = policies.model.policies[-1]
        logits, prompt = _said(policies, last.name)
        if train == "full":
            export.write_full(source, last, place / "to")
            found[name] = Case(logits, prompt, place / "to")
            continue
        export.write_backbone(source, place / "under")
        export.write_adapter(source, last, str(place / "under"), place / "to")
        found[name] = Case(logits, prompt, place / "to", place / "under")
        export.write_merged(source, last, place / "merged")
        found[f"{name} merged"] = Case(logits, prompt, place / "merged")
    return found | _on_a_folder(found["full"].folder, root / "folder") | _in_half_precision(config_base, root)


def _on_a_folder(base: Path, root: Path) -> dict[str, Case]:
    """An adapter on a base that others have too."""
    policies, source = _trained(_model(str(base), "lora"), root, moves_backbone=False)
    assert not source.is_moved and source.dtype == "float32"
    last = policies.model.policies[-1]
    logits, prompt = _said(policies, last.name)
    export.write_adapter(source, last, str(base), root / "to")
    return {"adapter on a folder": Case(logits, prompt, root / "to", base)}


def _in_half_precision(config_base: Callable[..., Any], root: Path) -> dict[str, Case]:
    model = replace(_model(config_base("llama"), "full"), dtype="bfloat16")
    policies, source = _trained(model, root / "half")
    logits, prompt = _said(policies, "m")
    export.write_full(source, policies.model.policies[0], root / "half/to")
    assert {w.dtype for w in load_file(root / "half/to/model.safetensors").values()} == {torch.bfloat16}
    lora = replace(_model(config_base("llama"), "lora"), dtype="bfloat16")
    _, source = _trained(lora, root / "half_lora")
    export.write_merged(source, lora.policies[0], root / "half_lora/to")
    assert source.dtype == "bfloat16"
    assert {w.dtype for w in load_file(root / "half_lora/to/model.safetensors").values()} == {torch.float32}
    return {"half precision full": Case(logits, prompt, root / "half/to")}


@pytest.fixture(scope="module")
def loaded(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program that knows no masflow finds in the folders: (logits, prompt ids)."""
    root = tmp_path_factory.mktemp("child")
    asked = {name: (str(case.folder), str(case.base) if case.base else None) for name, case in cases.items()}
    (root / "asked.json").write_text(json.dumps(asked))
    messages = json.dumps([{"role": m.role, "content": m.content} for m in MESSAGES])
    words = [str(root / "asked.json"), json.dumps(IDS), messages, str(root / "out.pt")]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, cwd=root, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return torch.load(root / "out.pt")


def test_full_models_and_adapters_load_elsewhere_with_the_same_logits(
    cases: dict[str, Case], loaded: dict[str, Any]
):
    assert set(loaded) == set(cases)
    for name, case in cases.items():
        gap = ((loaded[name][0] - case.logits).abs().max() / case.logits.abs().max()).item()
        assert gap == 0 if "merged" not in name else gap < 1e-6, (name, gap)
    apart = (cases["adapter"].logits - loaded["tied full"][0]).abs().max()
    assert apart > 0.01  # the weights did move


def test_the_chat_template_that_comes_along_gives_the_prompts_of_training(
    cases: dict[str, Case], loaded: dict[str, Any]
):
    for name, case in cases.items():
        assert tuple(loaded[name][1]) == case.prompt, name


def test_mapping__adapters_were_never_saved__an_adapter_is_a_peft_folder_on_its_own_backbone(
    cases: dict[str, Case],
):
    """Row of FIELD_PROBLEMS, Mapping: adapters were never saved, only the shared base."""
    config = json.loads((cases["conv1d adapter"].folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(cases["conv1d adapter"].base)
    assert config["r"] == 3 and config["lora_alpha"] == 6 and config["fan_in_fan_out"]
    assert config["target_modules"] == ["c_attn", "c_fc", "c_proj"]


def test_an_adapter_on_a_base_that_others_have_names_it(cases: dict[str, Case]):
    case = cases["adapter on a folder"]
    config = json.loads((case.folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(case.base)


def test_a_checkpoint_of_another_mapping_is_refused(config_base: Callable[..., Any], tmp_path: Path):
    _, source = _trained(_model(config_base(), "full"), tmp_path)
    other = replace(source.model.policies[0], name="other")
    with pytest.raises(Exception, match="holds no policy 'other'; it holds: m"):
        export.write_full(source, other, tmp_path / "to")
