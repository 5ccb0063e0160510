"""Function calls against gold ones: cases by hand, and every row of the leaderboard's where they are here."""

import gzip
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CALLS = runpy.run_path(str(ROOT / "rewards" / "calls.py"))
AREA = {"area": {"base": [10], "height": [5], "unit": ["units", ""]}}
PLAY = [{"play": {"artist": ["Taylor Swift"]}}, {"play": {"artist": ["Maroon 5", "Maroon Five"]}}]


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "gold", "score"),
    [
        ([call("area", base=10, height=5)], [AREA], 1),  # "" in the gold: it may be left out
        ([call("area", base=10, height=5, unit="Units")], [AREA], 1),
        ([call("area", base=10, height=5, unit="metres")], [AREA], 0),
        ([call("area", base=10.0, height=5)], [AREA], 1),  # an integer, as JSON Schema has it
        ([call("area", base="10", height=5)], [AREA], 0),
        ([call("area", base=10)], [AREA], 0),
        ([call("area", base=10, height=5, colour="red")], [AREA], 0),
        ([call("volume", base=10, height=5)], [AREA], 0),
        ([call("area", base=10, height=5)] * 2, [AREA], 0),
        ([], [AREA], 0),
        ([{"name": "area", "arguments": "base=10"}], [AREA], 0),
        ([{"name": "area"}], [AREA], 0),
        ([{"arguments": {"base": 10, "height": 5}}], [AREA], 0),
        ([call("play", artist="maroon five"), call("play", artist="Taylor-Swift")], PLAY, 1),  # any order
        ([call("play", artist="Maroon 5")] * 2, PLAY, 0),
        ([call("f", x=True)], [{"f": {"x": [True]}}], 1),
        ([call("f", x=1)], [{"f": {"x": [True]}}], 0),
        ([call("f", x=True)], [{"f": {"x": [1]}}], 0),
        ([call("f", x=None)], [{"f": {"x": [None, "a"]}}], 1),
        ([call("f", x=[1, 2])], [{"f": {"x": [[1, 2.0]]}}], 1),
        ([call("f", x=[2, 1])], [{"f": {"x": [[1, 2]]}}], 0),
        ([call("f", x=["A B", "c"])], [{"f": {"x": [["ab", "C."]]}}], 1),
        ([call("f", x="1")], [{"f": {"x": [["1"]]}}], 0),
        ([call("f", x={"a": 1})], [{"f": {"x": [{"a": [1, 2], "b": ["", 3]}]}}], 1),
        ([call("f", x={"a": 3})], [{"f": {"x": [{"a": [1, 2]}]}}], 0),
        ([call("f", x=[{"a": 1}])], [{"f": {"x": [[{"a": [1]}]]}}], 1),
        ([call("f")], [{"f": {}}], 1),
        ([], None, 1),  # no function fits the question
        ([call("f")], None, 0),
    ],
)
def test_calls_are_right_by_name_and_arguments(calls: Any, gold: Any, score: float):
    assert CALLS["calls_match"](calls, gold) == score


def test_a_call_fits_one_gold_call_however_these_overlap():
    gold = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]  # 1 fits both: the first must take the other call
    assert CALLS["calls_match"]([call("f", x=1), call("f", x=2)], gold) == 1
    assert CALLS["calls_match"]([call("f", x=2), call("f", x=2)], gold) == 0


@pytest.mark.parametrize(
    ("calls", "gold", "score"),
    [
        ([call("play", artist="Maroon 5")], PLAY, 2 / 3),  # precision 1, recall 1/2
        ([call("play", artist="Maroon 5"), call("stop")], PLAY, 0.5),
        ([call("stop")], PLAY, 0),
        ([], PLAY, 0),
        ([], [], 1),
        ([call("stop")], None, 0),
    ],
)
def test_some_right_calls_are_worth_something(calls: Any, gold: Any, score: float):
    assert CALLS["calls_f1"](calls, gold) == pytest.approx(score)


def first_values(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Arguments as gold allows them: of each the first right value, left out where that is ""."""
    return {key: plain(allowed[0]) for key, allowed in values.items() if allowed[0] != ""}


def plain(right: Any) -> Any:
    if isinstance(right, dict):
        return first_values({key: v if isinstance(v, list) else [v] for key, v in right.items()})
    return [plain(each) for each in right] if isinstance(right, list) else right


@pytest.mark.parametrize("name", ["simple_python", "multiple", "parallel", "irrelevance"])
def test_gold_calls_of_the_leaderboard_are_right_and_others_are_not(name: str):
    data = Path(os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared" / "data")
    file = data / "bfcl" / f"{name}.jsonl.gz"
    if not file.exists():
        pytest.skip(f"{file} isn't on this machine")
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    for row in rows:
        gold = row["ground_truth"]
        calls = [call(n, **first_values(values)) for want in gold or [] for n, values in want.items()]
        assert CALLS["calls_match"](calls, gold) == 1, row["id"]
        assert CALLS["calls_match"]([*calls, call("another")], gold) == 0, row["id"]
        assert CALLS["calls_f1"](calls[::-1], gold) == 1, row["id"]
        if calls:
            assert CALLS["calls_match"](calls[1:], gold) == 0, row["id"]
    assert len(rows) > 190
