"""The data of `examples/small/qa`: what the script writes, and what is in it."""

import gzip
import json
import runpy
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.models.scripted import ScriptedEngine
from masflow.project import load
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "small" / "qa"
MADE = runpy.run_path(str(DATA / "make_data.py"))
TEAMS = ("qd_answer", "qd_evidence", "m_ask")


def text_of(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("ascii")


def rows_of(file: str) -> list[dict]:
    return [json.loads(line) for line in text_of(DATA / file).splitlines()]


def test_the_script_writes_the_shipped_files(tmp_path):
    MADE["main"](tmp_path)
    made = {path.name: text_of(path) for path in tmp_path.iterdir()}
    assert made == {path.name: text_of(path) for path in DATA.glob("*.jsonl*")}
    assert all(path.stat().st_size < 300_000 for path in DATA.iterdir() if path.is_file())


@pytest.mark.parametrize("kind", ["pair", "hop"])
def test_no_person_and_no_club_is_both_trained_and_held_out(kind):
    people, clubs = MADE["draw_names"]()
    held_people = set(people[: MADE["NUM_HELD"]])
    held = held_people | set(clubs[: MADE["NUM_HELD_CLUBS"]])
    names = set(people) | set(clubs)
    teams = ("m_ask",) if kind == "hop" else ("qd_answer", "qd_evidence")
    shown = [json.dumps(row) for team in teams for row in rows_of(f"{team}_demos.jsonl.gz")]
    trained = {w for row in rows_of(f"{kind}_train.jsonl") for w in row["question"].split()} & names
    shown_names = {word for row in shown for word in row.replace('"', " ").split()} & names
    held_out = rows_of(f"{kind}_eval.jsonl")
    asked = {word for row in held_out for word in row["question"].split()} & names
    assert asked <= held_people and len(held_out) >= 200
    assert not (trained | shown_names) & held


def facts_of_corpus() -> dict[tuple[str, str], str]:
    """(name, relation) → value, read out of the sentences."""
    facts = {}
    for row in rows_of("corpus.jsonl"):
        words = row["text"].split()
        key = (words[3], words[1]) if words[0] == "the" else (words[0], words[3])
        facts[key] = words[-1]
    return facts


def test_answers_stand_in_the_facts_that_are_asked_for():
    facts = facts_of_corpus()
    for row in rows_of("pair_eval.jsonl"):
        *_, r, _, p, _, _, s, _, q = row["question"].split()
        assert row["answers"] == [f"{facts[p, r]} {facts[q, s]}"]
    for row in rows_of("hop_eval.jsonl"):
        *_, r, _, _, _, _, p = row["question"].split()
        assert row["answers"] == [facts[facts[p, "club"], r]]


@pytest.mark.parametrize("team", TEAMS)
def test_one_role_alone_is_shown_the_same_tasks_queries_and_passages(team):
    together, alone = rows_of(f"{team}_demos.jsonl.gz"), rows_of(f"single_{team}_demos.jsonl.gz")
    assert [row["task"] for row in together] == [row["task"] for row in alone]
    passages = [
        [[t["value"] for t in row["turns"] if "value" in t] for row in rows] for rows in (together, alone)
    ]
    assert passages[0] == passages[1]


@pytest.mark.parametrize("team", ["qd_answer", "qd_evidence"])
def test_demonstrated_queries_and_answers_are_as_sloppy_as_the_script_says(team):
    rows = rows_of(f"{team}_demos.jsonl.gz")
    queries = [q.split() for row in rows for q in json.loads(row["turns"][0]["reply"])["queries"]]
    assert sum(len(q) == 2 for q in queries) / len(queries) == pytest.approx(0.4, abs=0.03)
    answers = [row["turns"][-1]["reply"].split()[1:-1] for row in rows]
    assert sum(len(a) == 2 for a in answers) / len(answers) == pytest.approx(0.5, abs=0.03)


def right_queries(task: dict) -> list[str]:
    *_, r, _, p, _, _, s, _, q = task["question"].split()
    return [f"{r} {p}", f"{s} {q}"]


def pair_script(task: dict, name: str) -> dict:
    queries, answer = right_queries(task), task["answers"][0]
    if name.startswith("single"):
        lines = [json.dumps({"queries": q, "answer": a}) for q, a in ((queries, ""), ([], answer))]
        return {"split": lines[:1], "answer": lines[1:]}
    return {
        "split": [json.dumps({"queries": queries})],
        "extract": lambda request: f"<evidence>{answer.split()[request.item]}</evidence>",
        "answer": [f"<answer>{answer}</answer>"],
    }


def hop_script(task: dict, name: str, club: str) -> dict:
    *_, relation, _, _, _, _, person = task["question"].split()
    queries = [f"search club {person}", f"search {relation} {club}"]
    return {
        "ask": [*queries, f"answer {task['answers'][0]}"],
        "plan": [f"club {person} ; none"],
        "search": queries,
        "summarise": [club, task["answers"][0]],
        "update": [f"1 club {person} ; {club}", f"2 {relation} {club} ; {task['answers'][0]}"],
        "answer": ["none", task["answers"][0]],
    }


@pytest.mark.parametrize("name", [*TEAMS, *(f"single_{team}" for team in TEAMS)])
def test_right_queries_find_the_answer_of_every_held_out_question(name):
    """Nothing but the roles stands between a question and its answer."""
    plan = compile_experiment(ROOT / "examples" / "small" / f"{name}.yaml")
    hop, clubs = name.endswith("m_ask"), facts_of_corpus()
    for task in rows_of("hop_eval.jsonl" if hop else "pair_eval.jsonl")[:50]:
        club = clubs.get((task["question"].split()[-1], "club"), "")
        script = hop_script(task, name, club) if hop else pair_script(task, name)
        player = Player(plan)
        state = player.start(task, EpisodeKey(0, "eval", 0, 0, "task", 0))
        (played,) = play(player, [state], ScriptedEngine(script).generate)
        assert (played.outcome, played.output["answer"].strip()) == ("ok", task["answers"][0])
        told = [e.value["text"] for e in played.effects if e.kind == "tool"]
        assert len(told) == 2
        for word in (club, *task["answers"]) if hop else task["answers"][0].split():
            assert any(word in text.split() for text in told)


def shape(named) -> tuple:
    """A node apart from what its values are called with."""
    name, node = named
    who = [getattr(node, key, None) for key in ("role", "tool", "foreach", "as_")]
    return (name, type(node), *who)


@pytest.mark.parametrize("team", TEAMS)
def test_a_small_team_is_the_shipped_one_with_shorter_prompts(team):
    """The same roles, nodes, edges and rewards."""
    small, shipped = (
        load(ROOT / "workflows" / f"{folder}{team}.yaml", "workflow").spec for folder in ("small/", "")
    )
    assert [shape(node) for node in small.nodes.items()] == [shape(node) for node in shipped.nodes.items()]
    assert list(small.roles) == list(shipped.roles)
    assert (small.edges, small.rewards) == (shipped.edges, shipped.rewards)
