"""A team small enough to train in a second: two roles, eight tasks, a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

WORDS = ["red", "green", "blue", "white", "black", "pink", "grey", "brown"]
WORKFLOW = """
name: echo
task: {word: str, answer: {type: str, hidden: true}}
roles:
  caller: {prompt: "say {{ word }}", reply: {max_tokens: 3, on_malformed: continue,
    default: {text: red}}}
  echoer: {prompt: "hear {{ call.text }}", reply: {max_tokens: 3}}
nodes: {call: {role: caller}, echo: {role: echoer}}
edges: [start -> call -> echo -> end]
output: {said: "{{ echo.text }}"}
rewards:
  - {name: echoed, use: "echo.py:echoed", otherwise: 0,
     args: {said: "{{ echo.text }}", answer: "{{ answer }}"}}
  - {name: called, use: "echo.py:echoed", level: role, roles: [caller], weight: 0, otherwise: 0,
     args: {said: "{{ call.text }}", answer: "{{ answer }}"}}
"""
REWARD = '''
def echoed(said: str, answer: str) -> float:
    """1 for the word itself, and a little for an odd number of letters, so that random replies differ."""
    return float(said == answer) + 0.1 * (len(said) % 2)
'''
EXPERIMENT = """
workflow: echo_workflow.yaml
mapping: {models: {policy: {roles: rest}}}
base:
  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64,
    tie_word_embeddings: true}
  tokenizer: {wordpiece: {files: [words.jsonl], whole_words: true}}
data: {train: tasks.jsonl, eval: held_out.jsonl}
warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}
algorithm: {use: grpo, samples: 4, updates_per_step: 2}
train: {steps: 4, tasks_per_step: 3, seed: 0, save_every: 1, keep: 8, optimizer: {lr: 1.0e-2}}
eval: {samples: 1}
"""


def _lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


Changes = tuple[tuple[str, str], ...]


def write_toy(root: Path, *changes: tuple[str, str], workflow: Changes = ()) -> Path:
    """Write the toy project; `changes` replace (old, new) texts of its experiment, whose path it gives."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "workflows").mkdir(exist_ok=True)
    texts = {"echo_workflow.yaml": WORKFLOW, "toy.yaml": EXPERIMENT, "echo.py": REWARD}
    for name, pairs in (("toy.yaml", changes), ("echo_workflow.yaml", workflow)):
        for old, new in pairs:
            assert old in texts[name], old
            texts[name] = texts[name].replace(old, new)
    for name, text in texts.items():
        (root / name).write_text(text, encoding="utf-8")
    tasks: list[dict[str, object]] = [{"word": word, "answer": word} for word in WORDS]
    _lines(root / "tasks.jsonl", tasks[:5])
    _lines(root / "held_out.jsonl", tasks[5:])
    _lines(root / "words.jsonl", [{"text": " ".join(["say", "hear", *WORDS])}])
    turns = [[{"node": "call", "reply": w}, {"node": "echo", "reply": w}] for w in WORDS[:5]]
    _lines(root / "demos.jsonl", [{"task": tasks[i], "turns": turns[i]} for i in range(5)])
    return root / "toy.yaml"


@pytest.fixture(scope="session")
def toy_at() -> Callable[..., Path]:
    """`toy_at(root, *changes, workflow=…)` writes the toy project into a folder."""
    return write_toy


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Path]:
    """`toy(*changes, workflow=…)` writes the toy project into this test's folder and gives its experiment."""
    return partial(write_toy, tmp_path / "toy")


@dataclass
class Says:
    """What the chat server answers to one request."""

    text: str | None = "yes"
    finish: str | None = "stop"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: Any = None
    """The body's `error` instead of a reply."""
    raw: bytes | None = None
    """The whole body instead."""
    after_s: float = 0.0
    drop: bool = False
    """Break the connection in the middle of the body."""
    usage: bool = True


class ChatServer(ThreadingHTTPServer):
    """A real server on this machine that speaks OpenAI's protocol and misbehaves as it is told."""

    daemon_threads = True
    request_queue_size = 128
    protocol_version = "HTTP/1.1"

    def __init__(self, port: int = 0) -> None:
        self.script: list[Says] = []
        """Answers of the next requests; when it is empty, `reply` makes them."""
        self.reply: Callable[[dict[str, Any]], Says] = lambda body: Says()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        self.released = threading.Event()
        super().__init__(("127.0.0.1", port), _ChatHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def take(self, path: str, key: str | None, body: dict[str, Any]) -> Says:
        with self._lock:
            self.paths.append(path)
            self.keys.append(key)
            self.bodies.append(body)
            self.times.append(time.monotonic())
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return self.script.pop(0) if self.script else self.reply(body)

    def done(self) -> None:
        with self._lock:
            self._now -= 1

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


class _ChatHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        says = self.server.take(self.path, self.headers.get("Authorization"), body)
        try:
            if says.after_s:
                self.server.released.wait(says.after_s)
            self._answer(says, _answer_body(says, body))
        except OSError:
            self.close_connection = True  # the client went away
        finally:
            self.server.done()

    def _answer(self, says: Says, data: bytes) -> None:
        self.send_response(says.status)
        for name, value in says.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if says.drop:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _answer_body(says: Says, body: dict[str, Any]) -> bytes:
    if says.raw is not None:
        return says.raw
    if says.error is not None:
        return json.dumps({"error": says.error}).encode()
    words = sum(len(m["content"].split()) for m in body["messages"])
    said = len((says.text or "").split())
    message = {"role": "assistant", "content": says.text}
    answer: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": says.finish}],
    }
    if says.usage:
        answer["usage"] = {
            "prompt_tokens": words,
            "completion_tokens": said,
            "total_tokens": words + said,
        }
    return json.dumps(answer).encode()


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    """A real OpenAI-compatible server; `says(…)` on it makes answers for its `script`."""
    server = ChatServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def says() -> type[Says]:
    """Makes one answer of the chat server."""
    return Says


# -- what a clone lacks ---------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
BEYOND = re.compile(r"(?:\$\{MASFLOW_DATA\}|\bmodels|\bdata)/[\w.-]+(?:/[\w.-]+)*")
"""Paths in a shipped document of what no repository holds: shared data, a converted model, made data."""


def missing_parts(document: Path) -> list[str]:
    """What this shipped document (or its workflow) names that isn't on this machine; `make test` tries to
    make models and data."""
    text = document.read_text(encoding="utf-8")
    for name in re.findall(r"workflows/[\w/]+\.yaml", text):
        text += (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*$|\s#.*$", "", text, flags=re.MULTILINE)
    data = os.environ.get("MASFLOW_DATA") or str(ROOT.parent / "shared" / "data")
    named = {name.replace("${MASFLOW_DATA}", data) for name in BEYOND.findall(text)}
    return sorted(name for name in named if not (ROOT / name).exists())


@pytest.fixture(scope="session")
def absent() -> Callable[[Path], list[str]]:
    """`absent(document)`: what a shipped document needs and this machine lacks; empty when it can run."""
    return missing_parts


@pytest.fixture(scope="session")
def needs() -> Callable[[Path], None]:
    """`needs(document)` skips the test, with the reason, where this machine lacks what a document names."""

    def check(document: Path) -> None:
        if missing := missing_parts(document):
            pytest.skip(f"{document.name} needs {', '.join(missing)}")

    return check


# -- what is kept between runs --------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes that tests make stay out of the user's cache, in processes that tests start, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
