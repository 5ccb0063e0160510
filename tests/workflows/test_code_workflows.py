"""reflective_code and coder_tester: rounds, what goes back to whom, and what everyone is paid, by hand."""

import pytest

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
