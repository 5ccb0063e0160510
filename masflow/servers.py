"""What asking any server over HTTP shares: which failures pass, pauses that it asks for, what its errors say,
how often it may be asked, and keys that stand in the environment only.

Sends nothing itself: engines ask model servers, tools ask retrievers.
"""

from __future__ import annotations

import email.utils
import json
import os
import re
import time
from collections import deque
from collections.abc import Mapping

import httpx

from masflow.errors import RunError

__all__ = ["GROWN_PAUSE_S", "LONGEST_PAUSE_S", "PASSING", "SPENT", "Pace", "is_local", "key_from", "one_line"]
__all__ += ["retry_after", "said"]

LONGEST_PAUSE_S = 600.0
"""A server that asks for a longer one is given up."""
GROWN_PAUSE_S = 60.0
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses after which the same request may succeed."""
SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Codes of a 429 that no waiting mends."""
_LOCAL = re.compile(r"localhost|127(\.\d+){3}|\[?::1\]?|0\.0\.0\.0")


class Pace:
    """At most so many tries a window of time, none before a pause is over."""

    def __init__(self, per_minute: int | None, minute_s: float = 60.0):
        self._limit, self._minute_s = per_minute, minute_s
        self._started: deque[float] = deque()
        self._not_before = 0.0

    def wait_s(self) -> float:
        """0 where a try may start, which counts then; else how long to wait before asking again."""
        now = time.monotonic()
        while self._started and self._started[0] <= now - self._minute_s:
            self._started.popleft()
        wait = self._not_before - now
        if self._limit is not None and len(self._started) >= self._limit:
            wait = max(wait, self._started[-self._limit] + self._minute_s - now)
        if wait > 0:
            return wait
        self._started.append(now)
        return 0.0

    def pause(self, seconds: float) -> None:
        """No try starts before so many seconds have passed."""
        self._not_before = max(self._not_before, time.monotonic() + seconds)


def is_local(url: str) -> bool:
    """Whether the server is on this machine: no proxy stands between, and no key leaves it."""
    return _LOCAL.fullmatch(httpx.URL(url).host) is not None


def key_from(name: str, url: str, *, is_needed: bool = True) -> str | None:
    """The key that an environment variable holds; None where it isn't set and needn't be.

    Raises:
        RunError: the variable isn't set, or what it holds can't be a key. The message never shows it.
    """
    key = os.environ.get(name, "").strip()
    if not key:
        if is_needed:
            message = f"the environment variable {name} holds the key of {url}, and it isn't set"
            raise RunError(message, f"export {name}=…, or remove 'key_env' if the server needs no key")
        return None
    if not key.isascii() or not key.isprintable() or " " in key:
        message = (
            f"what the environment variable {name} holds can't be a key: it has blanks or odd characters"
        )
        raise RunError(message, f"set {name} again")
    return key


def said(text: str) -> tuple[str, str]:
    """(code, words) of an error's body: OpenAI's `error: {message, code, type}`, or what others write."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return "", text
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return "", str(error)
    code = str(error.get("code") or error.get("type") or "")
    return code, str(error.get("message") or error.get("detail") or text)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks for; it may name them, or a time of day."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def one_line(text: str, max_chars: int = 400) -> str:
    """A server's words for a message, shortened."""
    text = " ".join(text.split())
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
