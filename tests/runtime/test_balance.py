"""Which worker answers what: histories stay at home, prompts stay together, and work is even."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from masflow.models.engine import Request, SamplingParams
from masflow.runtime.balance import Balance
from masflow.trace import Message


def _ask(
    turn: str, text: str = "q", tokens: int = 8, parent: str | None = None, policy: str = "p"
) -> Request:
    return Request(turn, policy, (Message("user", text),), SamplingParams(max_tokens=tokens), 0, parent)


def test_a_request_goes_where_the_turn_that_it_continues_was_spoken() -> None:
    balance = Balance(3)
    first = [_ask(f"a{i}", f"question {i}") for i in range(9)]
    home = {first[n].turn_id: worker for worker, numbers in balance.deal(first).items() for n in numbers}
    assert set(home.values()) == {0, 1, 2}
    second = [_ask(f"b{i}", f"question {i}, and then", parent=f"a{i}") for i in reversed(range(9))]
    for worker, numbers in balance.deal(second).items():
        assert {home[second[n].parent or ""] for n in numbers} == {worker}


def test_samples_and_siblings_of_one_prompt_go_to_one_worker() -> None:
    asked = [_ask(f"{q}-{s}", f"question {q}") for q in range(4) for s in range(6)]
    random.Random(3).shuffle(asked)
    dealt = Balance(2).deal(asked)
    where = {n: worker for worker, numbers in dealt.items() for n in numbers}
    for question in range(4):
        mine = [n for n, request in enumerate(asked) if request.messages[0].content == f"question {question}"]
        assert len({where[n] for n in mine}) == 1
    assert [len(numbers) for numbers in dealt.values()] == [12, 12]


def test_one_prompt_alone_still_keeps_every_worker_busy() -> None:
    dealt = Balance(2).deal([_ask(f"s{i}") for i in range(8)])
    assert {worker: len(numbers) for worker, numbers in dealt.items()} == {0: 4, 1: 4}


def test_the_next_bundle_goes_to_the_least_outstanding_tokens() -> None:
    # By hand, prompts of 4 characters being 1 token: costs 101, 51, 31, 21; the largest first gives
    # {101} and {51, 31} and then 21 to the second (82 against 101).
    sizes = (20, 30, 50, 100)
    asked = [_ask(f"t{size}", f"{size:04}", tokens=size) for size in sizes]
    assert Balance(2).deal(asked) == {0: [3], 1: [0, 1, 2]}


def test_a_worker_that_is_gone_holds_no_prefix() -> None:
    balance = Balance(2)
    asked = [_ask(f"a{i}", f"question {i}") for i in range(2)]
    balance.deal(asked)
    balance.forget(0)
    later = [_ask(f"b{i}", f"question {i}!", parent=f"a{i}") for i in range(2)]
    assert sorted(n for numbers in balance.deal(later).values() for n in numbers) == [0, 1]
    assert balance.deal([_ask("c", parent="a1")], among=[0]) == {0: [0]}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 64)), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_every_request_is_dealt_once_and_the_same_again(asked: list[tuple[int, int]], workers: int) -> None:
    requests = [_ask(f"t{i}", f"question {q}", tokens=size) for i, (q, size) in enumerate(asked)]
    dealt = Balance(workers).deal(requests)
    assert sorted(n for numbers in dealt.values() for n in numbers) == list(range(len(requests)))
    assert all(numbers == sorted(numbers) for numbers in dealt.values())
    assert dealt == Balance(workers).deal(requests)
