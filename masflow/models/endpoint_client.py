"""Talks to an OpenAI-compatible server: limits, retries, pauses, and a key that nothing repeats.

Sends JSON bodies and tells what became of each. Knows neither requests nor replies of an engine.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

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
from masflow.spec.mapping import Endpoint

__all__ = ["Answered", "Client", "Lost", "Refused", "find_key"]

T = TypeVar("T")

DEFAULT_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Answered(Generic[T]):
    """The server answered, and the answer could be read."""

    value: T


@dataclass(frozen=True)
class Refused:
    """The server will not answer this request, however often it is asked."""

    status: int
    code: str
    words: str


@dataclass(frozen=True)
class Lost:
    """No answer after all tries. `is_alone`: others were answered meanwhile, so the server is there."""

    words: str
    is_alone: bool


class Client:
    """One server: at most `max_concurrent` requests in flight and `per_minute` tries a minute."""

    def __init__(self, endpoint: Endpoint, *, pause_s: float = 0.5, minute_s: float = 60.0):
        """Look the key up; nothing is sent yet.

        Args:
            pause_s: before the first retry; each further one doubles it.
            minute_s: the length of the window that `per_minute` counts in.
        Raises:
            RunError: `key_env` names a variable that isn't set, or holds no key.
        """
        self.endpoint = endpoint
        self.url = endpoint.url.rstrip("/") + "/chat/completions"
        self._key = find_key(endpoint)
        self._pause_s, self._pace = pause_s, Pace(endpoint.per_minute, minute_s)
        self._jitter = random.Random(self.url)
        self._slots: asyncio.Semaphore | None = None
        self._http: httpx.AsyncClient | None = None
        self.num_tries = self.num_answers = 0

    async def ask(self, body: dict[str, Any], read: Callable[[Any], T]) -> Answered[T] | Refused | Lost:
        """Send a body until it is answered, refused, or given up.

        Args:
            read: makes the value of an answer's JSON; raises ValueError for one that isn't an answer.
        """
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.endpoint.max_concurrent)
        async with self._slots:
            before, words = self.num_answers, ""
            for attempt in range(self.endpoint.retries + 1):
                await self._turn()
                found = await self._try(body, read)
                if not isinstance(found, _Passing):
                    self.num_answers += 1
                    return found
                words = found.words
                if found.pause_s is not None and found.pause_s > LONGEST_PAUSE_S:
                    words += f"; it asks for a pause of {found.pause_s:.0f} s"
                    break
                if attempt < self.endpoint.retries:
                    await self._rest(attempt, found.pause_s)
            return Lost(words, self.num_answers > before)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def hide(self, text: str) -> str:
        """The text without the key."""
        return text.replace(self._key, "***") if self._key else text

    def holds_secret(self) -> bool:
        """True when the key is long enough to be one (servers of one's own take any word)."""
        return self._key is not None and len(self._key) >= 16

    # -- parts ------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Wait until a try may start: no pause that the server asked for, room in this minute."""
        while (wait := self._pace.wait_s()) > 0:
            await asyncio.sleep(wait)
        self.num_tries += 1

    async def _rest(self, attempt: int, asked_s: float | None) -> None:
        """Pause before the next try: what the server asked for (all requests wait), else a growing one."""
        grown = min(GROWN_PAUSE_S, self._pause_s * 2**attempt) * self._jitter.uniform(0.5, 1.0)
        if asked_s is not None:
            self._pace.pause(asked_s)
            return
        await asyncio.sleep(grown)

    async def _try(self, body: dict[str, Any], read: Callable[[Any], T]) -> Answered[T] | Refused | _Passing:
        # Shielded: a connection that is cancelled while it is made leaves parts of itself behind.
        sent = asyncio.ensure_future(self._connected().post(self.url, json=body))
        sent.add_done_callback(_heard)
        try:
            async with asyncio.timeout(self.endpoint.timeout_s):
                answer = await asyncio.shield(sent)
        except (TimeoutError, httpx.TimeoutException):
            sent.cancel()
            return _Passing(f"no answer within {self.endpoint.timeout_s:g} s")
        except (httpx.TransportError, httpx.DecodingError) as error:
            return _Passing(self.hide(f"{type(error).__name__}: {str(error) or 'the connection broke'}"))
        text = answer.text
        if answer.status_code >= 300:
            code, words = said(text)
            words = self._shown(words or answer.reason_phrase)
            if answer.status_code in PASSING and code not in SPENT:
                return _Passing(f"{answer.status_code}: {words}", retry_after(answer.headers))
            return Refused(answer.status_code, code, words)
        try:
            return Answered(read(json.loads(text)))
        except ValueError as error:
            return _Passing(f"not an answer ({self.hide(str(error))}): {self._shown(text)}")

    def _connected(self) -> httpx.AsyncClient:
        if self._http is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            limits = httpx.Limits(max_connections=self.endpoint.max_concurrent)
            self._http = httpx.AsyncClient(
                headers=headers,
                limits=limits,
                timeout=self.endpoint.timeout_s,
                trust_env=not is_local(self.url),  # no proxy between this machine and itself
                follow_redirects=False,  # a key goes where it was meant to go
            )
        return self._http

    def _shown(self, text: str) -> str:
        return one_line(self.hide(text))


@dataclass(frozen=True)
class _Passing:
    """A try that failed in a way that may pass."""

    words: str
    pause_s: float | None = None


def _heard(sent: asyncio.Task[httpx.Response]) -> None:
    """What became of a request that nobody waits for any more is of no interest."""
    if not sent.cancelled():
        sent.exception()


def find_key(endpoint: Endpoint) -> str | None:
    """The key, from the environment; the usual variable's is kept from plain http to other machines.

    Raises:
        RunError: a named variable isn't set, or what it holds can't be a key. The message never shows it.
    """
    if endpoint.key_env is not None:
        return key_from(endpoint.key_env, endpoint.url)
    is_open = httpx.URL(endpoint.url).scheme == "http" and not is_local(endpoint.url)
    return None if is_open else key_from(DEFAULT_KEY, endpoint.url, is_needed=False)
