"""What the question answering teams train on: rows for training alone, shown as their workflows play them."""

import gzip
import json
import os
import runpy
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "examples" / "qa" / "make_data.py"))
TEAMS = ("qd_answer", "qd_evidence", "m_ask")


def paragraph(title: str, text: str, gold: bool = True) -> dict:
    return {"title": title, "text": text, "gold": gold}


ROW = {
    "question": "Where was the author of The Long Ferry born?",
    "answers": ["Ribe"],
    "split": "train",
    "paragraphs": [
        paragraph("Ribe Cathedral", "A church in Ribe.", gold=False),
        paragraph("The Long Ferry", "The Long Ferry is a novel by Tove Dahl. It sold well."),
        paragraph(
            "Tove Dahl", "Tove Dahl (born 1921) was a painter. She was born in Ribe, Denmark. She died old."
        ),
    ],
}


def plan_of(team: str, tmp_path: Path):
    """Of the shipped workflow, over a corpus that nobody searches: demonstrations bring their passages."""
    (tmp_path / "passages.jsonl").write_text('{"id": "p", "title": "t", "text": "x"}\n')
    corpus = str(tmp_path / "passages.jsonl")
    document = {
        "workflow": {"use": str(ROOT / "workflows" / f"{team}.yaml"), "params": {"corpus": corpus}},
        "mapping": {"models": {"one": {"roles": "rest"}}},
        "base": "some/model",
    }
    (tmp_path / "e.yaml").write_text(json.dumps(document))
    return compile_experiment(tmp_path / "e.yaml")


def test_queries_are_the_question_s_content_words_and_its_longest_name():
    assert MADE["queries_of"](ROW["question"]) == ["author Long Ferry born", "The Long Ferry"]
    assert MADE["queries_of"]("who sang it") == ["sang"]


def test_evidence_is_the_sentence_that_holds_the_answer_or_none():
    (row,) = MADE["demonstrations"]([ROW])["qd_evidence"]
    assert [t["reply"] for t in row["turns"] if t["node"] == "extract"] == [
        "<evidence>She was born in Ribe, Denmark.</evidence>",
        "<evidence>none</evidence>",
    ]
    assert row["turns"][-1]["reply"] == "<answer>Ribe</answer>"


def test_a_row_whose_answer_stands_in_no_gold_paragraph_shows_nothing():
    assert not any(MADE["demonstrations"]([{**ROW, "answers": ["Oslo"]}]).values())
    assert not any(MADE["demonstrations"]([{**ROW, "answers": ["a b c d e f Ribe"]}]).values())


@pytest.mark.parametrize("team", TEAMS)
def test_a_demonstration_plays_its_workflow_to_the_end(team, tmp_path):
    rows = MADE["demonstrations"]([ROW])[team]
    played = Player(plan_of(team, tmp_path)).demonstrate(rows[0], EpisodeKey(0, "warm_start", 0, 0, "1", 0))
    assert (played.outcome, played.output["answer"]) == ("ok", "Ribe")
    assert all(turn.ok for turn in played.turns)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    data = Path(os.environ.get("MASFLOW_DATA", ROOT.parent / "shared" / "data"))
    for name in ("hotpotqa/with_paragraphs", "musique/train_with_paragraphs"):
        if not (data / f"{name}.jsonl.gz").is_file():
            pytest.skip(f"needs MASFLOW_DATA with {name}.jsonl.gz")
    out = tmp_path_factory.mktemp("qa")
    MADE["main"](data, out)
    with gzip.open(data / "hotpotqa" / "with_paragraphs.jsonl.gz", "rt", encoding="utf-8") as file:
        hotpot = [json.loads(line) for line in file]
    read = lambda name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]  # noqa: E731
    return hotpot, {
        name: read(name) for name in ("train", "hotpotqa", "musique", *(f"{t}_demos" for t in TEAMS))
    }


def test_nothing_of_the_real_evaluation_rows_is_trained_on(real):
    hotpot, files = real
    dev = {row["question"] for row in hotpot if row["split"] == "dev"}
    held = {row["question"] for name in ("hotpotqa", "musique") for row in files[name]}
    trained = {row["question"] for row in files["train"]}
    assert dev <= held and len(dev) == 226 and len(trained) == len(files["train"]) == 142
    assert not trained & held
    for team in TEAMS:
        assert {row["task"]["question"] for row in files[f"{team}_demos"]} <= trained


@pytest.mark.parametrize("team", TEAMS)
def test_real_demonstrations_play_to_the_end(team, real, tmp_path):
    player = Player(plan_of(team, tmp_path))
    rows = real[1][f"{team}_demos"]
    assert len(rows) == 121
    for number, row in enumerate(rows):
        played = player.demonstrate(row, EpisodeKey(0, "warm_start", 0, number, str(number), 0))
        assert played.outcome == "ok" and played.output["answer"] == row["task"]["answers"][0]
