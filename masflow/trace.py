"""Turns, trajectories and their outcomes: what an episode leaves behind.

Knows neither models nor training; the database is in `masflow.runtime.tracedb`. Messages between
parts are the frozen classes here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

DEFAULT_POLICY: dict[str, str] = {
    "ok": "train",
    "malformed": "train",
    "truncated": "train",
    "limit": "train",
    "prompt_too_long": "train",
    "cancelled": "mask",
    "tool_error": "drop_episode",
    "timeout": "drop_episode",
    "engine_error": "drop_episode",
    "paused": "drop_episode",
}
"""The outcomes of turns and episodes, and what training does with each."""


class Step(NamedTuple):
    """One segment of a path: a node's visit, down to the attempt of a model call.

    `call` is the qualified name of the sub-workflow call that holds it ("" at the top); `item` is an index,
    a key, or None.
    """

    call: str
    node: str
    visit: int
    item: int | str | None = None
    model_call: int = 0
    attempt: int = 0


Path = tuple[Step, ...]
"""Sub-workflow calls from the outside in, the turn's own segment last."""


_KINDS = frozenset(((int, type(None)), (int, int), (int, str)))
_text = json.encoder.encode_basestring_ascii  # type: ignore[attr-defined]
_compact = json.JSONEncoder(separators=(",", ":"), default=str).encode


@lru_cache(maxsize=65536)
def path_json(path: Path) -> str:
    """Canonical JSON `[[call, node, visit, item, model_call, attempt], …]`."""
    return f"[{','.join([_step_json(step) for step in path])}]"


def _step_json(step: Step) -> str:
    call, node, visit, item, model_call, attempt = step
    if (type(visit), type(item)) not in _KINDS:
        return _compact(step)
    key = "null" if item is None else _text(item) if isinstance(item, str) else item
    return f"[{_text(call)},{_text(node)},{visit},{key},{model_call},{attempt}]"


@lru_cache(maxsize=65536)
def visit_path(prefix: Path, call: str, node: str, visit: int) -> Path:
    """The path of a whole visit; episodes share it."""
    return (*prefix, Step(call, node, visit))


MAX_KEY = 120
"""Characters of a key that a path holds; a key may be whatever a model wrote."""


def short_key(key: int | str) -> int | str:
    """A key as paths hold it: a long text as its beginning and its hash."""
    if not isinstance(key, str) or len(key) <= MAX_KEY:
        return key
    return f"{key[: MAX_KEY - 20]}…{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def path_from_json(text: str) -> Path:
    return tuple(Step(*step) for step in json.loads(text))


@dataclass(frozen=True)
class EpisodeKey:
    """What makes an episode this one; with a path it gives the seed and the id of a turn."""

    run_seed: int
    split: str
    step: int
    slot: int
    """Place of the task in the step's batch."""
    task_id: str
    sample: int
    fork: tuple[Any, ...] = ()
    """(node path, sibling, continuation); empty in base episodes."""

    def seed(self, path: Path) -> int:
        """Seed of a turn: 63 bits of SHA-256 over the key and the path."""
        return _hash63(_beginnings(self)[0], path)

    def turn_id(self, path: Path) -> str:
        return f"{_hash63(_beginnings(self)[1], path):016x}"

    @property
    def episode_id(self) -> str:
        return self.turn_id(())


@lru_cache(maxsize=4096)
def _beginnings(key: EpisodeKey) -> tuple[str, str]:
    """What is hashed of an episode before the path, for seeds and for ids: the beginning of a JSON list."""
    place = [key.split, key.step, key.slot]
    own = [key.sample, list(key.fork)]
    return _compact([key.run_seed, *place, key.task_id, *own])[:-1], _compact([*place, *own])[:-1]


def _hash63(beginning: str, path: Path) -> int:
    text = f"{beginning},{_text(path_json(path))}]"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


Record = TypeVar("Record")


def changed(record: Record, /, **fields: Any) -> Record:
    """The frozen record with some other fields: `dataclasses.replace` at a tenth of its cost. For classes
    without `__post_init__` and slots."""
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **fields)
    return new


def made(kind: type[Record], /, **fields: Any) -> Record:
    """A frozen record of all its fields, at a third of its constructor's cost. For the same classes."""
    new = object.__new__(kind)
    new.__dict__.update(fields)
    return new


@dataclass(frozen=True)
class Message:
    """One chat message. `role` is system, user, assistant or tool."""

    role: str
    content: str
    turn_id: str | None = None
    """Of an assistant message: the turn that sampled it, whose exact ids continue the conversation."""
    tools: str = ""
    """Of a conversation's first message: a JSON list of the schemas of the tools that the chat template
    describes; empty where the messages themselves do."""


@dataclass(frozen=True)
class Turn:
    """One model call. Made by the player from an engine's reply; scored and trained on later."""

    id: str
    path: Path
    node: str
    """Qualified by its sub-workflow calls' nodes: `research/ask`."""
    role: str
    """Qualified role, without member: `debater`."""
    member: str
    """The mappable name that spoke: `debater_0`; equal to `role` for a plain one."""
    policy: str
    superstep: int
    messages: tuple[Message, ...]
    text: str
    value: Any
    """The parsed reply; None when malformed."""
    ok: bool
    """Well-formed."""
    outcome: str
    last: bool = True
    """False for a malformed attempt that was asked again, or a ReAct call before the last."""
    detail: str = ""
    """Why it is malformed, or what failed."""
    parent: str | None = None
    """The turn whose row this one continues (conversations)."""
    temperature: float = 1.0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    logprob: float = 0.0
    """Sum over the reply's tokens, of the distribution sampled from, in nats."""
    version: int = 0
    """Of the policy that sampled it."""
    demonstrated: bool = True
    """In a replayed demonstration: False when it carries `train: false`."""

    @property
    def step(self) -> Step:
        return self.path[-1]

    @property
    def visit(self) -> int:
        return self.path[-1].visit


@dataclass(frozen=True)
class Effect:
    """A recorded result of a tool, call or human node: what replay gives back instead of running it."""

    path: Path
    kind: Literal["tool", "call", "human"]
    value: Any
    error: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    duration_s: float = field(default=0.0, compare=False)
    superstep: int = 0
    """Of the latest turn before it; known in a trajectory."""


@dataclass(frozen=True)
class Moment:
    """The names that a reward's templates see at one place of the episode (after that node's visit ended)."""

    node: str
    path: Path
    superstep: int
    names: dict[str, Any]
    """As `result`, task fields, node names, `state`, `params`, `visits`, `ok`, `raw`, …"""


@dataclass(frozen=True)
class Recalled:
    """What one turn was reminded of. Made as its role is asked; eaten by the trace and the evolve stage."""

    store: str
    situation: str
    """Its prompt without memory."""
    records: tuple[int, ...] = ()
    """Ids of the store's records, the most similar first."""


@dataclass(frozen=True)
class Trajectory:
    """One finished (or paused) episode."""

    key: EpisodeKey
    task: dict[str, Any]
    turns: tuple[Turn, ...]
    """Sorted by superstep, then path."""
    effects: tuple[Effect, ...]
    """In the order in which they happened."""
    outcome: str
    detail: str
    output: dict[str, Any]
    names: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Names at the end, for trajectory rewards."""
    moments: tuple[Moment, ...] = field(default=(), repr=False, compare=False)
    """Per visit of a node that a reward looks at."""
    predecessors: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Turn id → ids of the turns immediately before it in happened-before order."""
    recalled: dict[str, Recalled] = field(default_factory=dict, repr=False, compare=False)
    """Turn id → what it was reminded of, of roles with a memory."""

    @property
    def id(self) -> str:
        return self.key.episode_id


@dataclass(frozen=True)
class Scored:
    """A trajectory with its rewards. `components[turn id][reward name]` is unweighted; None is unscored."""

    trajectory: Trajectory
    components: dict[str, dict[str, float | None]]
    totals: dict[str, float | None]
    """Turn id → weighted sum (after credit); None when a component is null."""
    metrics: dict[str, float | None]
    """Reward name → its value for the trajectory (mean over the turns paid at turn level)."""
    failures: tuple[str, ...] = ()
    """Reward functions that raised or ran out of time, with the reason."""
    undiscounted: dict[str, float | None] = field(default_factory=dict)
    """Turn id → its return without discounts, with `return_to_go` and a discount other than 1."""
