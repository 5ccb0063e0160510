"""Debate, mixture, taxonomy and teams: concurrency, data-driven loops, sub-workflows, and what they pay."""

import json

import pytest

from masflow.rl.batch import build_batch

QUESTION = {"question": "Capital of Poland?", "answers": ["Warsaw"]}


def said(answer, reason="I know"):
    return f"<reason>{reason}</reason><answer>{answer}</answer>"


def test_debate_lets_everybody_speak_at_once_and_pays_each_its_own_answer(team, episode):
    script = {
        "debater_0": [said("Warsaw"), said("Warsaw")],
        "debater_1": [said("Krakow", "it was once"), said("warsaw")],
        "debater_2": [said("Krakow"), said("Krakow")],
    }
    played = episode(team("debate", "separate", agents=3, rounds=2), QUESTION, script)
    assert played.spoken == ["speak@1"] * 3 + ["speak@2"] * 3
    assert [t.member for t in played.turns] == ["debater_0", "debater_1", "debater_2"] * 2
    assert played.totals == [1, 0, 0, 1, 1, 0]
    assert played.output == {"answer": "warsaw"}
    assert played.metrics == {"right": 0.5, "team": 1}
    assert len({t.policy for t in played.turns}) == 3  # a model each, by the mapping alone
    first, second = played.prompts("speak")[:3], played.prompts("speak")[3:]
    assert not any("Others have answered" in p for p in first)
    assert second[0].count("- Krakow") == 2
    assert "- Krakow, because it was once" in second[0]
    assert "- Warsaw" not in second[0]  # one's own answer isn't among the others'


def test_debate_shows_at_most_five_of_many(team, episode):
    played = episode(team("debate", agents=8, rounds=2), QUESTION, {"*": lambda r: said(r.member)})
    assert {p.count("because") for p in played.prompts("speak")[8:]} == {5}
    again = episode(team("debate", agents=8, rounds=2), QUESTION, {"*": lambda r: said(r.member)})
    assert again.prompts("speak") == played.prompts("speak")  # the shuffle comes from the turn's seed


def test_debate_goes_on_when_one_agent_is_malformed(team, episode):
    script = {"debater_0": ["no tags", said("Warsaw")], "*": [said("Warsaw")]}
    played = episode(team("debate", agents=3, rounds=2), QUESTION, script)
    assert (played.outcome, played.output) == ("ok", {"answer": "warsaw"})
    assert played.totals == [0, 1, 1, 1, 1, 1]
    assert played.prompts("speak")[4].count("- Warsaw") == 1  # what is malformed isn't shown to the others


def test_debate_compares_each_copy_in_each_round_with_itself(team, episode):
    plan = team("debate", agents=2, rounds=2)
    found = [
        episode(plan, QUESTION, {"*": [said(answer)]}, sample).scored
        for sample, answer in enumerate(("Warsaw", "x"))
    ]
    keys = [(g.key[2], g.key[3][-1].visit, len(g.turns)) for g in build_batch(plan, found, 2, 1).groups]
    assert keys == [("debater_0", 1, 2), ("debater_1", 1, 2), ("debater_0", 2, 2), ("debater_1", 2, 2)]


def test_mixture_asks_proposers_at_once_and_combines_what_is_well_formed(team, episode):
    script = {
        "proposer_0": ["<answer>Warsaw</answer>"],
        "proposer_1": ["<answer>Krakow</answer>"],
        "proposer_2": ["Warsaw"],
        "combine": ["<answer>Warsaw in Poland</answer>"],
    }
    played = episode(team("mixture", "separate"), QUESTION, script)
    assert played.spoken == ["propose@1"] * 3 + ["combine@2"]
    assert "- Warsaw\n- Krakow\n" in played.prompts("combine")[0]
    # F1 of "Warsaw in Poland" is 1/2; a proposer has half of its own F1 on top
    assert played.totals == pytest.approx([1, 0.5, 0.5, 0.5])
    assert len({t.policy for t in played.turns}) == 4


DOCUMENTS = {"documents": [f"text {i}" for i in range(7)], "topics": ["rivers", "cities", "people"]}


def categories(*names):
    return json.dumps({"categories": names})


def test_taxonomy_goes_over_the_summaries_batch_by_batch(team, episode):
    script = {
        "summarise": lambda r: f"about {r.item}",
        "generate": [categories("rivers")],
        "refine": [categories("rivers", "towns"), categories("rivers", "cities", "towns")],
        "review": [categories("Rivers", "cities")],
    }
    played = episode(team("taxonomy", batch=3), DOCUMENTS, script)
    assert played.spoken == ["summarise@1"] * 7 + ["generate@2", "refine@3", "refine@4", "review@5"]
    assert "- about 0\n- about 1\n- about 2" in played.prompts("generate")[0]
    assert "- about 3\n- about 4\n- about 5" in played.prompts("refine")[0]
    assert "- about 6" in played.prompts("refine")[1]
    assert "Categories so far: rivers, towns" in played.prompts("refine")[1]
    assert played.output == {"categories": ["Rivers", "cities"]}
    assert played.totals == pytest.approx([2 * 2 / (2 + 3)] * 11)


def test_taxonomy_of_one_batch_is_never_refined(team, episode):
    script = {
        "summarise": ["s"],
        "generate": [categories("rivers")],
        "review": [categories(*DOCUMENTS["topics"])],
    }
    played = episode(team("taxonomy", batch=10), DOCUMENTS, script)
    assert played.spoken[-2:] == ["generate@2", "review@3"]
    assert played.metrics["coverage"] == 1


def test_teams_hand_work_down_and_only_the_last_message_comes_back(team, episode):
    script = {
        "lead": [
            json.dumps({"next": "research", "task": "find the river"}),
            json.dumps({"next": "writing", "task": None}),
            json.dumps({"next": "finish"}),
        ],
        "research/head": [
            json.dumps({"next": "search", "message": "start with Warsaw"}),
            json.dumps({"next": "read", "message": "read it"}),
            json.dumps({"next": "finish", "message": "it is the Vistula"}),
        ],
        "searcher": ["<query>Warsaw capital</query>"],
        "reader": ["Warsaw lies on the Vistula"],
        "writing/head": [json.dumps({"next": n}) for n in ("write", "criticise", "write", "finish")],
        "writer": ["It is a river.", "It is the Vistula."],
        "critic": ["name it"],
    }
    played = episode(
        team("teams", "separate"), {"goal": "name the river", "answers": ["the Vistula"]}, script
    )
    assert played.outcome == "ok"
    assert [t.node for t in played.turns] == [
        "lead", "research/head", "research/search", "research/head", "research/read", "research/head", "lead",
        "writing/head", "writing/write", "writing/head", "writing/criticise", "writing/head", "writing/write",
        "writing/head", "lead",
    ]  # fmt: skip
    assert played.output == {"text": "It is the Vistula."}
    assert played.totals == pytest.approx([2 / 4] * 15)  # "it is vistula" shares one of 3 + 1 words
    last = played.prompts("lead")[-1]
    assert "- research: it is the Vistula\n- writing: It is the Vistula." in last
    assert "start with Warsaw" not in last  # what a team said inside stays inside
    assert "Goal: find the river" in played.prompts("research/head")[0]
    assert "Goal: name the river" in played.prompts("writing/head")[0]
    assert {t.policy for t in played.turns} == {
        "own.lead", "own.research.head", "own.research.searcher", "own.research.reader", "own.writing.head",
        "own.writing.writer", "own.writing.critic",
    }  # fmt: skip


def test_teams_call_that_is_made_twice_starts_afresh(team, episode):
    script = {
        "lead": [
            json.dumps({"next": "research"}),
            json.dumps({"next": "research"}),
            json.dumps({"next": "finish"}),
        ],
        "research/head": lambda r: json.dumps({"next": "finish", "message": f"visit {r.visit}"}),
    }
    played = episode(team("teams"), {"goal": "g", "answers": ["a"]}, script)
    assert "- research: visit 1\n- research: visit 1" in played.prompts("lead")[-1]
    assert played.totals == [0] * 5  # nothing was written: the reward's `otherwise`
