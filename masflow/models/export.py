"""Policies of a checkpoint as Hugging Face folders that load without masflow: full models, PEFT adapters.

Knows no runs: what a folder is written from and what its card says are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors import safe_open

from masflow.compiler.plan import ModelIR, PolicyIR
from masflow.errors import RunError, boundary
from masflow.models import saving
from masflow.models.bases import load_base
from masflow.models.policies import BACKBONE, KEPT, Policies
from masflow.models.precision import hold_in
from masflow.models.tokens import ChatTokens

__all__ = ["Source", "plain_template", "write_adapter", "write_backbone", "write_full", "write_merged"]


@dataclass(frozen=True)
class Source:
    """One model of a checkpoint. Made by whoever found it; eaten by the functions below."""

    model: ModelIR
    run_dir: Path
    """Holds `base/<model>` where the base was made from a config."""
    seed: int
    weights: Path
    """The model's folder in the checkpoint."""

    @property
    def is_moved(self) -> bool:
        """True where the weights under adapters aren't those of a base that others can load."""
        return not isinstance(self.model.base, str) or BACKBONE in saving.read_facts(self.weights).changed

    @property
    def dtype(self) -> str:
        """In which the model was held while it was trained; empty: unknown."""
        asked = "" if self.model.dtype == "auto" else self.model.dtype
        return saving.read_facts(self.weights).dtype or asked


def write_full(source: Source, policy: PolicyIR, folder: Path) -> None:
    """Config, weights as the run kept them, tokenizer with its chat template, generation config.

    Raises:
        RunError: the checkpoint doesn't fit the plan, or the folder can't be written.
    """
    opened = _open(source, policy)
    stem = saving.read_facts(source.weights).stem(policy.name)
    _write_model(opened, _saved_dtype(source.weights / f"{stem}.safetensors"), folder)


def write_backbone(source: Source, folder: Path) -> None:
    """As `write_full`, the weights under the model's adapters."""
    opened = _open(source)
    _take_out(opened.base.model)
    _write_model(opened, _saved_dtype(source.weights / f"{BACKBONE}.safetensors"), folder)


def write_merged(source: Source, policy: PolicyIR, folder: Path) -> None:
    """As `write_full`, an adapter added to the weights under it, in float32: what an adapter adds is mostly
    smaller than the steps of half precision.

    Raises:
        RunError: as `write_full`; the sum isn't finite.
    """
    opened = _open(source, policy)
    opened.switch(policy.name)
    hold_in(opened.base.model, torch.float32)
    with boundary(f"merging '{policy.name}'") as caught:
        for layer in _layers(opened.base.model).values():
            layer.merge(safe_merge=True)
    if caught.error:
        raise RunError(caught.error, "export it without --merge")
    _take_out(opened.base.model)
    _write_model(opened, None, folder)


def write_adapter(source: Source, policy: PolicyIR, base: str, folder: Path) -> None:
    """A PEFT adapter with the tokenizer; `base` is the folder or id that it belongs on.

    Raises:
        RunError: as `write_full`.
    """
    opened = _open(source, policy)
    parameters = opened.learners[policy.name].parameters
    layers = _layers(opened.base.model, opened.adapter_of(policy.name))
    lora, layer = source.model.lora_of(policy), next(iter(layers.values()))
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=_targets(opened.base.model, layers),
        fan_in_fan_out=bool(layer.fan_in_fan_out),  # type: ignore[union-attr]
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(folder))
        text = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        text["target_modules"] = sorted(text["target_modules"])
        (folder / "adapter_config.json").write_text(json.dumps(text, indent=2, sort_keys=True) + "\n")
        _tokenizer(opened).save_pretrained(folder)
    weights = {f"base_model.model.{path}": p for path, p in parameters.items()}
    saving.save_weights(folder / "adapter_model.safetensors", weights)


def plain_template(end_text: str) -> str:
    """The chat template that says what is done for a tokenizer without one: contents joined by line breaks,
    each assistant's reply followed by the end token."""
    end = json.dumps(end_text)
    return (
        "{{ bos_token or '' }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ message['content'] + " + end + " }}{% else %}"
        "{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    )


# -- parts ----------------------------------------------------------------------------------------


def _open(source: Source, policy: PolicyIR | None = None) -> Policies:
    """The model on the CPU with the checkpoint's weights: a policy's, those under adapters, frozen ones."""
    model = replace(source.model, quantize=None)
    opened = Policies(model, load_base(model, source.run_dir, source.seed, torch.device("cpu")), source.seed)
    facts = saving.read_facts(source.weights)
    if policy is not None and policy.name not in facts.policies:
        message = f"{source.weights} holds no policy '{policy.name}'; it holds: {', '.join(facts.policies)}"
        raise RunError(message, "name a checkpoint of this run")
    if opened.kept:
        saving.load_weights(source.weights / KEPT, opened.kept)
    if BACKBONE in facts.changed:
        saving.load_weights(source.weights / f"{BACKBONE}.safetensors", opened.backbone.parameters)
    if policy is not None and policy.name in facts.changed:
        file = source.weights / f"{facts.stem(policy.name)}.safetensors"
        saving.load_weights(file, opened.learners[policy.name].parameters)
    return opened


def _write_model(opened: Policies, dtype: torch.dtype | None, folder: Path) -> None:
    model = opened.base.model if dtype is None else hold_in(opened.base.model, dtype)
    with _writing(folder):
        model.save_pretrained(folder)
        _tokenizer(opened).save_pretrained(folder)


def _tokenizer(opened: Policies) -> Any:
    """The tokenizer with the chat template that the policy was trained with."""
    tokenizer, model = opened.base.tokenizer, opened.model
    tokens = ChatTokens.of(model, tokenizer, opened.base.stop_ids)
    if model.chat.template is not None:
        tokenizer.chat_template = model.chat.template
    elif tokenizer.chat_template is None:
        end = tokenizer.decode([tokens.end_id], skip_special_tokens=False)
        tokenizer.chat_template = plain_template(end)
    return tokenizer


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises RunError for whatever a library raises when it can't write `folder`."""
    with boundary(str(folder)) as caught:
        yield
    if caught.error:
        raise RunError(f"can't write {caught.error}", "make room on the disk, or choose another --to")


def _saved_dtype(file: Path) -> torch.dtype | None:
    """Of a file's tensors; None where there is none or they differ."""
    if not file.is_file():
        return None
    with safe_open(file, "pt") as tensors:
        found = {tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118 - no mapping
    return found.pop() if len(found) == 1 else None


def _layers(model: Any, adapter: str | None = None) -> dict[str, LoraLayer]:
    """The layers that carry an adapter; None: any."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    return {name: m for name, m in found.items() if adapter is None or adapter in m.lora_A}


def _take_out(model: Any) -> None:
    """Put every layer back that an adapter was wrapped around."""
    for name, layer in _layers(model).items():
        above, _, last = name.rpartition(".")
        setattr(model.get_submodule(above), last, layer.get_base_layer())


def _targets(model: Any, layers: dict[str, LoraLayer]) -> list[str]:
    """The short names of the adapted layers, or their whole paths where a short name would adapt more."""
    short = sorted({name.rpartition(".")[2] for name in layers})
    inside = tuple(f"{name}." for name in layers)
    named = {
        name
        for name, _ in model.named_modules()
        if name.rpartition(".")[2] in short and not name.startswith(inside)
    }
    return short if named == set(layers) else sorted(layers)
