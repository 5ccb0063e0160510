"""math_team: who speaks when, and what everyone is paid, worked out by hand."""

import pytest

TASK = {"question": "Ann has 3 pens, buys 4, loses 2. How many has she?", "answer": "5"}
RIGHT = "<comment>all steps hold</comment><verdict>right</verdict>"
WRONG = "<comment>she loses two</comment><verdict>wrong</verdict>"


def test_a_solution_that_is_found_right_goes_to_the_finalizer_at_once(team, episode):
    script = {
        "solve": ["3 + 4 = 7\n7 - 2 = 5\nAnswer: 5"],
        "verify": [RIGHT],
        "final": ["<answer>5</answer>"],
    }
    played = episode(team("math_team"), TASK, script)
    assert played.spoken == ["solve@1", "verify@2", "final@3"]
    assert played.totals == [1, 1, 1]
    assert played.metrics == {"accuracy": 1, "form": 0, "solved": 1, "judged": 1, "refined": None}
    assert played.output == {"answer": "5", "solution": "3 + 4 = 7\n7 - 2 = 5\nAnswer: 5"}


def test_a_solution_that_is_found_wrong_is_refined_with_the_comment_and_replaced(team, episode):
    script = {
        "solve": ["3 + 4 = 7\nAnswer: 7"],
        "verify": [WRONG],
        "refine": ["7 - 2 = 5\nAnswer: 5"],
        "final": ["<answer>$5.00</answer>"],
    }
    played = episode(team("math_team", "separate"), TASK, script)
    assert played.spoken == ["solve@1", "verify@2", "refine@3", "final@4"]
    assert played.totals == [1, 1, 1, 1]  # the first solution was wrong, yet all four are paid for the team
    assert played.metrics == {"accuracy": 1, "form": 0, "solved": 0, "judged": 1, "refined": 1}
    assert "she loses two" in played.prompts("refine")[0] and "3 + 4 = 7" in played.prompts("refine")[0]
    assert "7 - 2 = 5" in played.prompts("final")[0] and "3 + 4 = 7" not in played.prompts("final")[0]
    assert len({t.policy for t in played.turns}) == 4


def test_a_right_solution_that_the_team_spoils_pays_nobody(team, episode):
    script = {
        "solve": ["Answer: 5"],
        "verify": [WRONG],
        "refine": ["3 - 2 = 1\nAnswer: 1"],
        "final": ["<answer>1</answer>"],
    }
    played = episode(team("math_team"), TASK, script)
    assert played.totals == [0, 0, 0, 0]
    assert played.metrics == {"accuracy": 0, "form": 0, "solved": 1, "judged": 0, "refined": 0}


@pytest.mark.parametrize(
    "broken", ["right", "<verdict>right</verdict>", "<comment>c</comment><verdict>maybe</verdict>"]
)
def test_a_malformed_verdict_ends_the_episode_and_costs_the_verifier_alone(team, episode, broken):
    played = episode(team("math_team"), TASK, {"solve": ["Answer: 5"], "verify": [broken]})
    assert (played.outcome, played.spoken) == ("malformed", ["solve@1", "verify@2"])
    assert played.totals == [0, -1]  # no final answer: 0 to both; no verdict: -1
    assert played.metrics["solved"] == 1


def test_the_answer_is_hidden_from_every_role(team, episode):
    script = {"solve": ["?"], "verify": [WRONG], "refine": ["?"], "final": ["<answer>0</answer>"]}
    played = episode(team("math_team"), {**TASK, "answer": "987654"}, script)
    assert len(played.turns) == 4
    assert not any("987654" in r.messages[-1].content for r in played.engine.requests)


@pytest.mark.parametrize(
    ("mapping", "policies"),
    [
        ("shared", {"policy"}),
        ("separate", {"own.solver", "own.verifier", "own.refiner", "own.finalizer"}),
        ("math_team", {"writer", "own.verifier", "own.finalizer"}),
    ],
)
def test_who_shares_a_model_is_the_mapping_alone(team, mapping, policies):
    assert {p.name for p in team("math_team", mapping).policies} == policies
