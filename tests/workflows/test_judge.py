"""A frozen role as a judge: asked in one batch, its number is the reward, silence is unscored."""

from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import SpecError
from masflow.models.scripted import ScriptedEngine
from masflow.rl.score import score
from masflow.runtime.episodes import play
from masflow.runtime.judge import judge_of, score_in
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

WORKFLOW = """
name: essay
task: {topic: str, facts: {type: str, hidden: true}}
roles:
  writer: {prompt: "write about {{ topic }}", reply: {max_tokens: 8}}
  critic: {prompt: "Facts: {{ facts }}. Text: {{ essay }}. Score?", reply: {tag: score, max_tokens: 4}}
nodes: {write: {role: writer}}
edges: [start -> write -> end]
output: {essay: "{{ write.text }}"}
rewards:
  - {name: quality, use: "role:critic", args: {essay: "{{ write.text }}", facts: "{{ facts }}"}}
  - {name: style, use: "role:critic", level: turn, weight: 0, args: {essay: "{{ result.text }}", facts: none}}
"""
EXPERIMENT = """
workflow: w.yaml
mapping: {models: {own: {roles: [writer]}, judge: {roles: [critic], base: some/judge, train: TRAIN}}}
base: some/model
"""


@pytest.fixture
def plan(tmp_path: Path):
    def make(train="frozen"):
        (tmp_path / "w.yaml").write_text(WORKFLOW)
        (tmp_path / "e.yaml").write_text(EXPERIMENT.replace("TRAIN", train))
        return compile_experiment(tmp_path / "e.yaml")

    return make


def judged(plan, verdict):
    engine = ScriptedEngine({"write": lambda r: f"essay {r.seed % 97}", "critic": verdict})
    player = Player(plan)
    states = [
        player.start({"topic": "t", "facts": "f"}, EpisodeKey(0, "train", 1, 0, "t", sample))
        for sample in range(3)
    ]
    trajectories = play(player, states, engine.generate)
    asked = []

    def generate(requests):
        asked.append(requests)
        return engine.generate(requests)

    return score(plan, trajectories, judge_of(plan, generate)), asked


def test_the_judges_number_is_the_reward_and_all_questions_are_one_batch(plan):
    scored, asked = judged(
        plan(), lambda r: f"<score>{0.25 if 'Facts: f' in r.messages[-1].content else 7}</score>"
    )
    assert [list(one.totals.values()) for one in scored] == [[0.25]] * 3
    assert [one.metrics for one in scored] == [{"quality": 0.25, "style": 7}] * 3
    (batch,) = asked
    assert len(batch) == len({r.turn_id for r in batch}) == 6
    assert {(r.policy, r.member, r.sampling.temperature) for r in batch} == {("judge", "critic", 0.0)}
    assert [r.messages[-1].content.split("Text: ")[1] for r in batch[::2]] == [
        f"{one.trajectory.output['essay']}. Score?" for one in scored
    ]


def test_a_judge_that_says_nothing_leaves_the_turn_unscored_with_the_reason(plan):
    scored, _ = judged(plan(), ["well, well"])
    assert {total for one in scored for total in one.totals.values()} == {None}
    assert scored[0].failures[0].startswith("reward quality: judge critic: ")


def test_a_judge_must_be_frozen(plan):
    with pytest.raises(SpecError, match="'critic' judges for reward 'quality', and it is trained itself"):
        plan("full")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"score": 3}, 3),
        ({"why": "so", "score": "0.5"}, 0.5),
        ({"choice": "Yes"}, 1),
        ({"choice": "no"}, 0),
        ({"a": 1, "b": 2}, None),
        ({"text": "good"}, None),
        ({"score": "nan"}, None),
        ({}, None),
    ],
)
def test_a_score_is_the_field_of_that_name_or_the_only_one(value, found):
    assert score_in(value) == found
