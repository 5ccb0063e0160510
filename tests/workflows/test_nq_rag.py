"""Retrieval QA on Natural Questions: what an episode does, on the scripted engine and with the real model."""

import json
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.rows import load_tasks
from masflow.runtime.launch import launch
from masflow.runtime.trial import run_episode

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "examples/nq_rag.yaml"


@pytest.fixture(scope="module")
def plan(needs):
    needs(EXPERIMENT)
    return compile_experiment(EXPERIMENT)


@pytest.fixture(scope="module")
def held_out(plan):
    return load_tasks(plan, "eval")


def test_held_out_rows_are_natural_questions_with_their_gold_passage(held_out):
    assert len(held_out) == 2000
    assert all(task.row["answers"] and task.row["golds"] for task in held_out)


def test_an_episode_searches_reads_and_is_paid_for_both(plan, held_out, episode):
    task = held_out[0].row
    gold = task["golds"][0]
    played = episode(plan, task, {"plan": [gold["title"]], "answer": [task["answers"][0]]})
    assert played.spoken == ["plan@1", "answer@2"]
    (search,) = [e for e in played.trajectory.effects if e.kind == "tool"]
    assert gold["id"] in search.value["ids"] and len(search.value["ids"]) == 2
    assert played.metrics == {"f1": 1, "found": 1, "exact": 1, "read": 1}
    assert played.totals == pytest.approx([1.5, 1.0])  # the planner's own reward weighs a half
    shown = played.prompts("answer")[0]
    assert f"{gold['title']}: {' '.join(gold['text'].split()[:50])}\n" in shown
    assert shown.endswith(f"In a few words: {task['question']}") and len(shown.split()) < 140


def test_a_search_that_finds_nothing_still_asks_and_pays_nothing(plan, held_out, episode):
    played = episode(plan, held_out[0].row, {"plan": ["qqqq"], "answer": ["no idea at all"]})
    assert played.spoken == ["plan@1", "answer@2"]
    assert played.metrics == {
        "f1": 0,
        "found": 0,
        "exact": 0,
        "read": None,
    }  # reading isn't scored: nothing was found
    assert played.totals == [0, 0]


SMALL = {
    "workflow": "{use: workflows/nq_rag.yaml, params: {top_k: 1, words: 12}}",
    "runtime.threads": "1",
    "warm_start.steps": "1",
    "warm_start.batch": "1",
    "train.steps": "1",
    "train.tasks_per_step": "2",
    "train.save_every": "1",
    "algorithm.samples": "3",
    "algorithm.temperature": "1.5",
    "eval.limit": "1",
}


@pytest.fixture(scope="module")
def run(plan, tmp_path_factory):
    """The whole path with SmolLM2 and few tokens: warm start, one step of reinforcement, held-out score."""
    folder = tmp_path_factory.mktemp("nq") / "run"
    launch(EXPERIMENT, None, None, SMALL, folder, False, as_json=True)
    return folder


def test_the_real_model_warms_up_plays_and_takes_a_step(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1]
    assert (run / "curves.png").is_file()


def test_the_trained_adapters_play_an_episode(run, tmp_path):
    scored = run_episode(
        compile_experiment(EXPERIMENT, overrides=SMALL), None, str(run), None, tmp_path / "episodes"
    )
    assert scored.trajectory.outcome == "ok"
    assert [turn.node for turn in scored.trajectory.turns] == ["plan", "answer"]
    assert all(turn.text for turn in scored.trajectory.turns)
