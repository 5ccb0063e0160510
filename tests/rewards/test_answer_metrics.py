"""Answer metrics against the official definitions, written out again here, and against numbers by hand.

The definitions are those of SQuAD's evaluate-v1.1.py, HotpotQA's hotpot_evaluate_v1.py, GSM8K's dataset.py.
"""

import re
import runpy
import string
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

REWARDS = Path(__file__).parents[2] / "rewards"
QA = runpy.run_path(str(REWARDS / "qa.py"))
NUMBERS = runpy.run_path(str(REWARDS / "numbers.py"))


def official_normal(text):
    exclude = set(string.punctuation)
    text = "".join(ch for ch in text.lower() if ch not in exclude)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def official_f1(prediction, truth, *, hotpot):
    said, gold = official_normal(prediction), official_normal(truth)
    if hotpot and said in ("yes", "no", "noanswer") and said != gold:
        return 0.0
    if hotpot and gold in ("yes", "no", "noanswer") and said != gold:
        return 0.0
    same = sum((Counter(said.split()) & Counter(gold.split())).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(said.split()), same / len(gold.split())
    return 2 * precision * recall / (precision + recall)


def official(prediction, truths):
    """(exact match, SQuAD F1, HotpotQA F1), each the best over the truths."""
    return (
        max(float(official_normal(prediction) == official_normal(t)) for t in truths),
        max(official_f1(prediction, t, hotpot=False) for t in truths),
        max(official_f1(prediction, t, hotpot=True) for t in truths),
    )


def ours(prediction, truths):
    return tuple(QA[name](prediction, truths) for name in ("exact_match", "token_f1", "hotpot_f1"))


# prediction, truths, exact match, SQuAD F1, HotpotQA F1: worked out by hand
CASES = [
    ("The Eiffel Tower!", ["eiffel tower"], 1, 1, 1),
    ("Paris France", ["Paris"], 0, 2 / 3, 2 / 3),  # 1 common of 2 and 1
    ("", ["Paris"], 0, 0, 0),
    ("Paris", [""], 0, 0, 0),
    ("\tParis \n", ["Paris"], 1, 1, 1),
    ("New\u00a0York", ["New York"], 1, 1, 1),  # a no-break space is a blank
    ("Paris", ["London", "paris."], 1, 1, 1),
    ("river Seine in Paris", ["Seine", "the river Seine"], 0, 2 / 3, 2 / 3),  # 2·1/5 and 2·2/6
    ("new york", ["york new"], 0, 1, 1),  # F1 knows no order
    ("17 June 1972", ["June 17, 1972"], 0, 1, 1),
    # repeated words count as often as both have them
    ("x x", ["x"], 0, 2 / 3, 2 / 3),
    ("x", ["x x"], 0, 2 / 3, 2 / 3),
    ("x x", ["x x y"], 0, 4 / 5, 4 / 5),
    ("x y x", ["x x x"], 0, 2 / 3, 2 / 3),
    # articles, only as words of their own
    ("Theory", ["ory"], 0, 0, 0),
    ("an apple a day", ["apple day"], 1, 1, 1),
    ("rock the boat", ["rock boat"], 1, 1, 1),
    ("a b", ["b"], 1, 1, 1),
    ("Anne", ["ne"], 0, 0, 0),
    # nothing is left on both sides: equal, yet no word in common
    ("the", ["a"], 1, 0, 0),
    ("A", ["a"], 1, 0, 0),
    ("the the", ["the"], 1, 0, 0),
    ("...", ["!"], 1, 0, 0),
    # punctuation is dropped and leaves no blank
    ("U.S.", ["US"], 1, 1, 1),
    ("U.S.A", ["u s a"], 0, 0, 0),  # usa against u s
    ("it's", ["its"], 1, 1, 1),
    ("AC/DC", ["ac dc"], 0, 0, 0),
    ("a-b", ["ab"], 1, 1, 1),
    ("the_a", ["thea"], 1, 1, 1),
    ("don\u2019t", ["dont"], 0, 0, 0),  # a curly apostrophe isn't ASCII punctuation
    # letters beyond ASCII are themselves
    ("café", ["cafe"], 0, 0, 0),
    ("ÉCOLE", ["école"], 1, 1, 1),
    ("\u0130stanbul", ["istanbul"], 0, 0, 0),
    # numbers are words
    ("1,000", ["1000"], 1, 1, 1),
    ("$5", ["5"], 1, 1, 1),
    ("5%", ["5 %"], 1, 1, 1),
    ("-3", ["3"], 1, 1, 1),
    ("3.5", ["35"], 1, 1, 1),
    ("3.5", ["3 5"], 0, 0, 0),
    ("1914-1918", ["1914 1918"], 0, 0, 0),
    ("1914\u20131918", ["19141918"], 0, 0, 0),
    ("twenty", ["20"], 0, 0, 0),
    ("20 km", ["20"], 0, 2 / 3, 2 / 3),
    # HotpotQA: yes, no and noanswer as a whole or not at all
    ("yes", ["yes"], 1, 1, 1),
    ("Yes.", ["yes"], 1, 1, 1),
    ("The YES", ["yes"], 1, 1, 1),
    ("no", ["yes"], 0, 0, 0),
    ("yes it is", ["yes"], 0, 1 / 2, 0),  # 2·1/(3 + 1)
    ("no", ["no way"], 0, 2 / 3, 0),
    ("No, sir", ["no"], 0, 2 / 3, 0),
    ("yes no", ["no yes"], 0, 1, 1),  # neither is one of the three words
    ("noanswer", ["noanswer"], 1, 1, 1),
    ("no answer", ["noanswer"], 0, 0, 0),
    ("noanswer at all", ["noanswer"], 0, 1 / 2, 0),
    ("Yes", ["no", "yes"], 1, 1, 1),
    ("yes", ["yes it is", "no"], 0, 1 / 2, 0),
]


def test_the_table_is_long_enough_and_repeats_nothing():
    assert len({(p, *t) for p, t, *_ in CASES}) == len(CASES) >= 40


@pytest.mark.parametrize(("prediction", "truths", "exact", "squad", "hotpot"), CASES)
def test_metrics_agree_with_the_official_scripts_and_with_paper(prediction, truths, exact, squad, hotpot):
    assert ours(prediction, truths) == pytest.approx((exact, squad, hotpot))
    assert ours(prediction, truths) == pytest.approx(official(prediction, truths))


PIECES = st.sampled_from(
    ["yes", "no", "noanswer", "The", "a", "an", "x", "Y", "7", "1,0", ".", "-", "é", " "]
)
TEXTS = st.lists(PIECES, max_size=6).map(" ".join) | st.text(max_size=12)


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_metrics_agree_with_the_official_scripts_on_any_text(prediction, truths):
    assert ours(prediction, truths) == pytest.approx(official(prediction, truths))


@pytest.mark.parametrize("name", ["exact_match", "token_f1", "hotpot_f1"])
def test_one_truth_may_be_a_string_and_no_truth_is_an_error(name):
    assert QA[name]("Paris", "paris") == 1
    with pytest.raises(ValueError, match="without gold answers"):
        QA[name]("Paris", [])


@pytest.mark.parametrize(("share", "paid"), [("full", 2 / 3), ("split", 2 / 9)])
def test_a_team_of_three_is_paid_all_of_it_each_or_a_third(share, paid):
    assert QA["shared_f1"]("Paris France", ["Paris"], share, 3) == pytest.approx(paid)


def test_an_unknown_share_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match=r"share is 'half'; known: full, split"):
        QA["shared_f1"]("x", ["x"], "half", 2)


def official_gsm8k(completion):
    """The number behind `####`, without commas; a text, as GSM8K's script compares it."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", completion)
    return match.group(1).strip().replace(",", "") if match else "[invalid]"


@pytest.mark.parametrize(
    ("prediction", "answer", "right"),
    [
        ("3 + 4 = 7\n#### 7", "so 7\n#### 7", 1),
        ("#### 1,234", "#### 1234", 1),
        ("#### -5", "#### 5", 0),
        ("#### -5", "#### -5", 1),
        ("#### 0.5", "#### 0.5", 1),
        ("10 apples\n#### 12", "#### 10", 0),
        ("#### 1,000,000", "#### 1,000,000", 1),
    ],
)
def test_numbers_in_gsm8k_s_form_are_right_when_its_script_says_so(prediction, answer, right):
    assert official_gsm8k(prediction) != "[invalid]"
    assert float(official_gsm8k(prediction) == official_gsm8k(answer)) == right
    assert NUMBERS["final_number"](prediction, answer) == right


def test_numbers_are_compared_as_numbers_and_need_no_marks():
    """Where GSM8K's script compares texts, 7 and 7.00 are one number here; so is one without `####`."""
    assert NUMBERS["final_number"]("#### 7.00", "#### 7") == 1
    assert official_gsm8k("#### 7.00") != official_gsm8k("#### 7")
    assert NUMBERS["final_number"]("It is 7.", "#### 7") == 1
