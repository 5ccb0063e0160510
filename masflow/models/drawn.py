"""What every engine that draws tokens makes of them: rows, replies, and when a stop string is complete.

One rule for all of them, so that an engine changes no turn. Knows no models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from masflow.models.engine import Reply, Request
from masflow.models.experience import Row
from masflow.models.tokens import ChatTokens, Prompt

__all__ = ["cut", "fits", "is_stopped", "reply_of", "row_of", "too_long"]


def fits(request: Request, prompt: Prompt, context: int) -> bool:
    """Whether prompt and the longest reply have room in the window."""
    return len(prompt.ids) + request.sampling.max_tokens <= context


def too_long(request: Request, prompt: Prompt, context: int, version: int) -> Reply:
    """The reply to a prompt that doesn't fit."""
    asked = f"prompt of {len(prompt.ids)} tokens and max_tokens {request.sampling.max_tokens}"
    detail = f"{asked} exceed the context {context}"
    return Reply(request.turn_id, "", "prompt_too_long", len(prompt.ids), version=version, detail=detail)


def row_of(
    request: Request,
    prompt: Prompt,
    ids: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    tokens: ChatTokens,
) -> Row:
    """The row of a reply that was drawn. Args: ids: of the reply, with what ended it."""
    return Row(
        request.turn_id,
        request.policy,
        prompt.ids,
        tuple(ids),
        tuple(logprobs),
        version,
        prompt.text,
        cut(tokens.decode(ids), request.sampling.stop),
        request.sampling.temperature,
        request.parent,
        prompt.prefix,
        prompt.forked,
    )


def reply_of(row: Row, finish: str) -> Reply:
    """What the player hears of a row. Args: finish: `stop` or `length`."""
    size = len(row.prompt_ids), len(row.reply_ids)
    return Reply(row.turn_id, row.text, finish, *size, math.fsum(row.logprobs), row.version)


def is_stopped(ids: Sequence[int], stops: tuple[str, ...], tokens: ChatTokens) -> bool:
    """Whether the last token completes a stop string; looks at that token alone, then at the tail, for a
    token is at least a byte."""
    if not any(tokens.may_end(ids[-1], stop) for stop in stops):
        return False
    window = 4 * max(map(len, stops)) + 8
    tail = tokens.decode(ids[-window:])
    return any(s in tail for s in stops) and any(s in tokens.decode(ids) for s in stops)


def cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    found = [text.find(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text
