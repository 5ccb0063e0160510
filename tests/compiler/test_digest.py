"""The digest covers what is learned from what, and nothing of where it stands or how long it runs."""

import pytest

from masflow.compiler import compile_experiment, dump_plan, load_plan
from masflow.errors import RunError

CODE = "def score(answer: str | None) -> float:\n    return 1.0\n"
SCORE = 'rewards: [{name: s, use: "score.py:score", otherwise: 0, args: {answer: "{{ plan.plan }}"}}, '


@pytest.fixture
def files(tiny):
    workflow = tiny["workflow.yaml"].replace('"Plan {{ question }}"', "plan.md").replace("rewards: [", SCORE)
    return {**tiny, "workflow.yaml": workflow, "plan.md": "Plan {{ question }}\n", "score.py": CODE}


def digest(project, files, name="tiny.yaml", old="", new=""):
    """The digest with `old` replaced by `new` in one file; with no `old`, `new` put at its end."""
    assert old in files[name]
    text = files[name].replace(old, new) if old else files[name] + new
    return compile_experiment(project({**files, name: text})).digest


@pytest.mark.parametrize(
    "change",
    [
        ("plan.md", "Plan", "Plan it:"),
        ("score.py", "1.0", "2.0"),
        ("rows.jsonl", "", '{"question": "why"}\n'),
        ("tiny.yaml", "some/base", "other/base"),
        ("tiny.yaml", "", "algorithm: {samples: 4}\n"),
        ("tiny.yaml", "", "train: {tasks_per_step: 3}\n"),
        ("tiny.yaml", "", "train: {seed: 1}\n"),
        ("tiny.yaml", "roles: rest", "roles: rest, per: role"),
        ("workflow.yaml", "visits.plan < 2", "visits.plan < 3"),
        ("workflow.yaml", "{role: planner}", "{role: planner, with: {where: here, path: there}}"),
    ],
    ids=["prompt", "function", "data", "base", "algorithm", "batch", "seed", "mapping", "condition", "with"],
)
def test_the_digest_changes_with_what_is_learned(project, files, change):
    assert digest(project, files) != digest(project, files, *change)


@pytest.mark.parametrize(
    "change",
    [
        ("tiny.yaml", "", "train: {steps: 7, eval_every: 2, keep: 9}\n"),
        ("tiny.yaml", "", "runtime: {threads: 2}\n"),
        ("tiny.yaml", "workflow:", "# a remark, so that lines move\nworkflow:"),
        ("workflow.yaml", "name:", "\n\nname:"),
    ],
    ids=["steps", "runtime", "lines", "workflow lines"],
)
def test_the_digest_does_not_change_with_where_and_how_long(project, files, change):
    assert digest(project, files) == digest(project, files, *change)


def test_the_digest_does_not_change_with_the_projects_place(project, files, tmp_path):
    here = digest(project, files)
    other = tmp_path / "moved"
    (other / "workflows").mkdir(parents=True)
    for name, text in files.items():
        (other / name).write_text(text)
    assert compile_experiment(other / "tiny.yaml").digest == here


def test_a_plan_goes_to_text_and_back(project, files):
    plan = compile_experiment(project(files))
    assert load_plan(dump_plan(plan)) == plan


def test_text_that_is_no_plan_is_refused():
    with pytest.raises(RunError, match="not a plan"):
        load_plan('{"root": 3}')
