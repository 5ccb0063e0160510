"""What a role is reminded of, and what it never is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from masflow.memory.recall import Index, Snapshot
from masflow.memory.records import Memory, Record, task_key

SUMS = ["add 3 and 4", "add 12 and 30", "name the capital of France", "name the river of Rome"]
PROMPT = "You are a careful solver. Think step by step, then answer the question.\nQuestion: {}\nAnswer:"


def record(number: int, situation: str, task: str = "") -> Record:
    task = task or f"task{number}"
    return Record(number, situation, f"reply {number}", 1.0, 1, 0, 1, 1, f"turn{number}", task)


def memory(*situations: str) -> Memory:
    return Memory("solver", tuple(record(i, text) for i, text in enumerate(situations, 1)), (), 99)


@pytest.fixture
def snapshot() -> Callable[..., Snapshot]:
    def make(*situations: str, recall: int = 2, held_out: frozenset[str] = frozenset()) -> Snapshot:
        return Snapshot({"solver": memory(*situations)}, {"solver": "solver"}, recall, held_out)

    return make


def test_the_most_similar_records_are_recalled_though_all_prompts_share_their_template(
    snapshot: Callable[..., Snapshot],
):
    view = snapshot(*map(PROMPT.format, SUMS))
    recalled, records = view.recall("solver", PROMPT.format("add 3 and 7"), "asked")
    assert recalled.records == (1, 2) and [r.strategy for r in records] == ["reply 1", "reply 2"]
    recalled, _ = view.recall("solver", PROMPT.format("name the capital of Spain"), "asked")
    assert recalled.records == (3, 4)


def test_a_role_without_a_memory_has_none(snapshot: Callable[..., Snapshot]):
    view = snapshot("a b")
    assert view.has("solver") and not view.has("judge")


def test_nothing_is_recalled_that_has_no_word_in_common(snapshot: Callable[..., Snapshot]):
    recalled, records = snapshot("alpha beta").recall("solver", "gamma", "asked")
    assert recalled.records == () and records == []


def test_the_order_of_words_counts_and_letter_case_does_not():
    index = Index([record(1, "take a from b"), record(2, "take b from a")])
    [(first, one), (second, less)] = index.nearest("TAKE b FROM a", 5)
    assert (first.id, one, second.id) == (2, 1.0, 1) and less < 0.9
    index.close()


def test_equal_records_come_in_the_order_in_which_they_were_made():
    index = Index([record(i, "the same words") for i in (3, 1, 2)])
    assert [r.id for r, _ in index.nearest("the same words", 5)] == [1, 2, 3]
    index.close()


def test_signs_without_words_are_situations_too():
    index = Index([record(1, "+ - ?"), record(2, "words")])
    assert [(r.id, s) for r, s in index.nearest("+ - ?", 3)] == [(1, 1.0)]
    assert index.nearest("", 3) == []
    index.close()


def test_what_users_write_is_no_query_language():
    texts = ['say "hi" OR NOT x*', "NEAR(a b) AND words:c", "^d - e:f {g}", "O'Neil\x00 ½ ² naïve_word"]
    index = Index([record(i, text) for i, text in enumerate(texts, 1)])
    for i, text in enumerate(texts, 1):
        assert index.nearest(text, 1)[0][0].id == i
    index.close()


# -- those who try to cheat ---------------------------------------------------------------------------


def test_a_task_is_never_reminded_of_itself_however_many_records_it_has():
    mine = task_key({"question": "add 3 and 4", "answer": "7"}, hidden=["answer"])
    own = [record(i, "add 3 and 4", mine) for i in range(1, 100)]  # more than FTS5 is asked for
    view = Snapshot({"s": Memory("s", (*own, record(100, "add 3 and 9")))}, {"solver": "s"}, 3)
    recalled, _ = view.recall("solver", "add 3 and 4", mine)
    assert recalled.records == (100,)


def test_the_same_question_in_other_clothes_is_the_same_task():
    row = {"question": "Add 3 and 4", "context": ["a", {"b": "C"}], "answer": "7"}
    key = task_key(row, hidden=["answer"])
    assert key == task_key({**row, "answer": "seven"}, hidden=["answer"])  # another solution
    assert key == task_key({**row, "question": "  add 3\n and 4 "}, hidden=["answer"])
    assert key == task_key(dict(reversed(row.items())), hidden=["answer"])  # columns in another order
    assert key == task_key({**row, "context": ("A", {"b": "c "})}, hidden=["answer"])
    assert key != task_key({**row, "question": "Add 3 and 5"}, hidden=["answer"])


def test_a_held_out_task_is_never_recalled_even_if_a_store_holds_it(snapshot: Callable[..., Snapshot]):
    view = snapshot("add 3 and 4", "add 3 and 5", held_out=frozenset({"task1"}))
    assert view.recall("solver", "add 3 and 4", "asked")[0].records == (2,)


def test_a_view_of_a_step_doesnt_change_with_its_store(snapshot: Callable[..., Snapshot]):
    stores = {"solver": memory("add 3 and 4")}
    view = Snapshot(stores, {"solver": "solver"}, 2)
    first = view.recall("solver", "add 3 and 9", "a")
    stores["solver"] = memory("add 3 and 9", "add 3 and 9")
    assert view.recall("solver", "add 3 and 9", "b") == first  # a sibling


def test_the_same_question_is_looked_up_once_in_a_step_and_answered_alike(
    snapshot: Callable[..., Snapshot], monkeypatch: pytest.MonkeyPatch
):
    view, asked, nearest = snapshot(*SUMS), [], Index.nearest

    def counted(self: Index, *args: object) -> list[tuple[Record, float]]:
        asked.append(args)
        return nearest(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Index, "nearest", counted)
    first = view.recall("solver", "add 3 and 5", "mine")
    first[1].clear()  # whoever got it may do with it what he likes
    again = view.recall("solver", "add 3 and 5", "mine")
    assert len(asked) == 1 and again[0] == first[0] and [r.id for r in again[1]] == [1, 2]
    other = view.recall("solver", "add 3 and 5", "task1")  # another task may not be reminded of itself
    assert len(asked) == 2 and 1 not in [r.id for r in other[1]]
    view.close()
