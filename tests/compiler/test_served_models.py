"""Models behind endpoints and the engine vllm in plans: what is told, covered by the digest, and refused."""

import json
from importlib.util import find_spec

import pytest

from masflow.compiler import compile_experiment, dump_plan
from masflow.compiler.digest import load_plan
from masflow.compiler.explain import explain
from masflow.errors import SpecError

SERVED = """
workflow: workflow.yaml
mapping:
  models:
    own: {roles: [planner, wolf]}
    big: {roles: [reader], endpoint: ENDPOINT, model: MODEL}
base: some/base
data: {train: rows.jsonl}
"""


@pytest.fixture
def served(project, tiny):
    def make(endpoint='"http://localhost:8000/v1"', model="big"):
        text = SERVED.replace("ENDPOINT", endpoint).replace("MODEL", model)
        return compile_experiment(project({**tiny, "tiny.yaml": text}))

    return make


def test_a_served_model_has_no_base_is_frozen_and_comes_back_from_the_plan_file(served):
    plan = served()
    model = plan.model("big")
    assert (model.base, model.train, model.served) == (None, "frozen", "big")
    assert [p.train for p in model.policies] == [False]
    assert load_plan(dump_plan(plan)).model("big").endpoint == model.endpoint


def test_explain_says_what_is_served_where_and_that_the_run_need_not_repeat(served):
    plan = served()
    text = explain(plan)
    assert "big: big at http://localhost:8000/v1, frozen; played by a server" in text
    assert "a run needn't repeat, for servers that play big needn't" in text
    data = json.loads(explain(plan, "json"))["models"]
    assert [m["endpoint"] for m in data] == [None, "http://localhost:8000/v1"]


def test_the_digest_covers_which_model_is_asked_what_and_not_where_or_how_often(served):
    one = served().digest
    assert served('{url: "https://elsewhere/v1", key_env: KEY, retries: 9, per_minute: 3}').digest == one
    assert served(model="bigger").digest != one
    assert served('{url: "http://localhost:8000/v1", options: {user: me}}').digest != one


@pytest.fixture
def with_vllm(project, tiny):
    def make(runtime):
        return compile_experiment(
            project({**tiny, "tiny.yaml": f"{tiny['tiny.yaml']}\nruntime: {runtime}\n"})
        )

    return make


def codes(error):
    return {problem.code: problem.fix for problem in error.value.problems}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed here")
def test_vllm_that_is_not_installed_is_refused_with_the_extra_to_install(with_vllm):
    with pytest.raises(SpecError, match="isn't installed") as told:
        with_vllm("{engine: vllm, deterministic: false}")
    assert "masflow[vllm]" in codes(told)["engine-not-installed"]


def test_vllm_in_a_deterministic_run_is_refused(with_vllm):
    with pytest.raises(SpecError, match="needn't repeat its replies") as told:
        with_vllm("{engine: vllm}")
    assert codes(told)["engine-does-not-repeat"] == "write 'deterministic: false'"
