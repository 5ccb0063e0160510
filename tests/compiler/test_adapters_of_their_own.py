"""What an adapter has of its own beside its model's: in the plan, in the digest, told and refused."""

from dataclasses import replace

import pytest

from masflow.compiler import compile_experiment, dump_plan
from masflow.compiler.digest import load_plan
from masflow.compiler.explain import explain
from masflow.compiler.sizes import estimate
from masflow.errors import SpecError
from masflow.spec.mapping import ConfigBase

CONFIG = {
    "model_type": "qwen3", "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
}  # fmt: skip

PACK = "{pack: ['wolf_*'], other: rest}"
OWN = """{pack: {roles: ['wolf_*'], lora: {rank: 2, alpha: 6}, optimizer: {lr: 0.5}}, other: rest}"""


@pytest.fixture
def adapted(project, tiny):
    def make(adapters, more="", runtime=""):
        models = f"{{policy: {{roles: rest, train: lora, lora: {{rank: 4}}, adapters: {adapters}{more}}}}}"
        text = tiny["tiny.yaml"].replace("{policy: {roles: rest}}", models) + runtime
        return compile_experiment(project({**tiny, "tiny.yaml": text}))

    return make


def test_an_adapters_own_optimizer_and_shape_stand_before_its_models_and_these_before_the_experiments(
    adapted,
):
    plan = adapted(OWN, ", optimizer: {lr: 0.25}", "train: {optimizer: {lr: 0.125}}\n")
    [model] = plan.models
    pack, other = model.policies
    assert (pack.optimizer.lr, other.optimizer.lr) == (0.5, 0.25)
    assert (model.lora_of(pack).rank, model.lora_of(pack).alpha, model.lora_of(other).rank) == (2, 6, 4)
    again = load_plan(dump_plan(plan)).models[0]
    assert again == model
    assert adapted(OWN, "", "train: {optimizer: {lr: 0.125}}\n").policies[1].optimizer.lr == 0.125


def test_one_adapter_a_role_stands_beside_one_of_a_group(adapted):
    plan = adapted("{think: [planner], own: {roles: rest, per: role, optimizer: {lr: 0.5}}}")
    assert {p.adapter: (p.roles, p.optimizer.lr) for p in plan.policies} == {
        "think": (("planner",), 1e-5),
        **{f"own.{m}": ((m,), 0.5) for m in ("wolf_0", "wolf_1", "wolf_2", "reader")},
    }
    assert plan.policy_of["wolf_1"] == "policy/own.wolf_1"


def test_the_short_and_the_long_form_are_one_plan_and_another_shape_is_another(adapted):
    plain = adapted(PACK).digest
    assert adapted("{pack: {roles: ['wolf_*']}, other: {roles: rest}}").digest == plain
    same = "{pack: {roles: ['wolf_*'], lora: {rank: 4}}, other: rest}"
    assert adapted(same).digest == plain
    assert adapted(same.replace("4", "8")).digest != plain
    assert adapted(same.replace("lora: {rank: 4}", "optimizer: {lr: 1}")).digest != plain


def test_explain_tells_a_shape_of_its_own_and_counts_it(adapted):
    text = explain(adapted(OWN))
    assert "policy/pack (learns, lr 0.5, rank 2): wolf_0" in text
    assert "policy/other (learns, lr 1e-05): planner" in text


@pytest.mark.parametrize(
    ("adapters", "line"),
    [("pack:\n      - wolves", 7), ("pack:\n        per: role\n        roles:\n        - wolves", 9)],
)
def test_a_role_that_is_not_there_is_told_on_its_own_line_in_both_forms(project, tiny, adapters, line):
    mapping = f"""models:
  policy:
    roles: rest
    train: lora
    adapters:
      {adapters}
      other: rest
"""
    named = tiny["tiny.yaml"].replace("{models: {policy: {roles: rest}}}", "m.yaml")
    with pytest.raises(SpecError, match="unknown role 'wolves'") as told:
        compile_experiment(project({**tiny, "tiny.yaml": named, "m.yaml": mapping}))
    [problem] = [p for p in told.value.problems if p.code == "unknown-role"]
    assert (problem.file.rpartition("/")[2], problem.line) == ("m.yaml", line)


def test_a_start_of_an_adapters_own_is_told_where_it_stands(adapted):
    with pytest.raises(SpecError, match="runs/gone") as told:
        adapted("{pack: {roles: ['wolf_*'], init: runs/gone}, other: rest}")
    assert told.value.problems[0].path == "models.policy.adapters.pack.init"


def test_ranks_of_their_own_are_counted(adapted):
    """Rank · (in + out) of a layer, as `test_explain` counts it: 2 · 116 for two layers of this size."""
    plan = adapted(OWN)
    base = ConfigBase(config=CONFIG, tokenizer="t")
    size = estimate(replace(plan.models[0], base=base))
    assert size is not None and size.num_trained == (2 + 4) * 2 * 116


ENDPOINT = "{teacher: {roles: rest, endpoint: 'http://localhost:8000/v1', model: big}}"


@pytest.mark.parametrize(
    ("runtime", "key"),
    [
        ("{engine: {max_batch_tokens: 99}}", "engine"),
        ("{backend: ray, engine: {decoder: modules}}", "engine"),
        ("{backend: ray, defaults: {rollout: {workers: 2}}}", "defaults"),
    ],
)
def test_settings_of_engines_are_refused_where_servers_play_everything(project, tiny, runtime, key):
    text = tiny["tiny.yaml"].replace("{policy: {roles: rest}}", ENDPOINT)
    compile_experiment(project({**tiny, "tiny.yaml": text}))
    with pytest.raises(SpecError, match="servers play this whole team") as told:
        compile_experiment(project({**tiny, "tiny.yaml": f"{text}runtime: {runtime}\n"}))
    assert [(p.code, p.path) for p in told.value.problems] == [("useless-key", key)]


def test_a_frozen_model_has_no_trainer_to_stand_apart_from(project, tiny):
    text = tiny["tiny.yaml"].replace(
        "{policy: {roles: rest}}", "{a: {roles: [planner], train: frozen}, b: {roles: rest}}"
    )
    with pytest.raises(SpecError, match="no trainer to stand apart from") as told:
        compile_experiment(
            project(
                {
                    **tiny,
                    "tiny.yaml": f"{text}runtime: {{backend: ray, models: {{a: {{placement: separate}}}}}}\n",
                }
            )
        )
    assert [p.code for p in told.value.problems] == ["useless-key"]
