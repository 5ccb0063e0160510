"""Settings of the searching tools: `dense` over a corpus of one's own, `http` at servers that search.

Imports nothing heavy. What needs the files themselves is looked at where a workflow is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field

from masflow.spec.base import Fault, JsonValue, Spec

__all__ = ["QUERY", "DenseSettings", "HttpSettings"]

QUERY = "{query}"
"""Where the query goes in a request."""
CREDENTIAL = re.compile(
    r"api[_-]?key|\bkey\Z|authorization|token\Z|password|secret|cookie|x-auth", re.IGNORECASE
)


class DenseSettings(Spec):
    """Search over a fixed corpus of passages by the nearness of their embeddings."""

    corpus: str
    """A `.jsonl` or `.jsonl.gz` file, one passage a line."""
    model: str
    """The embedding model's folder or Hugging Face id."""
    top_k: int = Field(5, ge=1)
    """Passages returned."""
    pooling: Literal["mean", "last", "cls"] = "mean"
    """A text's embedding: the mean of its tokens' last hidden states, the last one, or the first one."""
    normalize: bool = True
    """Unit length, so that scores are cosines."""
    query_prefix: str = ""
    """Stands before each query, as the model was trained: `query: `, an instruction."""
    passage_prefix: str = ""
    max_tokens: int | None = Field(None, ge=1)
    """Of a text with its prefix; what follows is cut. Default: 512, or as many as the model has positions."""
    batch: int = Field(32, ge=1)
    """Passages embedded at once."""
    stored: Literal["float16", "float32"] = "float16"
    """Of the embeddings on disk; scores are computed in float32 or better."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1`, `mps`."""
    text_field: str = "text"
    title_field: str | None = None
    """A field that is embedded together with the text, such as a page's title."""
    id_field: str = "id"

    hints: ClassVar[dict[str, str]] = {
        "max_length": "max_tokens",
        "batch_size": "batch",
        "normalise": "normalize",
        "dtype": "stored",
        "instruction": "query_prefix",
        "embedding_model": "model",
        "base": "model",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        device = data.get("device")
        if isinstance(device, str) and not re.fullmatch(r"cpu|mps|xpu|(cuda|xpu)(:\d+)?", device):
            message = f"'{device}' isn't a device; known: cpu, cuda, cuda:N, mps, xpu"
            yield Fault(message, code="tool-setting", fix="write cpu or cuda", path=("device",))


class HttpSettings(Spec):
    """Search at servers that give the same answers; one that fails rests while others answer."""

    urls: tuple[str, ...]
    """Asked in turn."""
    method: Literal["POST", "GET"] = "POST"
    body: JsonValue | None = None
    """JSON with `{query}` where the query goes; default with POST: `{query: "{query}"}`."""
    params: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Of the URL, with `{query}` where it goes; default with GET: `{query: "{query}"}`."""
    headers: dict[str, str] = Field(default_factory=dict)
    key_env: str | None = None
    """The environment variable that holds the key. The key itself never stands in a document or trace."""
    key_header: str = "Authorization"
    """Takes the key; `Authorization` takes `Bearer KEY`."""
    top_k: int = Field(5, ge=1)
    """Passages kept, in the server's order."""
    passages: str = "passages"
    """Where the answer holds the list: a dotted path such as `result.0`; empty: the answer is the list."""
    text: str = "text"
    """Where a passage holds its text; empty: the passage is the text."""
    id: str | None = "id"
    """Where a passage holds its id; a passage without one gets a hash of its text."""
    score: str | None = "score"
    """Where a passage holds its score; without one it is null."""
    fields: dict[str, str] = Field(default_factory=dict)
    """Further fields of a passage: name → where it holds them."""
    try_s: float = Field(10.0, gt=0)
    """Of one try: of connecting, of any silence, and of the whole answer. `timeout_s` is the tool's own, of a
    call with all its tries."""
    retries: int = Field(3, ge=0)
    """After a broken connection, a time-out, 429, a server error or an answer that can't be read; at another
    server first, then with growing pauses."""
    rest_s: float = Field(10.0, ge=0)
    """How long a server that failed isn't asked while others are there; doubles with each further failure.
    The pause that a server asks for (`Retry-After`) is kept even where there is no other."""
    max_concurrent: int = Field(8, ge=1)
    """Requests in flight of one process, over all servers."""
    per_minute: int | None = Field(None, ge=1)
    """Requests a minute of one process, over all servers; a retry counts."""
    max_bytes: int = Field(8_000_000, ge=1)
    """Of one answer, packed or unpacked."""

    hints: ClassVar[dict[str, str]] = {
        "url": "urls",
        "endpoints": "urls",
        "key": "key_env: NAME_OF_A_VARIABLE",
        "api_key": "key_env: NAME_OF_A_VARIABLE",
        "timeout": "try_s",
        "try_timeout_s": "try_s",
        "max_retries": "retries",
        "ids": "id",
        "scores": "score",
    }

    @classmethod
    def longhand(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("urls"), str):
            return {**data, "urls": [data["urls"]]}
        return data

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        urls = data.get("urls")
        if isinstance(urls, (list, tuple)):
            yield from _url_faults(urls)
        yield from _query_faults(data, urls)
        yield from _secret_faults(data)
        places = [(k, data.get(k)) for k in ("passages", "text", "id", "score")]
        more = data.get("fields")
        places += [(f"fields.{k}", v) for k, v in more.items()] if isinstance(more, dict) else []
        for name, place in places:
            if isinstance(place, str) and place and not all(place.split(".")):
                fix = "write names and places in lists with dots between, e.g. result.0"
                yield Fault(f"'{place}' isn't a path", code="tool-setting", fix=fix, path=(name,))
        for name in ("text", "id"):
            if isinstance(more, dict) and name in more:
                message = f"'{name}' is a field of every passage already"
                yield Fault(message, code="tool-setting", fix=f"set '{name}'", path=("fields", name))


def _url_faults(urls: list[Any] | tuple[Any, ...]) -> Iterator[Fault]:
    """What is wrong with the servers' addresses; a password in one is never repeated."""
    example = "write http://HOST:PORT/PATH"
    if not urls:
        yield Fault("'urls' is empty", code="tool-setting", fix=example, path=("urls",))
    for i, url in enumerate(urls):
        message, fix = "", example
        try:
            parts = urlsplit(str(url).replace(QUERY, "query"))
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            good = good and not re.search(r"\s", str(url))
        except ValueError:
            parts, good = None, False
        if parts is None or not good:
            message = "a URL must begin with http:// or https:// and name a host"
        elif parts.username or parts.password or any(CREDENTIAL.search(k) for k, _ in parse_qsl(parts.query)):
            message = "a URL holds a credential, which never stands in a document"
            fix = "put it into an environment variable and name that in 'key_env'"
        elif parts.fragment:
            message, fix = "a URL's part after '#' is never sent", "remove it"
        elif url in urls[:i]:
            message, fix = f"'{url}' stands there twice", "write it once"
        if message:
            yield Fault(message, code="tool-setting", fix=fix, path=("urls", i))


def _query_faults(data: dict[str, Any], urls: Any) -> Iterator[Fault]:
    body, params = data.get("body"), data.get("params")
    is_get = data.get("method") == "GET"
    if is_get and body is not None:
        message, fix = "a GET request has no body", "write 'params', or 'method: POST'"
        yield Fault(message, code="tool-setting", fix=fix, path=("body",))
    given = params if is_get else body
    if given is not None and not any(QUERY in str(part) for part in (body, params, urls)):
        message = f"nothing in the request takes the query: write {QUERY} where it goes"
        yield Fault(message, code="tool-setting", fix=f'query: "{QUERY}"')


def _secret_faults(data: dict[str, Any]) -> Iterator[Fault]:
    name = data.get("key_env")
    if isinstance(name, str) and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        message = "'key_env' is the name of an environment variable, in capitals, never a key itself"
        fix = "put the key into a variable and write its name, e.g. key_env: SEARCH_KEY"
        yield Fault(message, code="tool-setting", fix=fix, path=("key_env",))
    if name is None and HttpSettings.says(data, "key_header"):
        message = "'key_header' takes the key, and there is none"
        yield Fault(message, code="tool-setting", fix="name its variable in 'key_env'", path=("key_header",))
    for part in ("headers", "params", "body"):
        given = data.get(part)
        for key in given if isinstance(given, dict) else ():
            if CREDENTIAL.search(str(key)):
                message = f"'{key}' looks like a credential, which never stands in a document"
                fix = "put it into an environment variable and name that in 'key_env'"
                yield Fault(message, code="tool-setting", fix=fix, path=(part, key))
    headers = data.get("headers")
    for key, value in headers.items() if isinstance(headers, dict) else ():
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", str(key), re.ASCII) or not str(value).isprintable():
            fix = "write a header's name of letters, digits and -, and a value of one line"
            yield Fault(f"'{key}' isn't a header", code="tool-setting", fix=fix, path=("headers", key))
