"""`http`: search at a pool of servers that give the same answers, with limits, retries, and rests for those
that fail.

The answer to a query is a function of what the servers say; which of them said it leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import ssl
import threading
import time
import weakref
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

from masflow.errors import EpisodeError
from masflow.servers import (
    GROWN_PAUSE_S,
    LONGEST_PAUSE_S,
    PASSING,
    SPENT,
    Pace,
    is_local,
    key_from,
    one_line,
    retry_after,
    said,
)
from masflow.spec.retrieval import QUERY, HttpSettings

__all__ = ["Pool", "make"]

OWN_FAULT = frozenset({400, 413, 414, 422})
"""Statuses that say that the request is wrong; the others below 500 say that the server is."""
NAP_S = 0.25
MAX_DOUBLINGS = 5


def make(settings: dict[str, Any]) -> Pool:
    """The tool `http`.

    Raises:
        RunError: `key_env` names a variable that isn't set, or holds no key.
    """
    return Pool(HttpSettings.model_validate(settings))


@dataclass(frozen=True)
class _Failed:
    """A try without an answer: `is_late` when time was up, `is_ours` when no server will take the request."""

    words: str
    is_late: bool = False
    is_ours: bool = False
    is_passing: bool = True
    pause_s: float | None = None


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes 50 ms; one for all servers."""
    return httpx.create_ssl_context()


class _Server:
    """One of the pool: how often it failed in a row, until when it rests while others are there, and until
    when it asked not to be asked at all."""

    def __init__(self, url: str, settings: HttpSettings, headers: dict[str, str]):
        self.url = url
        self.failures, self.rests_until, self.not_before = 0, 0.0, 0.0
        self.client = httpx.Client(
            headers=headers,
            verify=_tls(),
            limits=httpx.Limits(max_connections=settings.max_concurrent),
            timeout=settings.try_s,
            trust_env=not is_local(url.replace(QUERY, "query")),  # no proxy to this machine itself
            follow_redirects=False,  # a key goes where it was meant to go
        )


class Pool:
    """`pool(query=…)` gives passages as a server ranked them; callable from several threads at once."""

    def __init__(self, settings: HttpSettings, *, pause_s: float = 0.5, minute_s: float = 60.0):
        """
        Args:
            pause_s: before the first try at a server that has failed this query; each further one doubles it.
            minute_s: the length of the window that `per_minute` counts in.
        """
        self.settings = settings
        self._key = key_from(settings.key_env, settings.urls[0]) if settings.key_env else None
        headers = {"Accept-Encoding": "gzip", **settings.headers}
        if self._key is not None:
            is_bearer = settings.key_header.lower() == "authorization"
            headers[settings.key_header] = f"Bearer {self._key}" if is_bearer else self._key
        self.servers = [_Server(url, settings, headers) for url in settings.urls]
        weakref.finalize(self, _close, [server.client for server in self.servers])
        self._pace, self._pause_s = Pace(settings.per_minute, minute_s), pause_s
        self._slots = threading.BoundedSemaphore(settings.max_concurrent)
        self._lock = threading.Lock()
        self._turn = 0

    def __call__(self, query: str) -> dict[str, Any]:
        """`{"text", "passages", "ids", "scores"}`.

        Raises:
            EpisodeError: `timeout` when every try ran out of time, else `tool_error`; each server's words.
        """
        if not isinstance(query, str):
            raise TypeError(f"query must be text, got {query!r}")
        query = query.encode("utf-8", "replace").decode()  # half a character can't be sent
        told: dict[str, _Failed] = {}
        tries = is_late = 0
        while tries <= self.settings.retries:
            server = self._next(told)
            if server is None:
                break
            if server.url in told:
                _rest(self._grown(tries))
            found = self._asked(server, query)
            tries += 1
            if not isinstance(found, _Failed):
                return found
            is_late += found.is_late
            told[server.url] = found
            if found.is_ours:
                break
        raise self._given_up(told, tries, is_late == tries)

    # -- which server, and when -------------------------------------------------------------------

    def _next(self, told: dict[str, _Failed]) -> _Server | None:
        """The next in turn that hasn't failed this query and doesn't rest; else the best of what is left;
        None where asking again is in vain."""
        with self._lock:
            now, count = time.monotonic(), len(self.servers)
            turn = [self.servers[(self._turn + i) % count] for i in range(count)]
            turn = [s for s in turn if s.url not in told or told[s.url].is_passing]
            if not turn:
                return None
            rank = {id(s): i for i, s in enumerate(turn)}
            best = min(turn, key=lambda s: (s.url in told, max(0.0, s.rests_until - now), rank[id(s)]))
            self._turn = self.servers.index(best) + 1
            return best

    def _grown(self, tries: int) -> float:
        grown = min(GROWN_PAUSE_S, self._pause_s * 2 ** max(0, tries - len(self.servers)))
        return grown * random.uniform(0.5, 1.0)

    def _note(self, server: _Server, failed: _Failed | None) -> None:
        with self._lock:
            if failed is None:
                server.failures, server.rests_until = 0, 0.0
            elif not failed.is_ours:
                rest = self.settings.rest_s * 2 ** min(server.failures, MAX_DOUBLINGS)
                server.failures += 1
                now, pause = time.monotonic(), failed.pause_s or 0.0
                server.not_before = max(server.not_before, now + pause)
                server.rests_until = now + max(rest, pause)

    # -- one try ----------------------------------------------------------------------------------

    def _asked(self, server: _Server, query: str) -> dict[str, Any] | _Failed:
        while True:
            with self._lock:
                wait = server.not_before - time.monotonic()
                if wait <= 0:
                    wait = self._pace.wait_s()
            if wait <= 0:
                break
            if wait > LONGEST_PAUSE_S:
                return _Failed(f"asks not to be asked for {wait:.0f} s", is_passing=False)
            _rest(wait)
        with self._slots:
            found = self._try(server, query)
        self._note(server, found if isinstance(found, _Failed) else None)
        return found

    def _try(self, server: _Server, query: str) -> dict[str, Any] | _Failed:
        end = time.monotonic() + self.settings.try_s
        try:
            with server.client.stream(**self._request(server, query)) as answer:
                data = self._read(answer, end)
                if isinstance(data, _Failed):
                    return data
                text = self._hidden(data.decode(answer.encoding or "utf-8", "replace"))
                if answer.status_code != 200:
                    return self._refused(answer, text)
        except httpx.TimeoutException:
            return self._late()
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            return _Failed(self._shown(f"{type(error).__name__}: {str(error) or 'the connection broke'}"))
        try:
            found = self._passages(json.loads(text, parse_constant=_no_number))
            json.dumps(found, ensure_ascii=False).encode()  # a trace can't hold half a character
            return found
        except (ValueError, RecursionError) as error:
            return _Failed(self._shown(f"not an answer ({one_line(str(error), 200)}): {one_line(text, 200)}"))

    def _request(self, server: _Server, query: str) -> dict[str, Any]:
        settings = self.settings
        url = server.url.replace(QUERY, quote(query, safe=""))
        params: dict[str, Any] = dict(settings.params)
        if settings.method == "GET" and not params and url == server.url:
            params = {"query": QUERY}
        request: dict[str, Any] = {"method": settings.method, "url": url}
        if params:
            request["params"] = httpx.URL(url).params.merge(_filled(params, query))
        if settings.method == "POST":
            body = {"query": QUERY} if settings.body is None else settings.body
            request["json"] = _filled(body, query)
        return request

    def _read(self, answer: httpx.Response, end: float) -> bytes | _Failed:
        """The unpacked body; what comes in is looked at as it comes, never more than `max_bytes` are kept."""
        parts, size, most = [], 0, self.settings.max_bytes
        too_long = _Failed(f"the answer is longer than {most} bytes")
        for part in answer.iter_raw():
            size += len(part)
            if size > most:
                return too_long
            if time.monotonic() > end:
                return self._late()
            parts.append(part)
        data, packing = b"".join(parts), answer.headers.get("Content-Encoding", "identity").strip().lower()
        if packing in ("gzip", "deflate"):
            try:
                data = zlib.decompressobj(32 + zlib.MAX_WBITS).decompress(data, most + 1)
            except zlib.error as error:
                return _Failed(f"not {packing}, as it says: {error}")
        elif packing not in ("", "identity"):
            return _Failed(f"packed as '{one_line(packing, 40)}'; asked for was gzip or none")
        return too_long if len(data) > most else data

    def _late(self) -> _Failed:
        return _Failed(f"no answer within {self.settings.try_s:g} s", is_late=True)

    def _refused(self, answer: httpx.Response, text: str) -> _Failed:
        code, words = said(text)
        shown = self._shown(f"{answer.status_code}: {words or answer.reason_phrase}")
        if answer.status_code in PASSING and code not in SPENT:
            return _Failed(shown, pause_s=retry_after(answer.headers))
        return _Failed(shown, is_ours=answer.status_code in OWN_FAULT, is_passing=False)

    # -- what it says -----------------------------------------------------------------------------

    def _passages(self, data: Any) -> dict[str, Any]:
        """Raises ValueError: the answer isn't what the settings say."""
        settings = self.settings
        rows = _at(data, settings.passages, "the answer")
        if not isinstance(rows, list):
            raise ValueError(f"'{settings.passages}' must be a list, got {_kind(rows)}")
        found = [self._passage(row, i) for i, row in enumerate(rows[: settings.top_k])]
        return {
            "text": "\n".join(passage["text"] for passage, _ in found),
            "passages": [passage for passage, _ in found],
            "ids": [passage["id"] for passage, _ in found],
            "scores": [score for _, score in found],
        }

    def _passage(self, row: Any, index: int) -> tuple[dict[str, Any], float | None]:
        settings, whose = self.settings, f"passage {index}"
        text = _at(row, settings.text, whose)
        if not isinstance(text, str):
            raise ValueError(f"'{settings.text}' of {whose} must be text, got {_kind(text)}")
        name = _at(row, settings.id, whose, None) if settings.id else None
        if name is None:
            name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise ValueError(f"'{settings.id}' of {whose} must be text or a whole number, got {_kind(name)}")
        score = _at(row, settings.score, whose, None) if settings.score else None
        if score is not None and (isinstance(score, bool) or not isinstance(score, (int, float))):
            raise ValueError(f"'{settings.score}' of {whose} must be a number, got {_kind(score)}")
        if score is not None and not math.isfinite(score):
            raise ValueError(f"'{settings.score}' of {whose} isn't finite")
        more = {key: _at(row, place, whose, None) for key, place in settings.fields.items()}
        return {"id": str(name), "text": text, **more}, None if score is None else float(score)

    # -- failing ----------------------------------------------------------------------------------

    def _given_up(self, told: dict[str, _Failed], tries: int, is_late: bool) -> EpisodeError:
        words = "; ".join(f"{_place(url)}: {failed.words}" for url, failed in told.items())
        count = f"{tries} {'try' if tries == 1 else 'tries'}"
        return EpisodeError("timeout" if is_late else "tool_error", f"http: no answer after {count}: {words}")

    def _shown(self, text: str) -> str:
        return one_line(self._hidden(text))

    def _hidden(self, text: str) -> str:
        """Without the key, which a server may say again in its answer or its complaint."""
        if self._key is None:
            return text
        return text.replace(self._key, "***").replace(json.dumps(self._key)[1:-1], "***")


def _close(clients: list[httpx.Client]) -> None:
    for client in clients:
        client.close()


def _place(url: str) -> str:
    return urlunsplit((*urlsplit(url)[:3], "", ""))


_MUST: Any = object()


def _at(value: Any, place: str, whose: str, default: Any = _MUST) -> Any:
    """What stands at a dotted path. Raises ValueError: nothing does, and there is no default."""
    for name in place.split(".") if place else ():
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif default is not _MUST:
            return default
        else:
            here = ", ".join(list(map(str, value))[:12]) if isinstance(value, dict) else _kind(value)
            raise ValueError(f"{whose} has no '{place}'; there: {here}")
    return value


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "null"}.get(type(value), str(value))


def _filled(value: Any, query: str) -> Any:
    """The value with the query in its places."""
    if isinstance(value, str):
        return value.replace(QUERY, query)
    if isinstance(value, dict):
        return {key: _filled(inner, query) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(inner, query) for inner in value]
    return value


def _no_number(word: str) -> float:
    raise ValueError(f"{word} isn't a number")


def _rest(seconds: float) -> None:
    """Sleep in naps: a call that is given up ends at the next one."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(NAP_S, left))
