"""qd_answer, qd_evidence and m_ask: what hand-written episodes pay, worked out on paper."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

QUESTION = {
    "question": "Which river flows through the birthplace of Marie Curie?",
    "answers": ["river Vistula"],
}
QUERIES = json.dumps({"queries": ["Marie Curie born", "Warsaw river", "Vistula sea"]})


def evidence_script(answer: str, extracts=("Warsaw", "Vistula", "Baltic")):
    return {
        "split": [QUERIES],
        "extract": lambda request: f"<evidence>{extracts[request.item]}</evidence>",
        "answer": [answer],
    }


def test_qd_answer_pays_the_whole_f1_to_both(team, episode):
    played = episode(
        team("qd_answer"), QUESTION, {"split": [QUERIES], "answer": ["<answer>Vistula</answer>"]}
    )
    assert played.spoken == ["split@1", "answer@2"]
    assert played.totals == pytest.approx([2 / 3, 2 / 3])  # one of one word said, one of two wanted: 2·1/3
    assert played.metrics == pytest.approx({"paid": 2 / 3, "form": 0, "f1": 2 / 3, "exact": 0})


def test_qd_answer_split_pays_half_to_each_and_reports_the_whole(team, episode):
    plan = team("qd_answer", share="split")
    played = episode(plan, QUESTION, {"split": [QUERIES], "answer": ["<answer>Vistula</answer>"]})
    assert played.totals == pytest.approx([1 / 3, 1 / 3])
    assert played.metrics["f1"] == pytest.approx(2 / 3)


def test_qd_answer_charges_one_for_a_malformed_reply(team, episode):
    plan = team("qd_answer")
    played = episode(plan, QUESTION, {"split": ["Marie Curie?"]})
    assert (played.outcome, played.spoken, played.totals) == ("malformed", ["split@1"], [-1])
    played = episode(plan, QUESTION, {"split": [QUERIES], "answer": ["Vistula"]})
    assert (played.outcome, played.totals) == ("malformed", [0, -1])  # there is no answer: F1 is 0


def test_qd_answer_has_no_pity_with_half_a_yes(team, episode):
    task = {"question": "Is Warsaw on the Vistula?", "answers": ["yes"]}
    for said, paid in (("yes, it is", 0), ("Yes.", 1), ("no", 0)):
        script = {"split": [QUERIES], "answer": [f"<answer>{said}</answer>"]}
        assert episode(team("qd_answer"), task, script).totals == [paid, paid]


def test_qd_answer_searches_at_most_three_and_shows_what_was_found(team, episode):
    split = json.dumps({"queries": ["Marie Curie born", "Warsaw river", "Vistula sea", "one too many"]})
    script = {"split": [split], "answer": ["<answer>river Vistula</answer>"]}
    played = episode(team("qd_answer", top_k=1), QUESTION, script)
    assert sum(e.kind == "tool" for e in played.trajectory.effects) == 3
    assert "Marie Curie" in played.prompts("answer")[0]
    assert played.totals == [1, 1]


def test_qd_evidence_pays_every_role_whole_or_a_third(team, episode):
    for share, paid in (("full", 2 / 3), ("split", 2 / 9)):
        script = evidence_script("<answer>Vistula</answer>")
        played = episode(team("qd_evidence", share=share), QUESTION, script)
        assert [t.role for t in played.turns] == ["decomposer", *["extractor"] * 3, "answerer"]
        assert played.totals == pytest.approx([paid] * 5)
    assert "- Warsaw river: Vistula" in played.prompts("answer")[0]


def test_qd_evidence_charges_the_malformed_extractor_alone(team, episode):
    script = evidence_script("<answer>river Vistula</answer>")
    right = script["extract"]
    script["extract"] = lambda request: "nothing" if request.item == 1 else right(request)
    played = episode(team("qd_evidence"), QUESTION, script)
    assert (played.outcome, played.totals) == ("ok", [1, 1, 0, 1, 1])  # 1 for the answer, -1 for the form
    assert "- Warsaw river: none" in played.prompts("answer")[0]


PLAN = json.dumps(
    {"steps": [{"question": "Where was she born?", "answer": "Paris"}], "answer": "river Seine"}
)
UPDATE = json.dumps({"step": 1, "question": "Where was she born?", "answer": "Warsaw"})
SEARCH = "<action>search</action><query>Marie Curie Warsaw</query>"
STOP = "<action>stop</action>"


def m_ask(searches, answers):
    return {
        "plan": [PLAN],
        "search": searches,
        "summarise": ["<evidence>born in Warsaw</evidence>"],
        "update": [UPDATE],
        "answer": [f"<answer>{answer}</answer>" for answer in answers],
    }


def test_m_ask_charges_a_round_that_makes_the_answer_worse(team, episode):
    played = episode(team("m_ask"), QUESTION, m_ask([SEARCH, SEARCH, STOP], ["river Vistula", "Danube"]))
    # F1: "river Seine" 1/2, "river Vistula" 1, "Danube" 0; gains 1/2 and -1; the stop gains nothing
    first, second = [1 / 2] * 3 + [1], [-1] * 3 + [0]
    assert played.totals == pytest.approx([1 / 2, *first, *second, 0])
    assert played.metrics["f1"] == 0


def test_m_ask_that_stops_at_once_pays_its_planner_alone(team, episode):
    played = episode(team("m_ask"), QUESTION, m_ask([STOP], []))
    assert (played.spoken, played.totals) == (["plan@1", "search@2"], pytest.approx([1 / 2, 0]))
    assert played.output["answer"] == "river Seine"


def test_m_ask_s_malformed_answer_counts_as_zero_for_those_before_it(team, episode):
    script = m_ask([SEARCH], [])
    script["answer"] = ["Vistula"]
    played = episode(team("m_ask"), QUESTION, script)
    # the malformed answer measures 0: the round lost the plan's 1/2, and the answerer pays 1 for the form
    assert (played.outcome, played.totals) == (
        "malformed",
        pytest.approx([1 / 2, -1 / 2, -1 / 2, -1 / 2, -1]),
    )


@pytest.mark.parametrize(("name", "shared"), [("qd_evidence", "reader"), ("m_ask", "reasoner")])
def test_shared_separate_and_partial_by_the_mapping_alone(team, name, shared):
    def policies(mapping: str) -> set[str]:
        return set(team(name, mapping).policy_of.values())

    roles = {node.role for node in team(name).graph.nodes if node.kind == "role"}
    own = {role for role in roles if team(name, name).policy_of[role] != shared}
    assert policies("shared") == {"policy"}
    assert policies("separate") == {f"own.{role}" for role in roles}
    assert policies(name) == {shared, *(f"own.{role}" for role in own)} and len(own) == len(roles) - 2


@pytest.mark.parametrize("name", ["qd_answer", "qd_evidence", "m_ask"])
def test_a_team_is_said_in_sixty_lines_with_its_prompts_beside_it(name):
    text = (ROOT / "workflows" / f"{name}.yaml").read_text()
    assert len(text.splitlines()) <= 60
    assert text.count("prompt:") == text.count(".md")
    code = (ROOT / "rewards" / "qa.py").read_text().splitlines()
    assert sum(bool(line.strip()) and not line.strip().startswith('"""') for line in code) <= 40
