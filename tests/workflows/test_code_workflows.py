"""reflective_code and coder_tester: rounds, what goes back to whom, and what everyone is paid, by hand."""

import json

import pytest

from masflow.errors import RunError
from masflow.tools.sandbox import ready

TASK = {"question": "add 3 then times 2", "tests": [{"x": str(x), "y": (x + 3) * 2} for x in (0, 1, 2, 5)]}
PLAN = "+ 3 then * 2"


def small(*, plans, codes, reasons=("second * 2",)):
    return {"plan": list(plans), "code": list(codes), "reflect": list(reasons)}


def test_small_reflective_code_pays_the_change_of_the_pass_rate(team, episode):
    # x + 3 * 2 is 6, 7, 8, 11 where 6, 8, 10, 16 are wanted: 1 of 4 passes
    played = episode(
        team("small/reflective_code"), TASK, small(plans=[PLAN], codes=["x + 3 * 2", "( x + 3 ) * 2"])
    )
    assert played.spoken == ["plan@1", "code@2", "reflect@3", "plan@4", "code@5"]
    assert played.totals == pytest.approx([0.25, 0.25, 0.75, 0.75, 0.75])
    assert played.metrics == {"passed": 1, "form": 0, "solved": 1}
    assert played.output == {"code": "( x + 3 ) * 2", "pass_rate": 1}
    assert "not + 3 then * 2 because second * 2" in played.prompts("plan")[1]


def test_small_reflective_code_charges_what_gets_worse(team, episode):
    played = episode(team("small/reflective_code"), TASK, small(plans=[PLAN], codes=["x + 3 * 2", "x +"]))
    assert played.totals == pytest.approx([0.25, 0.25, -0.25, -0.25, -0.25])
    assert played.metrics["solved"] == 0


def test_small_reflective_code_ends_when_all_tests_pass(team, episode):
    played = episode(team("small/reflective_code"), TASK, small(plans=[PLAN], codes=["( x + 3 ) * 2"]))
    assert (played.spoken, played.totals) == (["plan@1", "code@2"], [1, 1])


def test_one_role_alone_tries_again_and_is_paid_the_change(team, episode):
    plan = team("small/single_reflective_code")
    played = episode(plan, TASK, {"code": ["x + 3", "( x + 3 ) * 2"]})
    # x + 3 is 3, 4, 5, 8: none passes
    assert (played.spoken, played.totals) == (["code@1", "code@2"], [0, 1])
    assert "not x + 3 code" in played.prompts("code")[1]


@pytest.mark.parametrize(
    ("mapping", "policies"),
    [
        ("shared", {"policy"}),
        ("separate", {"own.planner", "own.coder", "own.reflector"}),
        ("reflective_code", {"thinker", "own.coder"}),
    ],
)
def test_who_shares_a_model_is_the_mapping_alone(team, mapping, policies):
    for name in ("reflective_code", "small/reflective_code"):
        assert {p.name for p in team(name, mapping).policies} == policies


# -- the real sandbox -----------------------------------------------------------------------------

MBPP = {
    "prompt": "Write a function that doubles a number and adds one.",
    "examples": ["assert f(1) == 3", "assert f(0) == 1", "assert f(7) == 15"],
    "tests": ["assert f(1) == 3", "assert f(0) == 1", "assert f(7) == 15"],
    "imports": [],
}


@pytest.fixture
def sandbox():
    try:
        ready()
    except RunError as error:
        pytest.skip(str(error))


def program(body: str) -> str:
    return f"Here it is:\n```python\ndef f(x):\n    return {body}\n```"


@pytest.mark.usefixtures("sandbox")
def test_reflective_code_pays_what_each_round_changed(team, episode):
    # of f(1) = 3, f(0) = 1, f(7) = 15: 3 passes one, x + 1 one, 2 * x + 1 all
    script = {
        "plan": ["return three", "add one", "double, then add one"],
        "code": [program("3"), program("x + 1"), program("2 * x + 1")],
        "reflect": ["it ignores x", "it doesn't double"],
    }
    played = episode(team("reflective_code"), MBPP, script)
    assert played.spoken == [
        "plan@1", "code@2", "reflect@3", "plan@4", "code@5", "reflect@6", "plan@7", "code@8"
    ]  # fmt: skip
    assert played.totals == pytest.approx([1 / 3, 1 / 3, 0, 0, 0, 2 / 3, 2 / 3, 2 / 3])
    assert played.metrics == {"passed": pytest.approx(1), "form": 0, "solved": 1}
    assert "It passed 1 of 3 tests." in played.prompts("reflect")[0]
    assert "The example failed" not in played.prompts("reflect")[0]
    assert "The example failed" in played.prompts("reflect")[1]
    assert "it doesn't double" in played.prompts("plan")[2] and "return x + 1" in played.prompts("plan")[2]
    assert not any("f(7)" in r.messages[-1].content for r in played.engine.requests)  # hidden tests


@pytest.mark.usefixtures("sandbox")
def test_reflective_code_charges_a_program_that_breaks(team, episode):
    script = {
        "plan": ["p"],
        "code": [program("2 * x + 1 if x else 0"), program("1 / 0")],
        "reflect": ["r"],
    }
    played = episode(team("reflective_code", rounds=2), MBPP, script)
    assert played.totals == pytest.approx([2 / 3, 2 / 3, -2 / 3, -2 / 3, -2 / 3])
    assert played.metrics["solved"] == 0


def test_reflective_code_without_a_program_costs_the_coder_its_form(team, episode):
    played = episode(team("reflective_code"), MBPP, {"plan": ["p"], "code": ["return 2 * x + 1"]})
    assert (played.outcome, played.totals) == ("malformed", [0, -1])


PAIR = {**MBPP, "reference": "def f(x):\n    return 2 * x + 1"}


@pytest.mark.usefixtures("sandbox")
def test_coder_and_tester_speak_at_once_and_go_on_until_their_tests_pass(team, episode):
    script = {
        "code": [program("x + 2"), program("2 * x + 1")],
        "test": [json.dumps({"tests": ["assert f(2) == 5", "assert f(3) == 6"]}),
                 json.dumps({"tests": ["assert f(2) == 5", "assert f(3) == 7"]})],
    }  # fmt: skip
    played = episode(team("coder_tester"), PAIR, script)
    assert played.spoken == ["code@1", "test@1", "code@2", "test@2"]
    # hidden: x + 2 passes f(1) = 3 alone; the reference agrees with one of two tests, then with both;
    # the tester is also paid what the last program passes, which is all
    assert played.totals == pytest.approx([1 / 3, 1 / 2 + 1, 1, 1 + 1])
    for node in ("code", "test"):
        first, second = played.prompts(node)
        assert "f(2)" not in first
        assert "assert f(2) == 5" in second and "assert f(3) == 6" in second  # x + 2: 4 and 5, both fail
    assert not any("2 * x + 1" in r.messages[-1].content for r in played.engine.requests)
    assert not any("f(7)" in r.messages[-1].content for r in played.engine.requests)


@pytest.mark.usefixtures("sandbox")
def test_a_tester_without_tests_and_a_coder_without_a_program_are_paid_nothing_and_go_on(team, episode):
    script = {"code": ["I can't", program("2 * x + 1")], "test": [json.dumps({"tests": []}), "no json"]}
    played = episode(team("coder_tester", rounds=2), PAIR, script)
    assert played.outcome == "ok"
    assert played.spoken == ["code@1", "test@1", "code@2", "test@2"]
    # form -1 for what is malformed; the last program passes all: 1 to the tester, in both of its turns
    assert played.totals == pytest.approx([-1, 0 + 1, 1, -1 + 1])


@pytest.mark.usefixtures("sandbox")
def test_tests_that_say_nothing_earn_the_tester_nothing(team, episode):
    tests = json.dumps({"tests": ["assert True", "assert f(4) == 9"]})
    played = episode(team("coder_tester"), PAIR, {"code": [program("2 * x + 1")], "test": [tests]})
    assert played.spoken == ["code@1", "test@1"]
    assert played.totals == pytest.approx([1, 1 / 2 + 1])
