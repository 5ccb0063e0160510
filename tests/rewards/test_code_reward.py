"""Rewards of programs: the shares, counted by hand."""

import importlib.util
import os
from pathlib import Path

import pytest

from masflow.errors import RunError
from masflow.tools.sandbox import ready

spec = importlib.util.spec_from_file_location(
    "code_reward", Path(__file__).resolve().parents[2] / "rewards" / "code.py"
)
assert spec and spec.loader
reward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reward)


@pytest.fixture(autouse=True)
def sandboxed(monkeypatch):
    monkeypatch.setenv("MASFLOW_SANDBOX", "bubblewrap")
    try:
        ready("bubblewrap")
    except RunError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


TESTS = [
    "assert area(1) == 3",
    "assert area(2) == 12",
    "assert area(0) == 0",
    "assert math.floor(area(1.5)) == 6",
]


def test_the_pass_rate_is_the_share_of_tests_that_pass():
    imports = ["import math"]
    assert reward.pass_rate("def area(r): return 3 * r * r", TESTS, imports) == 1.0
    assert reward.pass_rate("def area(r): return 3 * r", TESTS, imports) == 0.5  # of 1 and 0; 6 isn't 12
    assert reward.pass_rate("def area(r): return 3 * r * r", TESTS) == 0.75  # nobody imports math
    assert reward.pass_rate("def area(", TESTS, imports) == 0.0
    assert reward.pass_rate("", TESTS, imports) == reward.pass_rate(None, TESTS, imports) == 0.0


def test_a_task_without_tests_is_no_zero():
    with pytest.raises(ValueError, match="without tests"):
        reward.pass_rate("def area(r): return 3", [])


def test_agreement_is_the_share_of_different_tests_that_a_right_program_passes():
    right = "def area(r): return 3 * r * r"
    assert reward.agreement(["assert area(1) == 3", "assert area(2) == 6"], right) == 0.5
    assert (
        reward.agreement(["assert area(1) == 3", " assert area(1) == 3\n", "assert area(2) == 6"], right)
        == 0.5
    )
    assert reward.agreement(["assert area(1) == 3", "assert area(2) > 6"], right) == 1.0


def test_tests_that_say_nothing_agree_with_nobody():
    right = "def area(r): return 3 * r * r"
    assert reward.agreement(["assert True", "pass", "area", "x = 1", "assert area(1) == 3"], right) == 0.2
    assert reward.agreement([], right) == reward.agreement(None, right) == 0.0
