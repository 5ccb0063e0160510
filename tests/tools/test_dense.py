"""dense: exact search over embeddings that a tiny model makes; stored, shared, refused where it can't be."""

import json
import os
import random
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from masflow.compiler import check, compile_workflow
from masflow.errors import RunError
from masflow.models.wordpiece import make_wordpiece
from masflow.spec.mapping import Wordpiece
from masflow.spec.tools import settings_faults
from masflow.tools import dense
from masflow.tools.dense import Embedder, make, nearest

WORDS = [f"w{i}" for i in range(40)]
BERT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
QWEN = {**BERT, "num_key_value_heads": 1, "head_dim": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(kind)`: the folder of a tiny, seeded model with a tokenizer over the test's words."""
    root = tmp_path_factory.mktemp("embedders")
    (root / "words.jsonl").write_text(json.dumps({"text": " ".join(WORDS)}) + "\n")

    def make_one(kind):
        folder = root / kind
        if not folder.exists():
            tokenizer = make_wordpiece(Wordpiece(files=("words.jsonl",)), [root / "words.jsonl"])
            torch.manual_seed(0)
            sizes = {**(BERT if kind == "bert" else QWEN), "vocab_size": len(tokenizer)}
            config = transformers.AutoConfig.for_model(kind, **sizes)
            of = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
            model = of.from_config(config)
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return str(folder)

    return make_one


@pytest.fixture
def corpus(tmp_path):
    rng = random.Random(1)
    rows = [{"id": f"p{i}", "text": " ".join(rng.choices(WORDS, k=rng.randint(3, 9)))} for i in range(60)]
    rows[17]["text"] = rows[41]["text"] = rows[5]["text"]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("MASFLOW_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    dense._embedded.cache_clear()
    yield
    dense._embedded.cache_clear()


def texts_of(corpus):
    return [json.loads(line)["text"] for line in Path(corpus).read_text().splitlines()]


@cache
def loaded(folder):
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModel.from_pretrained(folder)


def reference(folder, text, pooling, normalize):
    """One text alone, without padding, from the model's documented output."""
    tokenizer, model = loaded(folder)
    model.eval()
    with torch.no_grad():
        hidden_TD = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()
    vector_D = {"mean": hidden_TD.mean(0), "last": hidden_TD[-1], "cls": hidden_TD[0]}[pooling]
    return (vector_D / vector_D.norm() if normalize else vector_D).numpy()


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [("bert", "mean", True), ("bert", "cls", False), ("qwen3", "last", True), ("qwen3", "mean", False)],
)
def test_a_search_finds_the_nearest_by_each_texts_own_embedding(made, corpus, kind, pooling, normalize):
    folder = made(kind)
    settings = {"corpus": corpus, "model": folder, "pooling": pooling, "normalize": normalize, "batch": 7,
                "stored": "float32", "query_prefix": "w1 ", "passage_prefix": "w2 "}  # fmt: skip
    found = make(settings)(query="w3 w4")
    texts = texts_of(corpus)
    query_D = reference(folder, "w1 w3 w4", pooling, normalize)
    scores = np.array([reference(folder, f"w2 {text}", pooling, normalize) @ query_D for text in texts])
    assert found["scores"] == pytest.approx(sorted(scores, reverse=True)[:5], rel=1e-4, abs=1e-4)
    assert [scores[int(name[1:])] for name in found["ids"]] == pytest.approx(
        found["scores"], rel=1e-4, abs=1e-4
    )
    assert found["text"].split("\n") == [texts[int(name[1:])] for name in found["ids"]]


def test_equal_passages_have_equal_scores_and_stand_in_corpus_order(made, corpus):
    text = texts_of(corpus)[5]
    found = make({"corpus": corpus, "model": made("bert"), "batch": 4, "top_k": 3, "stored": "float32"})(
        query=text
    )
    assert found["ids"] == ["p5", "p17", "p41"]
    assert found["scores"] == [1.0, 1.0, 1.0]


def test_the_nearest_are_the_same_whatever_the_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    vectors_PD = rng.normal(size=(500, 24)).astype(np.float16)
    vectors_PD[300:310] = vectors_PD[7]
    query_D = vectors_PD[7].astype(np.float32)
    exact = np.round(vectors_PD.astype(np.float64) @ query_D.astype(np.float64), 6)
    expected = sorted(range(500), key=lambda i: (-exact[i], i))[:6]
    assert expected == [7, 300, 301, 302, 303, 304]
    for rows in (1, 7, 64, 8192):
        monkeypatch.setattr(dense, "BLOCK_ROWS", rows)
        assert nearest(vectors_PD, query_D, 6) == [(i, exact[i]) for i in expected]
    assert len(nearest(vectors_PD, query_D, 900)) == 500


def test_embeddings_are_stored_once_in_the_wanted_type_and_mapped(made, corpus, tmp_path):
    settings = {"corpus": corpus, "model": made("bert")}
    first = make(settings)
    answer = first(query="w1 w2")
    dense._embedded.cache_clear()
    second = make(settings)
    assert isinstance(first.vectors_PD, np.memmap) and isinstance(second.vectors_PD, np.memmap)
    assert second.vectors_PD.dtype == np.float16 and second(query="w1 w2") == answer
    make({**settings, "top_k": 2, "query_prefix": "w3 "})
    assert len([p for p in (tmp_path / "cache/dense").iterdir() if not p.name.startswith(".")]) == 1
    assert make({**settings, "stored": "float32"}).vectors_PD.dtype == np.float32
    make({**settings, "pooling": "cls"})
    assert len([p for p in (tmp_path / "cache/dense").iterdir() if not p.name.startswith(".")]) == 3


def forked(work):
    """The id of a process that does `work()`; its exit code says whether that was well."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            dense._embedded.cache_clear()
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return child


def ended(*children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_one_process_embeds_and_all_map_the_same_file(made, corpus, tmp_path, monkeypatch):
    settings, embed = {"corpus": corpus, "model": made("bert")}, Embedder.__call__

    def slowly(self, texts, batch):
        if len(texts) > 1:  # the corpus
            with (tmp_path / "embedded").open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.2)
        return embed(self, texts, batch)

    monkeypatch.setattr(Embedder, "__call__", slowly)
    dense._embedder(settings["model"], "mean", True, None, "cpu").load()

    def searches():
        found = make(settings)(query="w1 w2")
        (entry,) = (tmp_path / "cache/dense").glob("*/embeddings.npy")
        maps = Path("/proc/self/maps").read_text()
        (tmp_path / f"found{os.getpid()}").write_text(json.dumps(found))
        return str(entry) in maps

    children = [forked(searches) for _ in range(3)]
    assert ended(*children) == [0, 0, 0]
    assert len((tmp_path / "embedded").read_text().split()) == 1
    assert len({(tmp_path / f"found{child}").read_text() for child in children}) == 1
    assert ended(forked(searches)) == [0]  # later, when all others are gone
    assert len((tmp_path / "embedded").read_text().split()) == 1


def test_a_process_that_dies_while_it_embeds_leaves_no_half_index(made, corpus, monkeypatch):
    settings, embed = {"corpus": corpus, "model": made("bert")}, Embedder.__call__

    def dies(self, texts, batch):
        os._exit(7)

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "__call__", dies)
        assert ended(forked(lambda: make(settings))) == [7]
    assert Embedder.__call__ is embed
    assert ended(forked(lambda: len(make(settings)(query="w1")["ids"]) == 5)) == [0]


def test_damaged_embeddings_are_made_again(made, corpus, tmp_path):
    settings = {"corpus": corpus, "model": made("bert")}
    answer = make(settings)(query="w1 w2")
    dense._embedded.cache_clear()
    (file,) = (tmp_path / "cache/dense").glob("*/embeddings.npy")
    file.write_bytes(file.read_bytes()[:-40] + bytes(40))
    with pytest.warns(RuntimeWarning, match="embeddings.npy has other contents.*made again"):
        assert make(settings)(query="w1 w2") == answer


def test_long_texts_are_cut_at_max_tokens_and_at_the_models_positions(made):
    folder = made("bert")
    long = " ".join(WORDS * 3)
    whole = Embedder(folder, "mean", True, None, "cpu")
    assert (whole([long], 1) == whole([f"{long} w1 w2"], 1)).all() and whole.max_tokens == 64
    short = Embedder(folder, "mean", True, 4, "cpu")
    assert (short(["w1 w2 w3 w4 w5"], 1) == short(["w1 w2 w3 w4 w9"], 1)).all()
    assert not (whole(["w1 w2 w3 w4 w5"], 1) == whole(["w1 w2 w3 w4 w9"], 1)).all()


def test_a_query_without_tokens_finds_nothing_and_a_passage_without_them_is_far(made, corpus):
    assert make({"corpus": corpus, "model": made("bert")})(query="")["ids"] == []
    with Path(corpus).open("a") as out:
        out.write('{"id": "none", "text": ""}\n')
    found = make({"corpus": corpus, "model": made("bert"), "top_k": 61})(query="w1")
    assert found["scores"][found["ids"].index("none")] == 0
    with pytest.raises(TypeError, match="query must be text, got 3"):
        make({"corpus": corpus, "model": made("bert")})(query=3)  # type: ignore[arg-type]


def test_numbers_that_float16_cannot_hold_stop_with_the_fix(made, corpus, tmp_path):
    folder = tmp_path / "large"
    model = transformers.AutoModel.from_pretrained(made("bert"))
    with torch.no_grad():
        model.encoder.layer[-1].output.LayerNorm.bias.fill_(1e6)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(made("bert")).save_pretrained(folder)
    settings = {"corpus": corpus, "model": str(folder), "normalize": False}
    with pytest.raises(RunError, match="numbers that aren't finite\n  fix: write 'stored: float32'"):
        make(settings)
    assert len(make({**settings, "stored": "float32"})(query="w1")["ids"]) == 5


@pytest.mark.parametrize("device", ["cuda:77", "xpu"])
def test_a_device_that_is_not_there_is_named(made, corpus, device):
    with pytest.raises(RunError, match=f"can't be used on {device}: "):
        make({"corpus": corpus, "model": made("bert"), "device": device})


def test_a_model_that_is_not_there_is_named(corpus, tmp_path):
    with pytest.raises(RunError, match=r"the embedding model .*/gone can't be "):
        make({"corpus": corpus, "model": str(tmp_path / "gone")})


def test_settings_that_cannot_be_are_refused():
    def messages(**settings):
        return "; ".join(
            f.message + f.fix for f in settings_faults("dense", {"corpus": "c", "model": "m", **settings})
        )

    assert messages() == ""
    assert "'tpu' isn't a device; known: cpu, cuda" in messages(device="tpu")
    assert "write 'max_tokens'" in messages(max_length=3)
    assert "setting 'pooling' of dense" in messages(pooling="max")


def test_the_module_loads_no_torch():
    code = "import sys, masflow.tools.dense, masflow.compiler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- what check says ------------------------------------------------------------------------------

WORKFLOW = """
name: find
task: {question: str}
tools: {search: {use: dense, corpus: corpus.jsonl, model: MODEL, SETTINGS}}
nodes: {hits: {tool: search, args: {query: "{{ question }}"}}}
edges: [start -> hits -> end]
output: {text: "{{ hits.text }}"}
"""


def workflow(tmp_path, model, settings="top_k: 3"):
    (tmp_path / "corpus.jsonl").write_text('{"id": "a", "text": "w1"}\n')
    file = tmp_path / "find.yaml"
    file.write_text(WORKFLOW.replace("MODEL", model).replace("SETTINGS", settings))
    return file


def test_a_model_that_can_work_passes_the_check(made, tmp_path):
    assert check(workflow(tmp_path, made("qwen3"), "pooling: last, max_tokens: 64")) == []
    assert check(workflow(tmp_path, "some/id")) == []


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("qwen3", "pooling: cls", "its first token is the same whatever the text says (pooling: cls)"),
        ("bert", "max_tokens: 65", "max_tokens is 65; 'bert' has 64 positions"),
    ],
)
def test_check_refuses_what_the_models_config_rules_out(made, tmp_path, kind, settings, message):
    (problem,) = check(workflow(tmp_path, made(kind), settings))
    assert (problem.code, problem.path) == ("tool-setting", "tools.search")
    assert message in problem.message and problem.fix.startswith("write ")


def test_check_refuses_a_folder_that_is_no_embedding_model(tmp_path):
    (tmp_path / "half").mkdir()
    assert [p.code for p in check(workflow(tmp_path, "half"))] == ["bad-base"]
    (tmp_path / "half/config.json").write_text('{"is_encoder_decoder": true}')
    messages = " ".join(p.message for p in check(workflow(tmp_path, "half")))
    assert (
        "has no tokenizer" in messages
        and "has no weights" in messages
        and "an encoder and a decoder" in messages
    )
    (tmp_path / "half/config.json").write_text("[]")
    assert "isn't a JSON object" in " ".join(p.message for p in check(workflow(tmp_path, "half")))


def test_the_hashes_of_corpus_and_model_stand_in_the_plan_and_the_device_does_not(made, tmp_path):
    def tool(settings="top_k: 3"):
        _, graphs = compile_workflow(workflow(tmp_path, made("bert"), settings))
        return graphs["find"].tools[0]

    first = tool()
    assert first.settings["model"] == made("bert") and len(first.data_hash.split(",")) == 2
    (tmp_path / "find.yaml").unlink()
    assert tool("top_k: 3, device: cuda").data_hash == first.data_hash
    corpus_hash, model_hash = first.data_hash.split(",")
    config = Path(made("bert"), "config.json")
    text = config.read_text()
    try:
        config.write_text(text + " ")
        assert tool().data_hash.split(",")[0] == corpus_hash and tool().data_hash.split(",")[1] != model_hash
    finally:
        config.write_text(text)
