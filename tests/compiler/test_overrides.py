"""`--set key=value`: what it reaches, and what it says when it doesn't."""

import pytest

from masflow.compiler import compile_experiment
from masflow.errors import SpecError

DEMO = '{"task": {"question": "what"}, "turns": [{"node": "plan", "reply": "x"}]}\n'


@pytest.fixture
def set_(project, tiny):
    """`set_(overrides, more)` compiles the small experiment with lines added to it."""

    def compiled(overrides, more="", replaced=("", "")):
        workflow = tiny["workflow.yaml"].replace("task:", "params: {rounds: 2}\ntask:")
        experiment = tiny["tiny.yaml"].replace(*replaced) + more
        files = {**tiny, "tiny.yaml": experiment, "workflow.yaml": workflow, "demos.jsonl": DEMO}
        return compile_experiment(project(files), overrides=overrides)

    return compiled


def test_values_are_yaml_and_reach_nested_keys(set_):
    plan = set_(
        {"train.steps": "3", "train.optimizer.lr": "1.0e-3", "algorithm.kl": "{weight: 0.5}", "base": "x/y"}
    )
    assert (plan.train.steps, plan.train.optimizer.lr, plan.algorithm.kl.weight) == (3, 1e-3, 0.5)
    assert plan.models[0].base == "x/y"


def test_what_is_not_overridden_stays(set_):
    more = "train: {steps: 5, tasks_per_step: 2}\nwarm_start: {data: demos.jsonl, steps: 3}\n"
    plan = set_({"train.steps": "7", "warm_start.steps": "0"}, more)
    assert (plan.train.steps, plan.train.tasks_per_step) == (7, 2)
    assert plan.warm_start is not None and plan.warm_start.steps == 0


def test_a_field_of_an_algorithm_that_another_flag_names_can_be_set(set_):
    own = set_({"algorithm": "dapo", "algorithm.clip_low": "0.1"}).algorithm
    assert (own.use, own.clip_low, own.clip_high) == ("dapo", 0.1, 0.28)


def test_params_of_a_workflow_named_by_its_file_can_be_set(set_):
    assert set_({"workflow.params.rounds": "5"}).graph.params == {"rounds": 5}


def test_a_mapping_written_in_place_can_be_set(set_):
    assert set_({"mapping.models.policy.context": "640"}).models[0].context == 640


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.step", "3", "write 'steps'"),
        ("trian.steps", "3", "write 'train'"),
        ("train.steps", "many", "many"),
        ("train.steps", "[1", "isn't YAML"),
        ("train.steps.more", "1", "which has no key 'more'"),
        ("runtime.backend", "tpu", "tpu"),
        ("workflow.params.round", "5", "unknown param 'round'"),
    ],
)
def test_a_bad_override_says_what_is_wrong(set_, key, value, said):
    with pytest.raises(SpecError) as caught:
        set_({key: value})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("algorithm.sum_length", "5", "algorithm.sum_length"),
        ("algorithm", "{use: grpo, sum_length: 5}", "algorithm.sum_length"),
        ("algorithm", "ppoo", "algorithm.use"),
        ("passes", "[nothing]", "passes.0"),
        ("algorithm.entropy", ".nan", "algorithm.entropy"),
        ("algorithm.gamma", "0.9", "algorithm.gamma"),
    ],
)
def test_what_only_the_compiler_finds_wrong_stands_at_the_flag_too(set_, key, value, path):
    with pytest.raises(SpecError) as caught:
        set_({"train.steps": "3", key: value}, "algorithm: {use: grpo}\n", ("algorithm: ", "# "))
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == ("--set", 0) and problem.path.startswith(path)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("train.step", "3", "write 'steps'"),
        ("train.steps", "[1", "write --set train.steps=VALUE"),
        ("train.steps.more", "1", "set 'steps' itself"),
        ("data.train.0.more", "1", "set the item itself"),
    ],
)
def test_a_key_that_leads_nowhere_is_told_at_the_flag(set_, key, value, fix):
    with pytest.raises(SpecError) as caught:
        set_({key: value}, replaced=("rows.jsonl", "[rows.jsonl]"))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.path) == ("bad-override", "--set", key)
    assert fix in problem.fix


def test_a_bad_value_is_blamed_on_the_flag_and_a_bad_file_on_its_line(set_):
    with pytest.raises(SpecError) as caught:
        set_({"train.steps": "-1"})
    assert {p.file for p in caught.value.problems} == {"--set"}


def test_keys_of_a_document_in_another_file_are_not_set_from_here(set_, project):
    project({"m.yaml": "models: {policy: {roles: rest}}\n"})
    with pytest.raises(SpecError, match="use --mapping FILE"):
        set_(
            {"mapping.models.policy.context": "64"}, replaced=("{models: {policy: {roles: rest}}}", "m.yaml")
        )
