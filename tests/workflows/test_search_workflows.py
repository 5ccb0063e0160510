"""Research hop, decomposition, evidence and M-ASK: what each episode does, step by step, and what it pays."""

import json

import pytest

from masflow.rl.batch import build_batch

CLAIM = {
    "claim": "Marie Curie was born in a city on the Vistula.",
    "titles": ["Marie Curie", "Warsaw", "Baltic Sea"],
}
QUESTION = {"question": "Which river flows through the birthplace of Marie Curie?", "answers": ["Vistula"]}


def test_research_hop_searches_the_claim_then_what_the_notes_ask_for(team, episode):
    plan = team("research_hop", hops=3, top_k=1)
    script = {
        "note": ["Curie: born in Warsaw, river unknown", "Warsaw: on the Vistula"],
        "ask": ["<query>Warsaw capital</query>", "<query>longest river of Poland</query>"],
    }
    played = episode(plan, CLAIM, script)
    assert played.outcome == "ok"
    assert played.spoken == ["note@1", "ask@2", "note@3", "ask@4"]  # the last of three hops takes no note
    searches = [e.args["query"] for e in played.trajectory.effects if e.kind == "tool"]
    assert sorted(searches) == sorted([CLAIM["claim"], "Warsaw capital", "longest river of Poland"])
    assert played.output["titles"] == ["Marie Curie", "Warsaw", "Vistula"]
    assert played.output["notes"] == script["note"]
    assert played.totals == pytest.approx([2 / 3] * 4)  # two of the three gold titles, shared by all
    assert "- Curie: born in Warsaw, river unknown\n- Warsaw: on the Vistula" in played.prompts("ask")[1]
    assert "Warsaw: Warsaw, the capital" in played.prompts("note")[1]


def test_research_hop_keeps_a_passage_once_and_hides_the_titles(team, episode):
    played = episode(
        team("research_hop", top_k=2), CLAIM, {"note": ["n"], "ask": ["<query>Marie Curie</query>"]}
    )
    assert len(played.output["titles"]) == len(set(played.output["titles"]))
    assert not any("Baltic" in r.messages[-1].content for r in played.engine.requests)


def test_research_hop_ends_at_a_malformed_query_and_still_scores_what_was_found(team, episode):
    played = episode(team("research_hop", top_k=1), CLAIM, {"note": ["n"], "ask": ["no tags"]})
    assert (played.outcome, played.spoken) == ("malformed", ["note@1", "ask@2"])
    assert played.totals == pytest.approx([1 / 3, 1 / 3])


QUERIES = json.dumps({"queries": ["Marie Curie born", "Warsaw river", "Vistula sea", "one too many"]})


def test_decompose_searches_every_sub_query_and_answers(team, episode):
    played = episode(
        team("decompose"), QUESTION, {"split": [QUERIES], "answer": ["<answer>the river Vistula</answer>"]}
    )
    assert played.spoken == ["split@1", "answer@2"]
    assert sum(e.kind == "tool" for e in played.trajectory.effects) == 3  # at most three sub-queries count
    assert "1. Marie Curie, a physicist" in played.prompts("answer")[0]
    assert played.metrics == {"f1": pytest.approx(2 / 3), "form": 0}
    assert played.totals == pytest.approx([2 / 3, 2 / 3])
    assert played.output == {"answer": "the river Vistula"}


def test_decompose_pays_nothing_and_half_a_point_less_for_a_malformed_split(team, episode):
    played = episode(team("decompose"), QUESTION, {"split": ["Marie Curie?"]})
    assert (played.outcome, played.spoken, played.totals) == ("malformed", ["split@1"], [-0.5])


def test_evidence_extracts_once_a_sub_query_at_the_same_time(team, episode):
    script = {
        "split": [QUERIES],
        "extract": lambda request: (
            f"<evidence>fact {request.item}</evidence>" if request.item != 1 else "nothing"
        ),
        "answer": ["<answer>Vistula</answer>"],
    }
    played = episode(team("evidence"), QUESTION, script)
    assert played.spoken == ["split@1", "extract@2", "extract@2", "extract@2", "answer@3"]
    prompt = played.prompts("answer")[0]
    assert "- Marie Curie born: fact 0\n- Warsaw river: none\n- Vistula sea: fact 2" in prompt
    assert "We look for: Warsaw river" in played.prompts("extract")[1]
    # a malformed item costs its own turn alone, and the episode goes on
    assert (played.outcome, played.totals) == ("ok", [1, 1, 0.5, 1, 1])


def test_evidence_compares_the_same_sub_query_across_episodes(team, episode):
    plan = team("evidence")
    found = []
    for sample, answer in enumerate(("Vistula", "Danube")):
        script = {
            "split": [QUERIES],
            "extract": ["<evidence>e</evidence>"],
            "answer": [f"<answer>{answer}</answer>"],
        }
        found.append(episode(plan, QUESTION, script, sample).scored)
    batch = build_batch(plan, found, 2, 1)
    assert [(g.key[2], g.key[3][-1].item, len(g.turns)) for g in batch.groups] == [
        ("decomposer", None, 2), ("extractor", 0, 2), ("extractor", 1, 2), ("extractor", 2, 2),
        ("answerer", None, 2),
    ]  # fmt: skip
    assert batch.stats["learnable_group_frac"] == 1


PLAN = json.dumps(
    {"steps": [{"question": "Where was she born?", "answer": "Paris"}], "answer": "river Seine"}
)
UPDATES = [
    json.dumps({"step": 1, "question": "Where was she born?", "answer": "Warsaw"}),
    json.dumps({"step": None, "question": "Its river?", "answer": "Vistula"}),
]
SEARCH = "<action>search</action><query>Marie Curie Warsaw</query>"


def m_ask(*, searches, answers, updates=UPDATES):
    return {
        "plan": [PLAN],
        "search": searches,
        "summarise": ["<evidence>born in Warsaw</evidence>", "none at all"],
        "update": updates,
        "answer": [f"<answer>{answer}</answer>" for answer in answers],
    }


def test_m_ask_pays_answers_their_f1_and_the_others_what_it_gained(team, episode):
    script = m_ask(searches=[SEARCH, SEARCH, "<action>stop</action>"], answers=["some river", "Vistula"])
    script["summarise"] = ["<evidence>born in Warsaw</evidence>"]
    played = episode(team("m_ask", "m_ask", top_k=2), {**QUESTION, "answers": ["river Vistula"]}, script)
    assert [t.node for t in played.turns] == [
        "plan", "search", "summarise", "update", "answer", "search", "summarise", "update", "answer", "search"
    ]  # fmt: skip
    assert [t.superstep for t in played.turns] == list(range(1, 11))
    # F1 against "river Vistula": "river Seine" 1/2, "some river" 1/2, "Vistula" 2/3; a stop gains nothing
    assert played.totals == pytest.approx([1 / 2, 0, 0, 0, 1 / 2, 1 / 6, 1 / 6, 1 / 6, 2 / 3, 0])
    assert played.metrics["f1"] == pytest.approx(2 / 3)
    assert played.output["answer"] == "Vistula"
    assert [s["answer"] for s in played.output["steps"]] == ["Warsaw", "Vistula"]
    policies = {t.role: t.policy for t in played.turns}
    assert policies["planner"] == policies["answerer"] == "reasoner"
    assert len(set(policies.values())) == 4


def test_m_ask_stops_after_its_last_round(team, episode):
    script = m_ask(searches=[SEARCH], answers=["river Vistula"])
    script["summarise"] = ["<evidence>e</evidence>"]
    played = episode(team("m_ask", rounds=2), QUESTION, script)
    assert played.spoken[-1] == "answer@9"
    assert played.trajectory.names["visits"]["answer"] == 2


def test_m_ask_that_breaks_in_a_round_pays_the_broken_turn_for_its_form(team, episode):
    played = episode(team("m_ask"), QUESTION, m_ask(searches=["what?"], answers=[]))
    assert (played.outcome, played.spoken) == ("malformed", ["plan@1", "search@2"])
    assert played.totals == pytest.approx(
        [0, -1]
    )  # "river Seine" has F1 0; no measurement follows the search


def test_m_ask_that_breaks_in_an_answer_measures_nothing_there(team, episode):
    script = m_ask(searches=[SEARCH], answers=[])
    script |= {"plan": [PLAN.replace("Seine", "Vistula")], "answer": ["Vistula"]}
    played = episode(team("m_ask"), QUESTION, script)
    # F1 falls from 2/3 to the 0 that stands for a malformed answer
    assert played.totals == pytest.approx([2 / 3, -2 / 3, -2 / 3, -2 / 3, -1])
