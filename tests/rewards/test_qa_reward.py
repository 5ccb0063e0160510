"""Shipped rewards against numbers worked out by hand."""

import runpy
from pathlib import Path

import pytest

REWARDS = Path(__file__).parents[2] / "rewards"
QA = runpy.run_path(str(REWARDS / "qa.py"))
NUMBERS = runpy.run_path(str(REWARDS / "numbers.py"))


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1),
        ("a Theory", "theory", 1),
        ("Paris", ["London", "paris."], 1),
        ("Paris France", ["Paris"], 0),
        ("", ["Paris"], 0),
        ("it is x", "x", 0),
    ],
)
def test_exact_match_ignores_case_articles_and_punctuation(prediction, answers, score):
    assert QA["exact_match"](prediction, answers) == score


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        ("the quick brown fox", ["brown fox jumps"], 2 / 3),  # 2 common of 3 and 3: p = r = 2/3
        ("Paris in France", ["Paris"], 0.5),  # p 1/3, r 1
        ("x x", ["x"], 2 / 3),  # a repeated word counts once: p 1/2, r 1
        ("no", ["Paris", "no way"], 2 / 3),  # the best of the golds
        ("", ["Paris"], 0),
        ("the", ["a"], 0),  # nothing is left on either side, so no word is common
    ],
)
def test_token_f1_is_the_harmonic_mean_over_words(prediction, answers, score):
    assert QA["token_f1"](prediction, answers) == pytest.approx(score)


def test_found_is_the_recall_of_the_gold_ids():
    assert QA["found"](["a", "b", "a"], ["a", "c"]) == 0.5
    assert QA["found"]([], "a") == 0
    with pytest.raises(ValueError, match="without gold answers"):
        QA["found"](["a"], [])


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("So 3 + 4 = 7.", 7, 1),
        ("it costs $1,234.50", "1234.5", 1),
        ("7 or 8", "#### 7", 0),
        ("minus: -3", -3, 1),
        ("5-3", 3, 1),  # an operator is no sign
        ("none", 7, 0),
        ("x2", 2, 0),
        ("about .5", "0.5", 1),
    ],
)
def test_the_last_number_counts(prediction, answer, score):
    assert NUMBERS["final_number"](prediction, answer) == score


def test_a_gold_answer_without_a_number_is_an_error_and_never_a_zero():
    with pytest.raises(ValueError, match="holds no number"):
        NUMBERS["final_number"]("7", "seven")


@pytest.mark.parametrize(
    ("said", "gold", "score"),
    [(["Rivers", "cities", "rivers "], ["rivers", "people"], 0.5), ([], ["a"], 0), (["a"], ["a"], 1)],
)
def test_set_f1_compares_distinct_names(said, gold, score):
    assert runpy.run_path(str(REWARDS / "lists.py"))["set_f1"](said, gold) == score
