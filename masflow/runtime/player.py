"""Plays episodes: an explicit state machine that turns a plan, a task and replies into a trajectory.

Knows no engine: it hands out requests and takes replies. Given the same replies it gives the same
trajectory, in whatever order they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import ref

from masflow.compiler.graph import END
from masflow.compiler.plan import Plan
from masflow.errors import EpisodeError, RunError
from masflow.memory.recall import Snapshot
from masflow.models.engine import Reply, Request
from masflow.runtime import react
from masflow.runtime.board import Board, Clock
from masflow.runtime.demonstrations import Script
from masflow.runtime.effects import effect_key, parse_answer
from masflow.runtime.items import output_of
from masflow.runtime.live import GraphInfo, Live, Play, Question, Thread
from masflow.runtime.state import EpisodeState
from masflow.runtime.straight import straight
from masflow.runtime.walk import run_play
from masflow.timelimit import OutOfTime, supervised
from masflow.tools import ToolBox
from masflow.trace import Effect, EpisodeKey, Path, Trajectory, Turn, changed


class Player:
    """Plays the episodes of one plan."""

    def __init__(
        self,
        plan: Plan,
        toolbox: ToolBox | None = None,
        mode: Literal["train", "eval"] = "train",
        *,
        interactive: bool = False,
        memory: Snapshot | None = None,
    ):
        """
        Args:
            mode: which sampling the roles use.
            interactive: people are asked; otherwise `in_training` answers for them.
            memory: what roles are reminded of, the same for all episodes.
        """
        self.plan, self.mode, self.interactive = plan, mode, interactive
        self.memory = memory
        self.toolbox = toolbox or ToolBox(plan)
        self._loaded: dict[str, Any] = {}
        infos = {key: GraphInfo(graph) for key, graph in plan.workflows.items()}
        self._infos = infos
        self._blank = {key: Board.of(info.graph, Clock()) for key, info in infos.items()}
        self._straight = {key: straight(info) for key, info in infos.items()}
        self._programs = any(info.graph.program is not None for info in infos.values())
        self._beside = not self._programs and any(info.calls_follow for info in infos.values())

    def start(self, task: dict[str, Any], key: EpisodeKey) -> EpisodeState:
        """A new episode on one data row, nothing asked yet."""
        return EpisodeState((key,), dict(task))

    def advance(self, state: EpisodeState, *, wait: bool = True) -> list[Request]:
        """Run what can run: tools, calls, whatever replies allow. Returns the model requests that are new.

        Args:
            wait: for tools that run beside each other; without it, go on after `wait`.
        """
        return self._settled(state) if wait else self._go_on(state).new

    def waits(self, state: EpisodeState) -> bool:
        """Whether tools were begun for the episode that nobody has waited for."""
        return state.live is not None and any(not begun.is_awaited for begun in state.live.begun.values())

    def wait(self, state: EpisodeState) -> None:
        """Until every tool that was begun for the episode is over."""
        for begun in state.live.begun.values() if state.live is not None else ():
            begun.wait()

    def _settled(self, state: EpisodeState) -> list[Request]:
        """Go on until no tool is under way; the requests that are new. Which tool is over first plays no
        part: the episode goes on when all are."""
        new = self._go_on(state).new
        while self.waits(state):
            self.wait(state)
            new += self._go_on(state).new
        return new

    def _go_on(self, state: EpisodeState) -> Live:
        """Run what can run; where functions are called in a row, on the thread that calls them."""
        while True:
            live = self._live(state)
            live.new, live.questions = [], {}
            if not self._beside or state.script is not None:
                run_play(live, live.root)
                return live
            try:
                supervised(partial(run_play, live, live.root))
                return live
            except OutOfTime:  # recorded as that call's effect: again up to there, and on
                for request in live.new:
                    del state.pending[request.turn_id]
                state.live = None
                self._live(state).begun = dict(live.begun)

    def deliver(self, state: EpisodeState, reply: Reply) -> None:
        """Put a reply in its place; the same reply twice counts once.

        Raises:
            RunError: nobody asked for it, or another reply stands in its place.
        """
        path = state.pending.get(reply.turn_id)
        if path is None:
            if reply in state.replies.values():
                return
            raise RunError(
                f"a reply to turn {reply.turn_id}, which episode {state.key.episode_id} did not ask for"
            )
        state.replies[path] = reply
        del state.pending[reply.turn_id]

    def questions(self, state: EpisodeState) -> list[Question]:
        """What people are asked before the episode can go on."""
        return list(self._current(state).questions.values())

    def answer(self, state: EpisodeState, question: Question, text: str) -> None:
        """A person's answer (for an approval: yes or no). Raises ValueError with the reason when it is
        malformed."""
        value: Any = text.strip().lower() in ("y", "yes", "true", "ok")
        if question.kind == "human":
            *_, graph_key = self._graph_of(question.path)
            node = self._infos[graph_key].nodes[question.path[-1].node]
            value = parse_answer(node, text, question.choices)
        state.effects[effect_key("human", question.path)] = Effect(question.path, "human", value)

    def _graph_of(self, path: Path) -> list[str]:
        keys = [self.plan.root]
        for step in path[:-1]:
            keys.append(str(self._infos[keys[-1]].nodes[step.node].workflow))
        return keys

    def finished(self, state: EpisodeState) -> bool:
        """Whether nothing more will be asked of models: it ended, or waits for a person."""
        live = self._current(state)
        asks_nothing = bool(live.questions) and not state.pending and not self.waits(state)
        return live.root.thread.done or asks_nothing

    def let_go(self, state: EpisodeState) -> None:
        """Forget where an episode stands, to be worked out again if anybody asks; not of one that a function
        plays, which would run again."""
        if not self._programs:
            state.live = None

    def fork(self, state: EpisodeState, turn_id: str, fork: tuple[Any, ...]) -> EpisodeState:
        """A new episode that replays everything that didn't happen after a turn, and asks that turn again.

        Args:
            fork: (node path, sibling, continuation), the new key's.
        Raises:
            KeyError: the episode has no such turn.
        """
        live = self._current(state)
        if turn_id not in live.turns:
            raise KeyError(turn_id)
        after, before = {turn_id}, 0
        order = sorted(
            live.paths.values(), key=lambda id_: live.turns[id_].superstep if id_ in live.turns else 0
        )
        while len(after) > before:  # a turn may hang on a cancelled one of a later superstep
            before = len(after)
            for id_ in order:
                if after.intersection(live.depends[id_]):
                    after.add(id_)
        texts = {text: id_ for text, id_ in live.paths.items() if id_ in after}
        gone = {key for key in state.effects if after.intersection(live.depends.get(key, ()))}
        return EpisodeState(
            keys=(*state.keys, replace(state.key, fork=fork)),
            task=state.task,
            forks=(*state.forks, next(text for text, id_ in texts.items() if id_ == turn_id)),
            replies={
                text: reply
                for text, reply in state.replies.items()
                if text in live.paths and text not in texts
            },
            effects={key: e for key, e in state.effects.items() if key in live.depends and key not in gone},
            prompts={t: p for t, p in state.prompts.items() if texts.get(t, turn_id) == turn_id},
        )

    def trajectory(self, state: EpisodeState) -> Trajectory:
        """What the episode left behind so far; outcome `paused` when it isn't over."""
        live = self._current(state)
        thread = live.root.thread
        outcome, detail = thread.stop or ("ok", "")
        if not thread.done:
            waits = ", ".join(q.node for q in live.questions.values()) or "a model's reply"
            outcome, detail = "paused", f"waits for {waits}"
        output: dict[str, Any] = {}
        try:
            output = output_of(live, live.root)
        except EpisodeError as error:
            if outcome == "ok":
                outcome, detail = error.outcome, error.message
        turns = tuple(sorted(live.turns.values(), key=turn_order))
        return Trajectory(
            key=state.key,
            task=state.task,
            turns=turns,
            effects=tuple(_happened(state, live)),
            outcome=outcome,
            detail=detail,
            output=output,
            names={**live.root.names(thread.board, full=True), "output": output},
            moments=tuple(sorted(live.moments, key=lambda m: (m.superstep, path_order(m.path)))),
            predecessors={turn.id: live.predecessors[turn.id] for turn in turns},
            recalled=dict(live.recalled),
        )

    def demonstrate(self, demonstration: dict[str, Any], key: EpisodeKey) -> Trajectory:
        """Replay one demonstration: its replies and tool values stand in for models and, where given, tools.

        Raises:
            EpisodeError: it doesn't fit the workflow; the message names `key.task_id` and the turn.
        """
        script = Script(demonstration, str(key.task_id))
        state = EpisodeState((key,), dict(demonstration.get("task", {})), script=script)
        root = self._live(state).root
        script.alone = lambda: is_alone(root)
        while not self.finished(state):
            for request in self.advance(state):
                path = state.pending[request.turn_id]
                said = script.reply(request.node, path)
                if request.tools:
                    said = react.translated(said, self.plan.dialect_of(request.policy))
                self.deliver(state, Reply(request.turn_id, said))
        script.finish(self._current(state).root.thread.stop)
        return self.trajectory(state)

    def _current(self, state: EpisodeState) -> Live:
        """The live position; a copied, loaded or forked state is replayed up to where it waits."""
        if state.live is None:
            for request in self._settled(state):
                del state.pending[request.turn_id]  # not handed out: `advance` will
            self._live(state).new = []
        return self._live(state)

    def _live(self, state: EpisodeState) -> Live:
        if state.live is None:
            own = (self.plan, self.toolbox, self.mode, self.interactive)
            live = Live(*own, ref(state), self._play, self._load, memory=self.memory)
            root = self.plan.root
            limit = self._infos[root].graph.limits.tokens
            live.root = self._play(root, state.task, {}, (), "", Clock(), limit, True)
            state.live = live
        return state.live

    def _play(
        self,
        graph_key: str,
        task: dict[str, Any],
        params: dict[str, Any],
        prefix: Path,
        call: str,
        clock: Clock,
        token_limit: int | None,
        records: bool,
    ) -> Play:
        info = self._infos[graph_key]
        own = info.graph.limits.tokens
        limit = min((n for n in (own, token_limit) if n is not None), default=None)
        task = {**{f.name: None for f in info.graph.task}, **task}
        board = self._blank[graph_key].fork()
        board.clock = clock
        thread = Thread(board, until=END)
        return Play(
            info,
            graph_key,
            prefix,
            call,
            task,
            {**info.graph.params, **params},
            thread,
            limit,
            records,
            self._straight[graph_key],
        )

    def _load(self, ref: str) -> Any:
        found = self._loaded.get(ref)
        if found is None:
            from masflow.functions import load_callable

            found = self._loaded[ref] = load_callable(ref, self.plan.root_dir)
        return found


def _happened(state: EpisodeState, live: Live) -> Iterator[Effect]:
    """The effects so far, in their order, each with its superstep."""
    for key in sorted(live.places, key=lambda k: (*live.places[k], k)):
        effect, superstep = state.effects.get(key), live.places[key][0]
        if effect is not None:
            yield effect if effect.superstep == superstep else changed(effect, superstep=superstep)


def is_alone(play: Play) -> bool:
    """Whether a play is at one place only: neither branches nor items side by side."""
    if play.program is not None:
        return play.program.is_alone()
    visit = play.thread.visit
    if play.thread.branches is not None or (visit and visit.is_list and not visit.node.in_order):
        return False
    return all(is_alone(item.sub) for item in (visit.items if visit else ()) if item.sub is not None)


def path_order(path: Path) -> tuple[Any, ...]:
    """Sorts paths whose items may be null, numbers or text."""
    return tuple(
        (s.call, s.node, s.visit, (0 if s.item is None else 1 if isinstance(s.item, int) else 2, s.item or 0),
         s.model_call, s.attempt)
        for s in path
    )  # fmt: skip


def turn_order(turn: Turn) -> tuple[Any, ...]:
    return turn.superstep, path_order(turn.path)
