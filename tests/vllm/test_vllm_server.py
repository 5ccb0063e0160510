"""The endpoint engine beside a real server of the OpenAI kind: vLLM's own, with a tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.models.bases import make_model
from masflow.models.endpoint_engine import EndpointEngine
from masflow.models.wordpiece import make_wordpiece
from masflow.runtime.controller import train
from masflow.runtime.rundir import read_metrics
from masflow.spec.mapping import Endpoint, Wordpiece

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
KEY = "sk-of-this-test-0123456789"


@pytest.fixture(scope="module")
def server(base_of, words_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that wants a key."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = make_wordpiece(Wordpiece(files=("words.jsonl",)), [words_file])
    make_model(base_of("llama"), tokenizer, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat.jinja").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--model {folder} --served-model-name tiny --host 127.0.0.1 --port {port} --api-key {KEY}"
    words += f" --chat-template {folder / 'chat.jinja'} --dtype float32 --max-model-len 256 --enforce-eager"
    words += " --kv-cache-memory-bytes 100000000"
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **quiet})
    try:
        for _ in range(360):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def engine(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndpointEngine]:
    monkeypatch.setenv("TINY_KEY", KEY)
    made = EndpointEngine(Endpoint(url=server, key_env="TINY_KEY", retries=1), "tiny")
    yield made
    made.close()


def test_seeds_ends_counts_and_stop_strings_are_as_asked(engine, ask):
    requests = [ask(n, max_tokens=12, stop=("red",)) for n in range(8)]
    first, second = engine.generate(requests), engine.generate(requests)
    assert [r.text for r in first] == [r.text for r in second]
    assert len({r.text for r in first}) > 4
    assert {r.finish for r in first} <= {"stop", "length"}
    assert all(0 < r.reply_tokens <= 12 and r.prompt_tokens > 0 for r in first)
    assert not any("red" in r.text for r in first)
    [cut] = engine.generate([ask(0, max_tokens=2)])
    assert (cut.finish, cut.reply_tokens) == ("length", 2)


def test_its_words_for_a_prompt_that_is_too_long_are_understood(engine, ask):
    short, long = engine.generate([ask(0), ask(1, "sky " * 400)])
    assert short.finish in ("stop", "length")
    assert long.finish == "prompt_too_long" and "maximum context length is 256" in long.detail


def test_its_refusals_end_the_run_with_its_words(server, ask, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    without = EndpointEngine(Endpoint(url=server), "tiny")
    with pytest.raises(RunError, match=r"refuses \(401\): Unauthorized"):
        without.generate([ask(0)])
    without.close()


def test_an_unknown_model_is_told_with_its_words(server, engine, ask):
    other = EndpointEngine(engine.endpoint, "other")
    with pytest.raises(RunError, match=r"\(404\): The model `other` does not exist"):
        other.generate([ask(0)])
    other.close()


def test_a_role_learns_beside_one_that_it_plays(server, engine, toy, tmp_path: Path):
    mapping = f'big: {{roles: rest, endpoint: {{url: "{server}", key_env: TINY_KEY}}, model: tiny}}'
    changes = (
        (
            "mapping: {models: {policy: {roles: rest}}}",
            f"mapping: {{models: {{own: {{roles: [caller]}}, {mapping}}}}}",
        ),
        ("steps: 4, tasks", "steps: 2, tasks"),
    )
    train(compile_experiment(toy(*changes)), tmp_path / "run")
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["served"]["big"]["replies"] for r in records] == [12, 12]
    assert all(r["outcomes"] == {"ok": 12} or "truncated" in r["outcomes"] for r in records)
