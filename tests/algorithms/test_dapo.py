"""DAPO: dynamic sampling in task order, and soft lengths, by numbers worked out on paper."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.models.engine import Reply, Request
from masflow.runtime.controller import train, training_tasks
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.training import Work, make_batch, redraw, sample_trajectories, score_rewards, step_record
from masflow.tools import ToolBox
from masflow.trace import EpisodeKey, Step

Toy = Callable[..., Path]
GRPO = "algorithm: {use: grpo, samples: 4, updates_per_step: 2}"
SCHEDULE = "tasks_per_step: 3, seed: 0"
ECHO = (Step("", "echo", 1),)


class Speakers:
    """Repeats the word, but in the second sample of a task whose lesson is due. In the toy's file order:
    red, green, blue, white, black."""

    def __init__(self, lessons: Sequence[str], order: int | None = None) -> None:
        """`order`: replies come one by one, shuffled by it, in place of all at once."""
        self.lessons, self.asked, self.random = lessons, list[Request](), random.Random(order)
        self.stream = None if order is None else self

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        return [self._reply(request) for request in requests]

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests

    def collect(self) -> list[Reply]:
        chosen = self.asked.pop(self.random.randrange(len(self.asked))) if self.asked else None
        return [self._reply(chosen)] if chosen else []

    def clear(self) -> None:
        self.asked.clear()

    def _reply(self, request: Request) -> Reply:
        word = str((request.task or {})["word"])
        seconds = {
            EpisodeKey(0, "train", 1, slot, f"{row}", 1).turn_id(ECHO)
            for slot in range(20)
            for row in range(5)
        }
        is_wrong = request.node == "echo" and word in self.lessons and request.turn_id in seconds
        text = "pink" if is_wrong else word
        return Reply(request.turn_id, text, prompt_tokens=2, reply_tokens=1 + len(text) % 3)


def step(toy: Toy, speakers: Any, rounds: int = 3, tasks: int = 2, **more: str) -> Work:
    """One step of a team that learns nothing from most tasks."""
    algorithm = f"algorithm: {{use: dapo, samples: 2, dynamic: {{max_rounds: {rounds}}}}}"
    schedule = f"tasks_per_step: {tasks}, seed: 0, shuffle: false"
    plan = compile_experiment(toy((GRPO, algorithm), (SCHEDULE, schedule)), overrides=more)
    work = Work(plan, speakers, ToolBox(plan), training_tasks(plan), 1, 0)
    [stage] = [stage for stage in plan.stages if stage.name == "select"]
    assert stage.op == "dynamic"
    with work.scoring:
        for operator in (sample_trajectories, score_rewards, make_batch):
            operator(work, {})
        redraw(work, stage.options)
    return work


def trained(work: Work) -> list[tuple[int, str]]:
    """(slot, task) of each episode that rows come from."""
    assert work.batch is not None
    rows = {row.turn_id for rows in work.batch.rows.values() for row in rows}
    found = {
        (one.trajectory.key.slot, str(one.trajectory.task["word"]))
        for one in work.scored
        for turn in one.trajectory.turns
        if turn.id in rows
    }
    return sorted(found)


def test_tasks_without_a_lesson_are_replaced_by_the_next_ones(toy: Toy):
    """Round 1 draws red and green, round 2 blue for red, round 3 white for blue."""
    work = step(toy, Speakers(["green", "white"]))
    assert trained(work) == [(1, "green"), (3, "white")]
    assert (work.rounds, work.num_tasks, work.kept) == (3, 4, [1, 3])
    assert [one.trajectory.key.slot for one in work.scored] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert step_record(work)["dynamic"] == {"rounds": 3, "tasks": 4, "kept": 2}
    assert work.num_episodes == 8


def test_rounds_are_bounded_and_what_there_is_is_trained_on(toy: Toy):
    work = step(toy, Speakers(["green", "white"]), rounds=2)
    assert trained(work) == [(1, "green")]
    assert (work.rounds, work.num_tasks, work.kept) == (2, 3, [1])


def test_a_full_first_round_draws_no_other(toy: Toy):
    work = step(toy, Speakers(["red", "green"]))
    assert (work.rounds, work.num_tasks, work.kept) == (1, 2, [0, 1])


def test_where_no_task_has_a_lesson_the_batch_says_so(toy: Toy):
    work = step(toy, Speakers([]))
    assert work.batch is not None
    assert (work.rounds, work.num_tasks, work.kept) == (3, 6, [])
    assert not work.batch.rows and work.batch.stats["learnable_group_frac"] == 0
    assert work.batch.stats["trainable_turns"] == 24  # 6 tasks, 2 samples, 2 roles


def test_a_reply_that_pays_for_its_length_is_no_lesson_by_itself(toy: Toy):
    """Both samples are right, one is as long as its budget: 0 < #correct < G doesn't hold (eq. 11)."""

    class Wordy(Speakers):
        def _reply(self, request: Request) -> Reply:
            reply = super()._reply(request)
            is_long = request.task is not None and request.task["word"] == "red" and self.flip()
            return Reply(request.turn_id, reply.text, prompt_tokens=2, reply_tokens=3 if is_long else 1)

        def flip(self) -> bool:
            self.count = getattr(self, "count", 0) + 1
            return self.count % 2 == 0

    work = step(toy, Wordy(["green"]), rounds=2)
    assert work.kept == [1] and trained(work) == [(1, "green")]


@pytest.mark.parametrize("order", range(3))
def test_grouping__quick_episodes_are_favoured__what_is_trained_on_depends_on_task_order_alone(
    toy: Toy, order: int
):
    """Replies one by one, in three orders: the batch is that of replies all at once, number by number."""
    whole = step(toy, Speakers(["green", "blue", "white", "black"]), tasks=3)
    found = step(toy, Speakers(["green", "blue", "white", "black"], order), tasks=3)
    assert whole.kept == [1, 2, 3]
    assert found.kept == whole.kept and found.batch == whole.batch


def test_token_mean_counts_the_tokens_of_the_tasks_that_are_kept(toy: Toy):
    """green: 5 % 3 + 1 = 3 tokens a turn, pink 2; both roles of two samples of green are 3, 3, 3 and 2
    tokens, 11 in all; red, without a lesson, counts for nothing."""
    work = step(toy, Speakers(["green"]), tasks=1)
    assert trained(work) == [(1, "green")]
    assert work.batch is not None
    [rows] = work.batch.rows.values()
    assert [row.token_weight for row in rows] == pytest.approx([1 / 11] * 4)


def test_a_run_with_dynamic_sampling_goes_on_where_its_drawing_stood(toy: Toy, tmp_path: Path):
    """A resumed run draws the rows that a run without a stop draws, however many each step took."""
    algorithm = "algorithm: {use: dapo, samples: 2, dynamic: {max_rounds: 3}}"
    plan = compile_experiment(toy((GRPO, algorithm)))

    def records(out: Path) -> list[dict[str, Any]]:
        found = read_metrics(out / "metrics.jsonl")
        return [{k: v for k, v in r.items() if k != "time"} for r in found if r["kind"] == "train"]

    train(plan, tmp_path / "whole")
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 2)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "parts", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "parts", resume=True)
    whole = records(tmp_path / "whole")
    assert records(tmp_path / "parts") == whole
    assert len(whole) == 4 and any(record["dynamic"]["tasks"] > 3 for record in whole)
    for record in whole:
        assert record["episodes"] == 2 * record["dynamic"]["tasks"]
