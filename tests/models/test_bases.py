"""Bases are loaded from folders, or made once a seed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from masflow.compiler.plan import ModelIR
from masflow.errors import RunError
from masflow.models.bases import load_base, make_model
from masflow.models.cache import window_of
from masflow.spec.mapping import ConfigBase

MakeBase = Callable[..., ConfigBase]


def _model(base: ConfigBase | str | None, **fields: Any) -> ModelIR:
    return ModelIR("m", base, "hash", "full", (), **fields)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_base_is_made_once_and_depends_on_seed_and_name_alone(
    config_base: MakeBase, tmp_path: Path
) -> None:
    spec = config_base()
    torch.manual_seed(1)
    first = load_base(_model(spec), tmp_path / "a", seed=3)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert _same(_weights(load_base(_model(spec), tmp_path / "a", seed=3).model), _weights(first.model))
    assert _same(_weights(load_base(_model(spec), tmp_path / "b", seed=3).model), _weights(first.model))
    assert not _same(_weights(load_base(_model(spec), tmp_path / "c", seed=4).model), _weights(first.model))
    torch.set_rng_state(state)
    assert first.made and first.context == 128 and not first.model.training
    assert (tmp_path / "a/base/m/config.json").is_file()


def test_the_global_random_state_is_left_alone(config_base: MakeBase, tokenizer: Any) -> None:
    before = torch.get_rng_state()
    make_model(config_base(), tokenizer, 5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_folder_of_another_seed_or_base_is_refused(config_base: MakeBase, tmp_path: Path) -> None:
    load_base(_model(config_base()), tmp_path, seed=0)
    with pytest.raises(RunError, match="another base or seed"):
        load_base(_model(config_base()), tmp_path, seed=1)


def test_the_config_is_followed(config_base: MakeBase, tmp_path: Path) -> None:
    base = load_base(_model(config_base(std=0.25), context=64), tmp_path, seed=0)
    embeddings = base.model.get_input_embeddings().weight
    assert embeddings is base.model.get_output_embeddings().weight  # tie_word_embeddings
    assert float(embeddings.std()) == pytest.approx(0.25, rel=0.05)
    assert embeddings.shape[0] == len(base.tokenizer) and base.context == 64
    assert base.stop_ids == (base.tokenizer.eos_token_id,)
    untied = make_model(config_base("llama"), base.tokenizer, 0)
    assert untied.get_input_embeddings().weight is not untied.get_output_embeddings().weight


def test_a_folder_is_loaded_with_its_tokenizer(config_base: MakeBase, tmp_path: Path) -> None:
    made = load_base(_model(config_base("llama")), tmp_path / "run", seed=0)
    again = load_base(_model(str(tmp_path / "run/base/m")), tmp_path / "other", seed=9)
    assert _same(_weights(made.model), _weights(again.model)) and not again.made
    assert again.tokenizer("red sky").input_ids == made.tokenizer("red sky").input_ids
    assert not (tmp_path / "other").exists()


def test_dtype_rule(config_base: MakeBase, tmp_path: Path) -> None:
    load_base(_model(config_base()), tmp_path, seed=0)
    folder = str(tmp_path / "base/m")
    assert load_base(_model(folder), tmp_path, 0).model.dtype == torch.float32
    assert load_base(_model(folder, dtype="bfloat16"), tmp_path, 0).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (None, "has no base"),
        ("/nowhere/at/all", "can't load the base"),
        ({"model_type": "qwen3", "hidden_size": 0.5}, "base.config"),
        ({"model_type": "nothing"}, "base.config"),
    ],
)
def test_a_wrong_base_is_a_run_error(config_base: MakeBase, tmp_path: Path, base: Any, message: str) -> None:
    spec = config_base().model_copy(update={"config": base}) if isinstance(base, dict) else base
    with pytest.raises(RunError, match=message):
        load_base(_model(spec), tmp_path, seed=0)


def test_silent__an_option_is_ignored__a_misspelt_argument_of_the_config_is_refused(
    config_base: MakeBase, tmp_path: Path
) -> None:
    # FIELD_PROBLEMS, Silent failures: a backend silently ignores an option; the library keeps any argument.
    for family, wrong, message in (
        ("qwen3", {"hiden_size": 64}, "Qwen3Config has no argument 'hiden_size'.*'hidden_size'"),
        ("gpt2", {"n_layers": 3}, "GPT2Config has no argument 'n_layers'.*'n_layer'"),
    ):
        with pytest.raises(RunError, match=f"(?s){message}"):
            load_base(_model(config_base(family, **wrong)), tmp_path, seed=0)
    for family, right in (("qwen3", {"rope_theta": 5000.0}), ("gpt2", {"activation_function": "relu"})):
        assert load_base(_model(config_base(family, **right)), tmp_path / family, seed=0).made


def test_a_torn_base_is_told_and_made_again_the_same(config_base: MakeBase, tmp_path: Path) -> None:
    first = load_base(_model(config_base()), tmp_path, seed=0).model.state_dict()
    [file] = (tmp_path / "base").rglob("*.safetensors")
    sound = file.read_bytes()
    file.unlink()
    file.write_bytes(sound[:500])
    with pytest.raises(RunError, match=r"(?s)can't load the base .*it is made again"):
        load_base(_model(config_base()), tmp_path, seed=0)
    shutil.rmtree(file.parent)
    again = load_base(_model(config_base()), tmp_path, seed=0).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_tokenizer_larger_than_its_model_is_refused(config_base: MakeBase, tmp_path: Path) -> None:
    load_base(_model(config_base()), tmp_path, seed=0)
    [config] = (tmp_path / "base").rglob("config.json")
    folder = config.parent
    small = make_model(config_base(vocab_size=20), AutoTokenizer.from_pretrained(folder), 0)
    small.save_pretrained(folder)
    with pytest.raises(RunError, match=r"has \d+ tokens, and the model 20"):
        load_base(_model(str(folder)), tmp_path, seed=0)


def test_a_tokenizer_that_is_not_there_is_a_run_error(config_base: MakeBase, tmp_path: Path) -> None:
    spec = config_base().model_copy(update={"tokenizer": str(tmp_path / "nothing")})
    with pytest.raises(RunError, match="can't load the tokenizer"):
        load_base(_model(spec), tmp_path, seed=0)


def test_a_context_beyond_the_base_is_refused(config_base: MakeBase, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="context 4096 exceeds the base's 128"):
        load_base(_model(config_base(), context=4096), tmp_path, seed=0)


def test_sliding_attention_bounds_the_context(config_base: MakeBase, tmp_path: Path) -> None:
    spec = config_base("mistral")
    assert load_base(_model(spec), tmp_path / "a", seed=0).context == 32
    with pytest.raises(RunError, match="context 64 exceeds the base's 32"):
        load_base(_model(spec, context=64), tmp_path / "b", seed=0)


def test_layers_with_a_running_state_are_refused() -> None:
    config = AutoConfig.for_model("mamba", num_hidden_layers=2, hidden_size=8)
    with pytest.raises(RunError, match="LinearAttentionLayer are not supported"):
        window_of(config)


def test_heads_of_keys_and_values_are_those_of_the_queries_unless_given(tokenizer: Any) -> None:
    config = {"model_type": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    words = {"wordpiece": {"files": ["words.jsonl"]}}
    few = ConfigBase.model_validate({"config": {**config, "num_attention_heads": 2}, "tokenizer": words})
    assert make_model(few, tokenizer, 0).config.num_key_value_heads == 2
    for wrong in ({"num_attention_heads": 3, "num_key_value_heads": 2}, {"num_attention_heads": 0}):
        base = ConfigBase.model_validate({"config": {**config, **wrong}, "tokenizer": words})
        with pytest.raises(RunError, match=r"base\.config"):
            make_model(base, tokenizer, 0)
