"""A store after a step, against scores worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from masflow.memory.evolve import Evolved, evolve, score_at
from masflow.memory.records import Event, Experience, Memory, Record
from masflow.memory.rules import Rules

RULES = Rules(capacity=8)


def after(*args: Any, **options: Any) -> tuple[Memory, tuple[Event, ...]]:
    found = evolve(*args, **options)
    return found.memory, found.events


def turn(name: str, reward: float, situation: str = "", recalled: tuple[int, ...] = ()) -> Experience:
    return Experience(
        name, situation or f"question {name}", f"reply of {name}", reward, f"task {name}", recalled
    )


def record(number: int, score: float, situation: str = "", step: int = 1) -> Record:
    text = situation or f"record{number}"
    return Record(number, text, f"old {number}", score, step, 0, step, step, f"t{number}", f"k{number}")


def kinds(events: tuple[Event, ...]) -> list[tuple[str, int]]:
    return [(event.kind, event.record) for event in events]


def test_success_is_inserted_with_its_distance_from_the_mean_and_failure_is_not():
    found, events = after(
        Memory("s"), [turn("a", 1.0), turn("b", 0.0), turn("c", 0.0), turn("d", 0.0)], 3, RULES
    )
    [one] = found.records
    assert one == Record(1, "question a", "reply of a", 0.75, 3, 0, 3, 3, "a", "task a")
    assert found.rewards == (1.0, 0.0, 0.0, 0.0) and found.next_id == 2
    [event] = events
    assert (event.step, event.store, event.record, event.kind, event.turn) == (3, "s", 1, "inserted", "a")


def test_equal_rewards_change_nothing_but_the_window():
    memory = Memory("s", (record(1, 0.5),), (), 2)
    found, events = after(memory, [turn("a", 0.0), turn("b", 0.0)], 2, RULES)
    assert found == replace(memory, rewards=(0.0, 0.0)) and events == ()


def test_of_two_alike_the_better_stays_under_the_older_ones_number():
    # Mean of 1, 0, 0, 0 is 0.25: the turn scores 0.75, the record 0.2 (set in this step: no decay).
    memory = Memory("s", (record(4, 0.2, "add 3 and 4", step=5),), (), 5)
    step = [turn("a", 1.0, "add 3 and 4"), *(turn(n, 0.0) for n in "bcd")]
    found, events = after(memory, step, 5, RULES)
    [one] = found.records
    assert (one.id, one.strategy, one.source, one.task, one.score) == (4, "reply of a", "a", "task a", 0.75)
    assert kinds(events) == [("merged", 4)] and "in place of turn t4" in events[0].detail
    better = replace(memory, records=(record(4, 0.9, "add 3 and 4", step=5),))
    found, events = after(better, step, 5, RULES)
    assert found.records == better.records and kinds(events) == [("merged", 4)]


def test_siblings_of_one_context_become_one_record():
    step = [turn(n, 1.0, "the same prompt") for n in "bac"] + [turn("z", 0.0)]
    found, events = after(Memory("s"), step, 1, RULES)
    assert [r.source for r in found.records] == ["a"]  # of equals the first id
    assert kinds(events) == [("inserted", 1), ("merged", 1), ("merged", 1)]


def test_what_is_a_little_different_is_a_record_of_its_own():
    step = [turn("a", 1.0, "add 3 and 4"), turn("b", 1.0, "add 3 and 5"), turn("c", 0.0)]
    assert len(evolve(Memory("s"), step, 1, RULES).memory.records) == 2


def test_a_turn_in_the_lower_tail_costs_what_it_recalled():
    # 19 ones and a zero: mean 0.95, lower bound 0.51. The failure costs 0.95.
    # Record 1 was set at step 1 and is 9 steps old: 2·exp(-9 / 100) = 1.827862.
    memory = Memory("s", (record(1, 2.0), record(2, 0.5, step=10)), tuple([1.0] * 18), 3)
    found, events = after(memory, [turn("a", 0.0, recalled=(1, 2)), turn("b", 1.0)], 10, RULES)
    left = next(r for r in found.records if r.id == 1)
    assert left.score == pytest.approx(1.827862 - 0.95, abs=1e-6)
    assert (left.uses, left.last_used, left.scored, left.created) == (1, 10, 10, 1)
    assert kinds(events)[:4] == [("decayed", 1), ("penalised", 1), ("penalised", 2), ("deleted", 2)]
    assert 2 not in {r.id for r in found.records}
    assert {e.turn for e in events[1:4]} == {"a"} and found.next_id == 4  # b's record; 2 is never used again


def test_only_the_lower_tail_moves_what_was_recalled():
    # 5 (six times), 4, 20, 6: mean 60 / 9 = 6.6667; squares 16.6667 + 7.1111 + 177.7778 + 0.4444 = 202,
    # s = 5.0249: bounds -3.18 and 16.52.
    memory = Memory("s", (record(1, 0.5), record(2, 0.5)), (5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 4.0), 3)
    turns = [turn("top", 20.0, recalled=(1,)), turn("mid", 6.0, recalled=(2,))]
    found, events = after(memory, turns, 1, RULES)
    assert [(r.id, r.score, r.uses) for r in found.records[:2]] == [(1, 0.5, 1), (2, 0.5, 1)]
    assert kinds(events) == [("inserted", 3)] and found.records[2].score == pytest.approx(20 - 60 / 9)


def test_scores_decay_with_steps_and_never_with_the_clock():
    old = record(1, 0.8, step=20)
    assert score_at(old, 20, RULES) == 0.8
    assert score_at(old, 120, RULES) == pytest.approx(0.8 / math.e)
    assert score_at(old, 120, replace(RULES, beta=0.0)) == 0.8
    assert score_at(old, 45, replace(RULES, decay_steps=50)) == pytest.approx(0.8 * math.exp(-0.5))


def test_what_decays_below_the_floor_is_deleted():
    # 0.8·exp(-t / 100) falls below 0.5 after 100·ln 1.6 = 47.0004 steps.
    rules, memory = replace(RULES, floor=0.5), Memory("s", (record(1, 0.8, step=1),), (), 2)
    assert evolve(memory, [], 48, rules) == Evolved(memory)
    found, events = after(memory, [], 49, rules)
    assert found.records == () and kinds(events) == [("decayed", 1), ("deleted", 1)]


def test_a_full_store_lets_the_lowest_score_of_today_go():
    # Of 0.9 at step 1 exp(-1) is left at step 101: 0.331; that is less than a fresh 0.4.
    memory = Memory("s", (record(1, 0.9, step=1), record(2, 0.4, step=101)), (), 3)
    step = [turn("a", 1.0), turn("b", 0.0)]
    found, events = after(memory, step, 101, Rules(capacity=2))
    assert [r.id for r in found.records] == [2, 3] and kinds(events) == [("inserted", 3), ("evicted", 1)]


def test_what_came_and_went_within_a_step_is_told():
    memory = Memory("s", (record(7, 5.0),), (), 8)
    found = evolve(memory, [turn("a", 1.0), turn("b", 0.0)], 1, Rules(capacity=1))
    assert found.memory.records == memory.records and kinds(found.events) == [("inserted", 8), ("evicted", 8)]
    assert [r.source for r in found.brief] == ["a"] and found.rewards == (1.0, 0.0)


def test_a_cut_or_malformed_reply_is_no_example():
    step = [replace(turn("a", 1.0), is_whole=False), replace(turn("b", 1.0), strategy=" \n"), turn("c", 0.0)]
    found, events = after(Memory("s"), step, 1, RULES)
    assert found.records == () and events == () and len(found.rewards) == 3


def test_the_window_keeps_the_latest_rewards():
    memory = Memory("s", (), (1.0, 2.0, 3.0))
    found, _ = after(memory, [turn("b", 5.0), turn("a", 4.0)], 1, Rules(window=4))
    assert found.rewards == (2.0, 3.0, 4.0, 5.0)  # of one step in order of id


def test_a_held_out_task_is_never_inserted_and_counts_for_nothing():
    step = [turn("a", 1.0), turn("b", 1.0), turn("c", 0.0)]
    found, events = after(Memory("s"), step, 1, RULES, held_out={"task a"})
    assert [r.source for r in found.records] == ["b"] and found.rewards == (1.0, 0.0)
    assert {e.turn for e in events} == {"b"}


def test_a_held_out_task_cant_come_in_by_a_merge():
    memory = Memory("s", (record(1, 0.1, "add 3 and 4"),), (), 2)
    step = [turn("a", 1.0, "add 3 and 4"), turn("b", 0.5), turn("c", 0.0)]
    found, _ = after(memory, step, 1, RULES, held_out={"task a"})
    assert [r.source for r in found.records][:1] == ["t1"]


def test_a_record_that_an_earlier_turn_deleted_can_be_named_again():
    memory = Memory("s", (record(1, 0.1),), tuple([1.0] * 40), 2)
    step = [turn("a", 0.0, recalled=(1,)), turn("b", 0.0, recalled=(1, 1, 7))]
    found, events = after(memory, step, 1, replace(RULES, lower=10.0))
    assert found.records == () and kinds(events) == [("penalised", 1), ("deleted", 1)]


def test_neither_the_order_of_turns_nor_the_run_changes_anything():
    chance = random.Random(3)
    memories = [Memory("s"), Memory("s")]
    for step in range(1, 12):
        turns = [
            turn(f"{step}.{i}", chance.choice([0.0, 0.1, 1.0, 1.1]), f"add {chance.randrange(9)} and {i % 3}",
                 tuple(chance.sample(range(1, 9), 2)))
            for i in range(12)
        ]  # fmt: skip
        first = evolve(memories[0], turns, step, RULES)
        chance.shuffle(turns)
        second = evolve(memories[1], turns, step, RULES)
        assert first == second
        memories = [first.memory, second.memory]
    assert 0 < len(memories[0].records) <= RULES.capacity
