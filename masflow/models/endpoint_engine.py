"""The engine of frozen roles that a server plays: requests in, replies out, no tokens kept.

Any server that answers `/chat/completions` as OpenAI's does. Implements `RolloutEngine`; knows no policies.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from masflow.errors import RunError
from masflow.models.drawn import cut
from masflow.models.endpoint_client import Answered, Client, Lost, Refused
from masflow.models.engine import Reply, Request
from masflow.spec.mapping import Endpoint
from masflow.trace import Message

__all__ = ["EndpointEngine"]

TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|maximum (model|input|prompt|context) length|max_model_len"
    r"|prompt is too long|input is too long|too many (input )?tokens|reduce the length",
    re.IGNORECASE,
)
FILTERED = re.compile(r"content[ _-]?filter|content management policy|responsible ?ai", re.IGNORECASE)
ENDS = {"stop": "stop", "eos": "stop", "end_turn": "stop", "stop_sequence": "stop", "length": "length"}
"""A server's finish reason → ours; others are errors of the episode."""
OTHER_NAME = "max_completion_tokens"
"""What some models want `max_tokens` to be called."""
CHECK_EVERY_S = 0.1
SETTLE_S = 0.02


@dataclass(frozen=True)
class _Said:
    """What stands in an answer."""

    text: str
    finish: str
    prompt_tokens: int
    reply_tokens: int


class EndpointEngine:
    """Draws replies from a server. Tokens are counted as the server counts them; 0 where it doesn't say."""

    repeats = False
    """A server may answer the same request otherwise, seed or not."""

    def __init__(
        self,
        endpoint: Endpoint,
        served: str,
        *,
        check: Callable[[], None] = lambda: None,
        pause_s: float = 0.5,
        minute_s: float = 60.0,
    ):
        """Look the key up; nothing is sent yet.

        Args:
            served: the model's name at the server.
            check: called while replies are waited for; may raise to stop waiting.
            pause_s: before the first retry.
            minute_s: the window of `per_minute`.
        Raises:
            RunError: no key where one is named.
        """
        self.endpoint, self.served = endpoint, served
        self.client = Client(endpoint, pause_s=pause_s, minute_s=minute_s)
        self.counts: Counter[str] = Counter()
        """`replies`, `errors`, `prompt_tokens`, `reply_tokens` so far."""
        self._check = check
        self._limit_name = "max_tokens"
        self._thread: _LoopThread | None = None

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply a request, in order.

        Raises:
            RunError: the server refuses, or none of its tries was answered.
        """
        return self.wait([self.submit(request) for request in requests])

    def submit(self, request: Request) -> Future[Reply]:
        """Send a request; the reply comes when it comes."""
        if self._thread is None:
            self._thread = _LoopThread()
        return self._thread.start(self._answer(request))

    def wait(self, futures: Sequence[Future[Reply]]) -> list[Reply]:
        """The replies, in order; when one fails, or a stop is asked for, the others are cancelled.

        Raises:
            RunError: as `generate`.
        """
        try:
            return [self._result(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Let go of connections; what is still waited for is cancelled."""
        if self._thread is not None:
            self._thread.close(self.client.close())
            self._thread = None

    # -- parts ------------------------------------------------------------------------------------

    def _result(self, future: Future[Reply]) -> Reply:
        while True:
            with suppress(NotYet):
                return future.result(timeout=CHECK_EVERY_S)
            if not future.done():
                self._check()

    async def _answer(self, request: Request) -> Reply:
        limit_name = self._limit_name
        found = await self.client.ask(self.body(request), _read)
        if isinstance(found, Refused) and limit_name != OTHER_NAME and OTHER_NAME in found.words:
            self._limit_name = OTHER_NAME
            found = await self.client.ask(self.body(request), _read)
        reply = self._reply(request, found)
        self.counts["replies"] += 1
        self.counts["errors"] += reply.finish == "error"
        self.counts["prompt_tokens"] += reply.prompt_tokens
        self.counts["reply_tokens"] += reply.reply_tokens
        return reply

    def body(self, request: Request) -> dict[str, Any]:
        """What is sent for a request; an option that is null leaves a field out."""
        how = request.sampling
        fields: dict[str, Any] = {
            "model": self.served,
            "messages": [_chat(message) for message in request.messages],
            "temperature": how.temperature,
            self._limit_name: how.max_tokens,
            "seed": request.seed & 0x7FFFFFFF,
        }
        if how.top_p < 1:
            fields["top_p"] = how.top_p
        if how.top_k:
            fields["top_k"] = how.top_k
        if how.stop:
            fields["stop"] = list(how.stop)
        fields |= self.endpoint.options
        return {name: value for name, value in fields.items() if value is not None}

    def _reply(self, request: Request, found: Answered[_Said] | Refused | Lost) -> Reply:
        """Raises RunError for what concerns not one request but the server."""
        turn = request.turn_id
        if isinstance(found, Answered):
            said = found.value
            finish = ENDS.get(said.finish, "error")
            text = self.client.hide(said.text) if self.client.holds_secret() else said.text
            detail = "" if finish != "error" else f"the server ended the reply with '{said.finish}'"
            text = cut(text, request.sampling.stop) if finish != "error" else ""
            return Reply(turn, text, finish, said.prompt_tokens, said.reply_tokens, detail=detail)
        if isinstance(found, Refused):
            told = f"{found.code} {found.words}"
            if found.status in (400, 413, 422) and TOO_LONG.search(told):
                return Reply(turn, "", "prompt_too_long", detail=found.words)
            if found.status in (400, 403) and FILTERED.search(told):
                return Reply(turn, "", "error", detail=f"the server's content filter: {found.words}")
            raise RunError(f"{self._server()} refuses ({found.status}): {found.words}", _mend(found.status))
        tries = self.endpoint.retries + 1
        if found.is_alone:
            return Reply(turn, "", "error", detail=f"no answer after {tries} tries; {found.words}")
        message = f"{self._server()} doesn't answer; the last of {tries} tries: {found.words}"
        raise RunError(message, "see that the server runs and its 'url' is right, then go on with --resume")

    def _server(self) -> str:
        return f"model '{self.served}' at {self.endpoint.url}"


class _LoopThread:
    """An event loop in a thread of its own: waiting callers stay free to look whether to stop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Reply]) -> Future[Reply]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        async def end() -> None:
            await asyncio.sleep(SETTLE_S)  # what has just begun to connect is past its beginning
            mine = asyncio.current_task()
            others = [task for task in asyncio.all_tasks() if task is not mine]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


def _chat(message: Message) -> dict[str, str]:
    """A tool's result goes as a user's message: calls are plain text here, without the ids that servers
    want."""
    return {"role": "user" if message.role == "tool" else message.role, "content": message.content}


def _read(data: Any) -> _Said:
    """Raises ValueError where the JSON isn't a chat completion."""
    try:
        choice = data["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        content = message.get("content")
        text = message.get("refusal") or "" if content is None else content
        usage = data.get("usage") or {}
        counts = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no choices[0].message: {type(error).__name__}") from error
    if not isinstance(text, str):
        raise ValueError(f"the reply's content is {type(text).__name__}, not text")
    return _Said(text, "stop" if finish is None else str(finish), counts[0], counts[1])


def _mend(status: int) -> str:
    if status in (401, 403):
        return "set the key in the environment variable that 'key_env' names (default OPENAI_API_KEY)"
    if status == 404:
        return "correct 'url' (up to and with /v1) or 'model'"
    return "correct the endpoint's 'options', 'model' or the role's sampling"
