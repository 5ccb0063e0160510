"""Linking: mappings, bases, data, presets, stages and groups of an experiment."""

import json

import pytest

from masflow.compiler import check, compile_experiment
from masflow.compiler.plan import STAGES
from masflow.errors import SpecError

MEMBERS = ["planner", "wolf_0", "wolf_1", "wolf_2", "reader"]


@pytest.fixture
def plan_of(project, tiny):
    def compiled(experiment: str = "", files: dict[str, str] | None = None, **given):
        wanted = {**tiny, **(files or {})}
        wanted["tiny.yaml"] = experiment or wanted["tiny.yaml"]
        return compile_experiment(project(wanted), **given)

    return compiled


@pytest.fixture
def mapped(tiny):
    return lambda models: tiny["tiny.yaml"].replace("{policy: {roles: rest}}", models)


def test_one_model_plays_every_member(plan_of):
    plan = plan_of()
    assert [p.name for p in plan.policies] == ["policy"]
    assert list(plan.policies[0].roles) == MEMBERS
    assert plan.policy_of == dict.fromkeys(MEMBERS, "policy")


def test_per_role_gives_every_member_a_model(plan_of, mapped):
    plan = plan_of(mapped("{own: {roles: rest, per: role}}"))
    assert [m.name for m in plan.models] == [f"own.{m}" for m in MEMBERS]
    assert plan.policy_of["wolf_1"] == "own.wolf_1"


def test_adapters_per_role_share_one_model(plan_of, mapped):
    plan = plan_of(mapped("{policy: {roles: rest, train: lora, lora: {rank: 4}, adapters: per_role}}"))
    assert len(plan.models) == 1 and plan.models[0].lora.rank == 4
    assert [p.name for p in plan.policies] == [f"policy/{m}" for m in MEMBERS]
    assert [p.adapter for p in plan.policies] == MEMBERS


def test_adapters_by_group_take_globs_and_the_rest(plan_of, mapped):
    plan = plan_of(mapped("{policy: {roles: rest, train: lora, adapters: {pack: ['wolf_*'], other: rest}}}"))
    assert {p.adapter: list(p.roles) for p in plan.policies} == {
        "pack": ["wolf_0", "wolf_1", "wolf_2"],
        "other": ["planner", "reader"],
    }


def test_a_role_stands_for_its_members_and_a_member_for_itself(plan_of, mapped):
    plan = plan_of(mapped("{a: {roles: [wolf_1]}, b: {roles: [planner, 'wolf_[02]']}, c: {roles: rest}}"))
    assert {m.name: list(m.roles) for m in plan.models} == {
        "a": ["wolf_1"],
        "b": ["planner", "wolf_0", "wolf_2"],
        "c": ["reader"],
    }
    assert plan_of(mapped("{a: {roles: [wolf]}, c: {roles: rest}}")).policy_of["wolf_2"] == "a"


def test_a_models_own_settings_reach_it_and_others_take_the_experiments(plan_of, mapped):
    text = mapped("{a: {roles: [planner], base: other/base, optimizer: {lr: 0.5}}, b: {roles: rest}}")
    plan = plan_of(text + "train: {optimizer: {lr: 0.25}}\n")
    assert (plan.model("a").base, plan.model("b").base) == ("other/base", "some/base")
    assert [p.optimizer.lr for p in plan.policies] == [0.5, 0.25]


def test_frozen_models_do_not_train_and_have_no_groups(plan_of, mapped):
    plan = plan_of(mapped("{a: {roles: [planner], train: frozen}, b: {roles: rest}}"))
    assert [p.train for p in plan.policies] == [False, True]
    assert {g.role for g in plan.groups} == {"wolf", "reader"}


def test_a_mapping_file_replaces_the_experiments_own(plan_of, project):
    project({"mappings/m.yaml": "models: {own: {roles: rest, per: role}}\n"})
    assert (
        len(plan_of(mapping=project({"mappings/m.yaml": "models: {own: {roles: rest, per: role}}\n"})).models)
        == 5
    )
    assert len(plan_of(mapping="mappings/m.yaml").models) == 5  # from the project's root


def test_every_model_whose_role_nobody_plays_is_left_out_with_a_warning(plan_of, project, tmp_path, mapped):
    text = mapped("{a: {roles: [planner, wolf, reader]}, b: {roles: rest}}")
    assert [m.name for m in plan_of(text).models] == ["a"]
    assert [p.code for p in check(tmp_path / "tiny.yaml")] == ["warn-model-without-role"]


@pytest.mark.parametrize(("use", "advantage"), [("grpo", "group_norm"), ("rloo", "leave_one_out")])
def test_a_preset_brings_its_advantage_and_eight_samples(plan_of, use, advantage, tiny):
    plan = plan_of(tiny["tiny.yaml"] + f"algorithm: {{use: {use}}}\n")
    assert (plan.algorithm.advantage, plan.algorithm.samples, plan.sampler.samples) == (advantage, 8, 8)
    assert [s.name for s in plan.stages] == list(STAGES)
    assert plan.stages[STAGES.index("advantage")].op == advantage
    own = plan_of(tiny["tiny.yaml"] + f"algorithm: {{use: {use}, advantage: group_mean, samples: 3}}\n")
    assert (own.algorithm.advantage, own.sampler.samples) == ("group_mean", 3)


def test_groups_say_by_what_turns_are_compared(plan_of):
    keys = {g.key: g.expected_size for g in plan_of().groups}
    assert keys == {
        ("task", "planner", "plan[visit]"): 8,
        ("task", "wolf", "howl[visit,copy]"): 8,
        ("task", "reader", "read[visit,item,call]"): 8,
    }


def test_roles_of_sub_workflows_are_mapped_under_their_callers_name(plan_of, mapped, tiny):
    inner = tiny["workflow.yaml"].replace("name: tiny", "name: inner")
    outer = """
name: outer
task: {question: str}
nodes: {team: {workflow: inner.yaml, args: {question: "{{ question }}"}}}
edges: [start -> team -> end]
rewards: [{name: form, use: well_formed, level: turn}]
"""
    plan = plan_of(files={"workflow.yaml": outer, "inner.yaml": inner})
    assert list(plan.policy_of) == [f"team/{m}" for m in MEMBERS]
    assert {g.node for g in plan.groups} == {"team/plan", "team/howl", "team/read"}
    per_role = mapped("{own: {roles: ['team/wolf'], per: role}, b: {roles: rest}}")
    plan = plan_of(per_role, files={"workflow.yaml": outer, "inner.yaml": inner})
    assert plan.models[0].name == "own.team.wolf_0"  # a model's name is a file's name too


def test_mixtures_keep_their_weights_and_hub_ids_are_told_from_files(plan_of, tiny):
    data = "data: {train: [{path: rows.jsonl, weight: 2}, {path: some/set, split: dev, weight: 0.5}]}"
    sources = plan_of(tiny["tiny.yaml"].replace("data: {train: rows.jsonl}", data)).data["train"]
    assert [(s.is_file, s.weight, s.split) for s in sources] == [(True, 2.0, None), (False, 0.5, "dev")]


def test_variables_in_data_paths_are_expanded(plan_of, monkeypatch, tmp_path, tiny):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.jsonl").write_text(tiny["rows.jsonl"])
    monkeypatch.setenv("MASFLOW_DATA", str(tmp_path / "elsewhere"))
    plan = plan_of(tiny["tiny.yaml"].replace("train: rows.jsonl", 'train: "${MASFLOW_DATA}/rows.jsonl"'))
    assert plan.data["train"][0].path == str(tmp_path / "elsewhere" / "rows.jsonl")


def test_only_three_bad_rows_are_named(plan_of):
    rows = "".join(json.dumps({"question": i}) + "\n" for i in range(9))
    with pytest.raises(SpecError) as caught:
        plan_of(files={"rows.jsonl": rows})
    assert [(p.code, p.line, p.path) for p in caught.value.problems] == [
        ("wrong-field-type", n, "question") for n in (1, 2, 3)
    ]


def test_a_run_to_start_from_must_have_that_checkpoint(plan_of, tiny, mapped, tmp_path):
    kept = tmp_path / "runs" / "day1" / "checkpoints" / "step_000020"
    kept.mkdir(parents=True)
    (kept / "state.json").write_text("{}")
    for init in ("runs/day1@20", "runs/day1", "runs/day1/checkpoints/step_000020"):
        assert plan_of(tiny["tiny.yaml"] + f"init: {init}\n").init == str(kept)
    started = plan_of(mapped("{policy: {roles: rest, init: runs/day1@20}}"))
    assert [p.init for p in started.policies] == [str(kept)]
    with pytest.raises(SpecError, match="kept: step_000020"):
        plan_of(tiny["tiny.yaml"] + "init: runs/day1@30\n")
    with pytest.raises(SpecError, match="run 'runs/day2' not found"):
        plan_of(mapped("{policy: {roles: rest, init: runs/day2}}"))


def test_problems_of_all_documents_come_together(plan_of, mapped):
    text = mapped("{a: {roles: [nobody]}}").replace("rows.jsonl", "none.jsonl") + "passes: [top_q]\n"
    with pytest.raises(SpecError) as caught:
        plan_of(text)
    codes = {p.code for p in caught.value.problems}
    assert {"unknown-role", "unmapped-role", "missing-file", "unknown-pass"} <= codes
