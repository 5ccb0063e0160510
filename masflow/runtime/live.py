"""Where an episode stands: plays of graphs, threads, visits and items, all worked out again from an
EpisodeState.

Holds data and the lookups that every step of the player needs; the steps themselves are in `walk`, `items`,
`turns` and `effects`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import ref

from masflow.compiler.expressions import TemplateProblem, condition, evaluate, render, value
from masflow.compiler.graph import START, Graph, Node
from masflow.compiler.plan import Plan
from masflow.errors import EpisodeError
from masflow.models.engine import Request, SamplingParams
from masflow.runtime.board import Board, Clock
from masflow.runtime.state import BEHIND
from masflow.trace import Message, Moment, Path, Recalled, Step, Turn

if TYPE_CHECKING:
    from masflow.memory.recall import Snapshot
    from masflow.runtime.program import Program
    from masflow.runtime.react import ToolCall
    from masflow.runtime.state import EpisodeState
    from masflow.runtime.straight import Straight
    from masflow.tools import ToolBox
    from masflow.tools.beside import Begun

Stop = tuple[str, str]
"""Outcome and detail of what ended a thread."""
CHANCE = re.compile(r"\b(shuffle|random|take)\b")


class GraphInfo:
    """A graph with the lookups that playing needs, made once a player."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.roles = {role.name: role for role in graph.roles}
        self.tools = {tool.name: tool for tool in graph.tools}
        self.agents = {node.name: node for node in graph.nodes if graph.program and node.kind == "workflow"}
        """Workflows that a function runs and that its roles may call like tools."""
        self.fields = {f.name: f for f in graph.state}
        self.hidden = frozenset(f.name for f in graph.task if f.hidden)
        self.sampling: dict[str, SamplingParams] = {}
        """By role, filled as roles speak."""
        self.recorded = recorded_nodes(graph)
        roles = {name for name, role in self.roles.items() if CHANCE.search(repr(role))}
        self.single = {
            node.name
            for node in graph.nodes
            if node.kind != "role" and node.when is None and node.foreach is None and not node.in_order
        }
        """Nodes whose visits are one execution, whatever the episode holds."""
        self.calls_follow = _calls_follow(graph)
        self.chance = {
            n.name for n in graph.nodes if CHANCE.search(repr(n)) or n.role in roles or (roles and n.among)
        }


def _calls_follow(graph: Graph) -> bool:
    """Whether functions are called in a row, without a model in between: over items, or one after another."""
    calls = {node.name: node for node in graph.nodes if node.kind in ("call", "tool")}
    quiet = {node.name: node for node in graph.nodes if node.kind == "set"} | calls
    for call in calls.values():
        seen: set[str] = set()
        ahead = [call]
        while ahead:
            for name in {target for arrow in ahead.pop().arrows for target in arrow.targets} - seen:
                seen.add(name)
                ahead += [quiet[name]] if name in quiet else []
        if call.foreach is not None or seen & calls.keys():
            return True
    return False


def recorded_nodes(graph: Graph) -> frozenset[str]:
    """Nodes whose names a reward reads: the measured ones, and those whose turns are paid by a template
    (for turns inside a sub-workflow: the node that calls it)."""
    found: set[str] = set()
    calls = {node.name for node in graph.nodes if node.kind == "workflow"}
    spoken = {node.name: {node.role, *node.among} for node in graph.nodes if node.kind == "role"}
    for reward in graph.rewards:
        found |= {name.partition(":")[0] for name in reward.measure_after}
        if reward.level == "turn" and not reward.measure_after and (reward.args or reward.when):
            of_role = {n for n, roles in spoken.items() if not reward.roles or roles & set(reward.roles)}
            named = {name.partition(":")[0] for name in reward.nodes}
            found |= calls | (of_role & named if named else of_role)
    return frozenset(found)


class Slot(NamedTuple):
    """The place of one model call: where its reply is put, and which turn it makes."""

    path: Path
    text: str
    epoch: int
    turn_id: str


@dataclass
class Item:
    """One execution of a node: the only one of a plain visit, or one of a `foreach` or of copies."""

    key: int | str | None
    board: Board
    locals: dict[str, Any] = field(default_factory=dict)
    role: str = ""
    member: str = ""
    attempt: int = 0
    call: int = 0
    messages: tuple[Message, ...] | None = None
    parent: str | None = None
    sub: Play | None = None
    done: bool = False
    value: Any = None
    ok: bool = True
    raw: str | None = None
    stop: Stop | None = None
    path: Path = ()
    slot: Slot | None = None
    """Of the model call that is waited for."""
    waits_for: ToolCall | None = None
    """A tool call whose result is to come."""
    choices: list[Any] | None = None
    """Words of a `choice` that come from an expression."""
    recalled: Recalled | None = None
    """What its role was reminded of."""
    thread: str | None = None
    """Which conversation of its role a function's call speaks in; None: its item's."""


@dataclass
class Visit:
    """One visit of a node under way."""

    node: Node
    number: int
    is_list: bool
    items: list[Item]
    todo: list[tuple[int | str | None, dict[str, Any]]] = field(default_factory=list)
    """Items of an `in_order` loop that haven't begun."""


@dataclass
class Thread:
    """One walker over a graph, up to (not into) `until`."""

    board: Board
    at: str = START
    until: str = "end"
    visit: Visit | None = None
    branches: list[Thread] | None = None
    join: str = "end"
    done: bool = False
    stop: Stop | None = None


_OF_BOARD = {
    "nodes": "values",
    "state": "state",
    "visits": "visits",
    "history": "history",
    "ok": "ok",
    "raw": "raw",
}
"""Names that every template sees → the board's fields."""


class Names(dict[str, Any]):
    """What templates see at one place, while they are there: its own names, else what the board holds, a
    node's value, a field of the task; so that making one costs nothing a node."""

    __slots__ = ("board", "others")

    def __init__(self, own: Mapping[str, Any], board: Board, others: Mapping[str, Any]):
        super().__init__(own)
        self.board, self.others = board, others

    def __missing__(self, key: str) -> Any:
        board, field_ = self.board, _OF_BOARD.get(key)
        if field_ is not None:
            return getattr(board, field_)
        return board.values[key] if key in board.values else self.others[key]

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


@dataclass
class Play:
    """One graph being played: the episode's own, or a sub-workflow's call."""

    info: GraphInfo
    graph_key: str
    prefix: Path
    call: str
    """Qualified name of the call, `a/b`; empty at the top."""
    task: dict[str, Any]
    params: dict[str, Any]
    thread: Thread
    token_limit: int | None
    records: bool
    """Rewards of this graph count, so that moments are kept."""
    straight: Mapping[str, Straight] = field(default_factory=dict)
    """The graph's nodes that are passed straight through."""
    program: Program | None = None
    """Of a workflow that is a function: its coroutines and calls."""
    static: dict[str, Any] = field(default_factory=dict)
    visible: dict[str, Any] = field(default_factory=dict)
    """As `static`, without hidden task fields."""

    def __post_init__(self) -> None:
        shown = {k: v for k, v in self.task.items() if k not in self.info.hidden}
        self.static = {**self.task, "task": self.task, "params": self.params}
        self.visible = {**shown, "task": shown, "params": self.params}

    def qualified(self, name: str) -> str:
        return f"{self.call}/{name}" if self.call else name

    def path(self, node: str, visit: int, item: Item | None = None) -> Path:
        if item is None:
            return (*self.prefix, Step(self.call, node, visit))
        return (*self.prefix, Step(self.call, node, visit, item.key, item.call, item.attempt))

    def seen(self, board: Board, own: Mapping[str, Any], *, full: bool = False) -> Names:
        """As `names`, with some of the place's own, for templates that look up what they need."""
        return Names(own, board, self.static if full else self.visible)

    def names(self, board: Board, *, full: bool = False) -> dict[str, Any]:
        """What templates see; hidden task fields only when `full` (tools, calls, rewards)."""
        others = self.static if full else self.visible
        reserved = {name: getattr(board, of) for name, of in _OF_BOARD.items()}
        return {**others, **board.values, **reserved}


@dataclass(frozen=True)
class Question:
    """What a person is asked while an episode waits."""

    path: Path
    node: str
    text: str
    kind: Literal["human", "approve"] = "human"
    choices: tuple[Any, ...] | None = None
    """Words of a `choice` that come from an expression."""


@dataclass
class Live:
    """Everything derived from a state's records, and the plan and tools that derive it."""

    plan: Plan
    toolbox: ToolBox
    mode: str
    interactive: bool
    whose: ref[EpisodeState]
    """The state that holds this, so that both go at once when nobody needs them."""
    play_of: Callable[..., Play]
    load: Callable[[str], Any]
    root: Play = field(init=False)
    turns: dict[str, Turn] = field(default_factory=dict)
    depends: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Turn id, or key of an effect → ids of the turns that it hangs on directly."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Key of an effect → superstep of the latest turn before it, and how many effects came in between."""
    moments: list[Moment] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    questions: dict[str, Question] = field(default_factory=dict)
    begun: dict[str, Begun] = field(default_factory=dict)
    """Key of an effect → the tool call that will give it, under way on a thread of its own."""
    halted: bool = False
    """The visit that the state is played up to has ended."""
    tool_states: dict[str, tuple[tuple[tuple[str, Any], ...], dict[str, Any]]] = field(default_factory=dict)
    predecessors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    memory: Snapshot | None = None
    """What roles are reminded of."""
    recalled: dict[str, Recalled] = field(default_factory=dict)
    """By turn id."""
    paths: dict[str, str] = field(default_factory=dict)
    """Path of each reply → its turn's id; also of replies that are no turn, such as an engine's failure."""

    @property
    def state(self) -> EpisodeState:
        state = self.whose()
        assert state is not None
        return state

    def demonstrated(self, path_text: str) -> bool:
        script = self.state.script
        return script is None or script.trains(path_text)

    def place(self, key: str, board: Board) -> None:
        """Note when an effect happens, once; the board moves on behind it."""
        if key not in self.places:
            clock = board.clock
            self.depends[key] = clock.last + clock.hidden
            self.places[key] = (clock.superstep, clock.effects)
            board.clock = Clock(clock.superstep, clock.last, clock.hidden, clock.epoch, clock.effects + 1)

    def epoch(self, clock: Clock, path_text: str) -> int:
        """Which of the state's keys the turn at this path belongs to."""
        forks = self.state.forks
        return (
            max([clock.epoch, *(i + 1 for i, path in enumerate(forks) if path == path_text)]) if forks else 0
        )

    def epoch_behind(self, slot: Slot) -> int:
        """Which of the keys whatever follows a turn belongs to."""
        forks = self.state.forks
        if not forks:
            return 0
        return max([slot.epoch, *(i + 1 for i, mark in enumerate(forks) if mark == BEHIND + slot.text)])

    def rng(
        self, play: Play, board: Board, node: str, visit: int, item: Item | None, what: str
    ) -> random.Random | None:
        """Chance for one template: seeded by episode, path and purpose; None where the node's texts need
        none."""
        if node not in play.info.chance:
            return None
        step = Step(play.call, node, visit, item.key if item else None)
        key = self.state.keys[board.clock.epoch]
        return random.Random(f"{key.seed((*play.prefix, step))} {what}")


class Templates:
    """Evaluates a node's templates; a problem ends the episode with outcome `tool_error`, naming the
    place."""

    def __init__(self, where: str, names: Mapping[str, Any], rng: random.Random | None = None):
        self.where, self.names, self.rng = where, names, rng

    def _run(self, what: str, function: Callable[..., Any], raw: Any) -> Any:
        try:
            return function(raw, self.names, self.rng)
        except TemplateProblem as problem:
            raise EpisodeError("tool_error", f"{self.where}.{what}: {problem}") from None

    def evaluate(self, what: str, text: str) -> Any:
        return self._run(what, evaluate, text)

    def condition(self, what: str, text: str) -> bool:
        return self._run(what, condition, text)

    def value(self, what: str, raw: Any) -> Any:
        return self._run(what, value, raw)

    def render(self, what: str, text: str) -> str:
        return self._run(what, render, text)
