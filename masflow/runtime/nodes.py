"""Samples actions at the nodes of base episodes: forks them as they are played, all tasks and forks together.

A fork copies what its base episode has heard and asks the open turn again; turns beside it that both need are
asked once. Where an episode goes on with the best action, it is told by `value` what each earns. Knows no
tensors.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from masflow.compiler.graph import Graph
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models.engine import Reply, Request
from masflow.rl.nodes import Continuation
from masflow.runtime.episodes import Generate, Queue
from masflow.runtime.player import Player
from masflow.runtime.schedule import stable_seed
from masflow.runtime.state import BEHIND, EpisodeState
from masflow.trace import Message, Path, Scored, Trajectory, Turn, path_from_json, path_json

__all__ = ["Drawn", "NodeSampler"]

Value = Callable[[Sequence[Continuation]], list[Scored]]
"""What actions earn by themselves."""
Place = tuple[Path, str, int]
"""A visit: the calls around it, the node, its number."""
COUNTS: tuple[str, ...] = ("base_turns", "contexts", "sibling_turns", "suffix_turns", "reused_turns")
REUSING = ("splice", "fixed_suffix")
"""Credits with which a fork says again what its base episode said."""
UNHEARD = ("error", "prompt_too_long")
"""How a request ends that makes no turn."""


@dataclass
class Drawn:
    """What one step's sampling left. Made by the sampler; eaten by scoring."""

    bases: list[Trajectory]
    continuations: list[Continuation]
    """By task, then context in the order in which they were met, then sibling, then number."""
    counts: dict[str, int]
    """Drawn: `base_turns`, `contexts`, `sibling_turns` (actions beside the base's own), `suffix_turns`; said
    again instead of drawn: `reused_turns`."""


@dataclass(eq=False)
class _Run:
    """One episode being played: a base (`text` empty), or a fork."""

    state: EpisodeState
    task: int
    place: tuple[int, ...]
    """Bases first, then forks in the order in which they were made."""
    text: str = ""
    """Path of its action, as canonical JSON."""
    action: str = ""
    """The action's turn id."""
    sibling: int = 0
    number: int = 0
    trajectory: Trajectory | None = None
    new: list[Request] = field(default_factory=list)
    """What it asked for before its tools were waited for."""
    open: list[_Context] = field(default_factory=list)
    """Of a base that goes on with the best actions: the contexts that it waits at."""


@dataclass
class _Context:
    """One place where actions are drawn."""

    task: int
    text: str
    forks: list[_Run] = field(default_factory=list)
    weight: float = 1.0
    scored: dict[int, Scored] = field(default_factory=dict)
    """Sibling → what it earns, where that decides how the episode goes on."""


class NodeSampler:
    """Plays one base episode a task and draws siblings at its turns."""

    def __init__(self, plan: Plan, player: Player, generate: Generate | Queue, value: Value | None = None):
        """
        Args:
            value: needed with `advance: best`.
        """
        options = plan.sampler.options
        self._value = value if options.get("advance") == "best" else None
        self._plan, self._player, self._generate = plan, player, generate
        self._samples, self._continuations = plan.sampler.samples, int(options.get("continuations", 1))
        self._credit: str = options["credit"]
        self._is_local = self._credit == "local"
        self._max_nodes: int | None = options.get("max_nodes")
        self._is_late = self._max_nodes is not None or self._credit in REUSING
        """Forks begin when their base is over."""
        self._spoken: list[dict[str, tuple[Turn, Reply]]] = []
        """Of each base episode that is over: path → turn and reply, where suffixes use them again."""
        self._same: dict[str, str] = {}
        """Turns that were said again → the base's, whose rows conversations go on from."""
        self._trained = {policy.name for policy in plan.policies if policy.train}
        self._waiting: dict[str, list[_Run]] = {}
        self._known: dict[str, Reply] = {}
        self._contexts: dict[str, _Context] = {}
        """By turn id of the base's own action."""
        self._held: list[_Run] = []
        """Bases that wait for the best action of each open context."""
        self._forks = 0
        self._counts = dict.fromkeys(COUNTS, 0)

    def sample(self, states: Sequence[EpisodeState]) -> Drawn:
        """Play base episodes and their forks to their ends.

        Forks begin in the very batch in which their base asks for the turn, so that one prompt serves them
        all and the suffixes of earlier turns advance beside. With `max_nodes` they begin when it is over.

        Args:
            states: base episodes, one a task, nothing asked yet.
        """
        bases = [_Run(state, task, (task,)) for task, state in enumerate(states)]
        self._play(bases)
        if self._is_late:
            if self._credit in REUSING:
                self._spoken = [_said(base) for base in bases]
            self._play([run for base in bases for run in self._chosen(base)])
        played = [_over(base) for base in bases]
        self._counts["contexts"] = len(self._contexts)
        return Drawn(played, self._ways(played), self._counts)

    # -- playing ----------------------------------------------------------------------------------

    def _play(self, going: Sequence[_Run]) -> None:
        try:
            while True:
                replies = self._answers(self._ask(going))
                if not replies:
                    break
                going = self._deliver(replies)
            if self._waiting:
                raise RunError("episodes wait for replies that nobody was asked for")
        finally:
            if not callable(self._generate):
                self._generate.clear()

    def _answers(self, asked: list[Request]) -> list[Reply]:
        """Of a whole barrier; from a queue those that are there."""
        if callable(self._generate):
            return self._generate(asked) if asked else []
        self._generate.submit(asked)
        return self._generate.collect()

    def _ask(self, going: Sequence[_Run]) -> list[Request]:
        """Let episodes go on; forks stand right behind the base whose turn they share."""
        for run in going:  # tools of all of them run beside each other
            run.new += self._player.advance(run.state, wait=False)
        asked: list[Request] = []
        todo = deque(going)
        while todo or (todo := deque(self._released())):
            run = todo.popleft()
            new = self._advance(run)
            for request in new:
                waiting = self._waiting.setdefault(request.turn_id, [])
                if not waiting:
                    asked.append(request)
                    self._count(run, request)
                waiting.append(run)
            todo.extendleft(reversed(self._siblings(run, new)))
        return asked

    def _count(self, run: _Run, request: Request) -> None:
        kind = "suffix_turns" if run.text else "base_turns"
        self._counts["sibling_turns" if request.turn_id == run.action else kind] += 1

    def _advance(self, run: _Run) -> list[Request]:
        """Requests that are new to this episode and that nothing has answered yet."""
        wanted: list[Request] = []
        while True:
            heard: list[Reply] = []
            new, run.new = [*run.new, *self._player.advance(run.state)], []
            for request in new:
                reply = self._known.get(request.turn_id) or self._reused(run, request)
                heard += [reply] if reply else []
                wanted += [] if reply else [self._continuing(request)]
            if not heard:
                break
            for reply in heard:
                self._player.deliver(run.state, reply)
        if self._player.finished(run.state):
            self._close(run, left=False)
            return []
        if self._is_local and run.text and run.action not in run.state.pending and self._is_left(run):
            self._close(run, left=True)
            return []
        return wanted

    def _continuing(self, request: Request) -> Request:
        """The request, going on from rows that were drawn."""
        same = self._same
        if request.parent not in same:
            return request
        messages = tuple(replace(m, turn_id=same.get(m.turn_id or "", m.turn_id)) for m in request.messages)
        return replace(request, parent=same[request.parent], messages=messages)

    def _reused(self, run: _Run, request: Request) -> Reply | None:
        """What the base episode said at this place of a suffix: with `splice` only to the same prompt."""
        if not (self._spoken and run.text) or request.turn_id == run.action:
            return None
        turn, reply = self._spoken[run.task].get(run.state.pending[request.turn_id], (None, None))
        if turn is None or reply is None or turn.policy != request.policy:
            return None
        if self._credit == "splice" and _prompt(turn.messages) != _prompt(request.messages):
            return None
        self._counts["reused_turns"] += 1
        self._same[request.turn_id] = turn.id
        return replace(reply, turn_id=request.turn_id)

    def _is_left(self, run: _Run) -> bool:
        """Whether the visit that a locally credited action belongs to has its value.

        A graph halts there. A function goes on by itself: it is left where it asks for something else.
        """
        live = run.state.live
        if live is None or live.halted:
            return True
        here = self._place(path_from_json(run.text))
        if self._graph_of(here[0]).program is None:
            return False
        paths = map(path_from_json, run.state.pending.values())
        return not any(
            path[: len(here[0])] == here[0] and _visit(path, len(here[0])) == here for path in paths
        )

    def _place(self, path: Path) -> Place:
        """The visit whose end says what a turn earns by itself: of its own node, or of the node that calls
        the workflow that holds it, where only the caller's rewards count."""
        depth = 0
        while depth < len(path) - 1:
            nodes = {node.name: node for node in self._graph_of(path[:depth]).nodes}
            node = nodes.get(path[depth].node)
            if node is None or node.workflow is None or not node.keep_rewards:
                break
            depth += 1
        return _visit(path, depth)

    def _graph_of(self, prefix: Path) -> Graph:
        """The workflow behind a chain of calls."""
        graph = self._plan.graph
        for step in prefix:
            graph = self._plan.workflows[str(graph.node(step.node).workflow)]
        return graph

    def _close(self, run: _Run, left: bool) -> None:
        """Args: left: it would have gone on, but nobody needs to know how."""
        played = self._player.trajectory(run.state)
        run.trajectory = replace(played, outcome="ok", detail="") if left else played
        if run.text:
            run.state.live = None
            if self._value is not None and not run.sibling:  # its episode may go on without its turn
                key = replace(run.trajectory.key, fork=(run.text, 0, 0))
                run.trajectory = replace(run.trajectory, key=key)
        else:  # it may have gone on in its forks
            run.trajectory = replace(run.trajectory, key=run.state.keys[0])

    def _deliver(self, replies: Sequence[Reply]) -> list[_Run]:
        """Hand replies to all that wait for them; the episodes that can go on, new continuations too."""
        touched: dict[int, _Run] = {}
        new: list[_Run] = []
        heard = [(run, reply) for reply in replies for run in self._waiting.pop(reply.turn_id, ())]
        for run, reply in heard:
            self._known[reply.turn_id] = reply
            if run.trajectory is None:
                self._player.deliver(run.state, reply)
                if not run.open:
                    touched[id(run)] = run
        for run, reply in heard:
            if run.trajectory is None and reply.finish not in UNHEARD:
                new += self._onward(run, reply.turn_id)
        return sorted([*touched.values(), *new], key=lambda run: run.place)

    # -- forks ------------------------------------------------------------------------------------

    def _fork(self, state: EpisodeState, context: _Context, action: str, sibling: int, number: int) -> _Run:
        self._forks += 1
        run = _Run(state, context.task, (context.task, self._forks), context.text, action, sibling, number)
        context.forks.append(run)
        if self._is_local:
            state.until = self._place(path_from_json(context.text))
        return run

    def _siblings(self, run: _Run, requests: Sequence[Request]) -> list[_Run]:
        """The other actions at the turns that a base episode asks for now."""
        if run.text or self._is_late:
            return []
        found = []
        for request in requests:
            if request.policy in self._trained:
                text = run.state.pending[request.turn_id]
                context = self._contexts[request.turn_id] = _Context(run.task, text)
                if self._value is not None:
                    run.open.append(context)
                for sibling in range(1, self._samples):
                    state = run.state.branch(text, (text, sibling, 0))
                    action = state.key.turn_id(path_from_json(text))
                    found.append(self._fork(state, context, action, sibling, 0))
        if run.open:
            self._held.append(run)
        return found

    def _released(self) -> list[_Run]:
        """Bases all of whose contexts are closed, each gone on with the best actions; scored together."""
        ready = [run for run in self._held if not run.state.pending and _are_closed(run.open)]
        if not ready:
            return []
        assert self._value is not None
        self._held = [run for run in self._held if run not in ready]
        places = [(context, fork) for run in ready for context in run.open for fork in context.forks]
        scored = self._value([_way(context, fork) for context, fork in places])
        for (context, fork), one in zip(places, scored, strict=True):
            context.scored[fork.sibling] = one
        for run in ready:
            for context in run.open:
                run.state = self._best(run.state, context)
            run.open = []
        return sorted(ready, key=lambda run: run.place)

    def _best(self, state: EpisodeState, context: _Context) -> EpisodeState:
        """The episode behind the action that earns most; what follows is drawn anew, for what a fork drew
        behind its action has had a part in choosing it."""
        totals = {f.sibling: context.scored[f.sibling].totals.get(f.action) for f in context.forks}
        known = {sibling: total for sibling, total in totals.items() if total is not None}
        best = max(sorted(known), key=known.__getitem__, default=0)
        if best:
            action = next(fork.action for fork in context.forks if fork.sibling == best)
            state = state.branch(context.text, (context.text, best, 0))
            state.replies[context.text] = self._known[action]
        return state.branch(BEHIND + context.text, (context.text, best, 1))

    def _onward(self, run: _Run, turn_id: str) -> list[_Run]:
        """What else is played behind an action that has just been drawn."""
        if not run.text:
            context = self._contexts.get(turn_id)
            if context is None:
                return []
            if self._is_local:
                return [self._fork(_again(run.state), context, turn_id, 0, 0)]
        elif run.action != turn_id or run.number or self._is_local:
            return []
        else:
            context = self._context_of(run)
        return self._further(run.state, context, turn_id, run.sibling)

    def _context_of(self, run: _Run) -> _Context:
        return self._contexts[run.state.keys[0].turn_id(path_from_json(run.text))]

    def _further(self, state: EpisodeState, context: _Context, action: str, sibling: int) -> list[_Run]:
        """Continuations 1, …, M - 1 of an action whose reply is the state's latest."""
        return [
            self._fork(
                state.branch(BEHIND + context.text, (context.text, sibling, number)),
                context, action, sibling, number,
            )
            for number in range(1, self._continuations)
        ]  # fmt: skip

    def _chosen(self, base: _Run) -> list[_Run]:
        """Forks at the turns of a base episode that is over, or at some of them, drawn uniformly."""
        key, played = base.state.key, _over(base)
        turns = [turn for turn in played.turns if turn.policy in self._trained]
        rng = random.Random(stable_seed("nodes", key.run_seed, key.step, key.slot))
        picked = set(rng.sample(range(len(turns)), min(self._max_nodes or len(turns), len(turns))))
        return [
            run
            for turn in (turn for place, turn in enumerate(turns) if place in picked)
            for run in self._late(base, turn, len(turns) / len(picked))
        ]

    def _late(self, base: _Run, turn: Turn, weight: float) -> list[_Run]:
        text = path_json(turn.path)
        context = self._contexts[turn.id] = _Context(base.task, text, weight=weight)
        found = []
        for sibling in range(1, self._samples):
            state = self._player.fork(base.state, turn.id, (text, sibling, 0))
            found.append(self._fork(state, context, state.key.turn_id(turn.path), sibling, 0))
        until = self._player.fork(base.state, turn.id, ())
        until.replies[text] = base.state.replies[text]
        until.keys, until.forks = base.state.keys, base.state.forks
        if self._is_local:
            return [self._fork(until, context, turn.id, 0, 0), *found]
        return [*self._further(until, context, turn.id, 0), *found]

    def _ways(self, bases: Sequence[Trajectory]) -> list[Continuation]:
        """What was drawn at every context, with each base episode among the ways behind its own actions."""
        found: list[Continuation] = []
        for action, context in self._contexts.items():
            ways = [(run.sibling, run.number, _way(context, run)) for run in context.forks]
            base = bases[context.task]
            if not self._is_local and any(turn.id == action for turn in base.turns):
                ways.append((0, 0, Continuation(action, 0, context.weight, base)))
            found += [way for _, _, way in sorted(ways, key=lambda one: one[:2])]
        return sorted(found, key=lambda way: way.trajectory.key.slot)


def _over(run: _Run) -> Trajectory:
    assert run.trajectory is not None, "an episode was not played to its end"
    return run.trajectory


def _are_closed(contexts: Sequence[_Context]) -> bool:
    return all(fork.trajectory is not None for context in contexts for fork in context.forks)


def _way(context: _Context, run: _Run) -> Continuation:
    scored = context.scored.get(run.sibling)
    return Continuation(run.action, run.sibling, context.weight, _over(run), scored)


def _said(base: _Run) -> dict[str, tuple[Turn, Reply]]:
    """Path → turn and reply of a base episode that is over."""
    texts = {path_json(turn.path): turn for turn in _over(base).turns}
    return {text: (turn, base.state.replies[text]) for text, turn in texts.items()}


def _prompt(messages: Sequence[Message]) -> list[tuple[str, str, str]]:
    """What a prompt says, whichever turns said it."""
    return [(message.role, message.content, message.tools) for message in messages]


def _again(state: EpisodeState) -> EpisodeState:
    """The same episode at the same point, nothing handed out."""
    same = state.copy()
    same.pending.clear()
    return same


def _visit(path: Path, depth: int) -> Place:
    """The visit of a node that a path lies in at a depth, whichever item, model call or attempt."""
    return path[:depth], path[depth].node, path[depth].visit
