"""math_team on GSM8K, the coding teams on MBPP: rows of the real sets, played on the scripted engine."""

import json
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.rows import load_tasks
from masflow.errors import RunError
from masflow.tools.sandbox import ready

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(needs):
    def compile_(name):
        needs(EXAMPLES / f"{name}.yaml")
        return compile_experiment(EXAMPLES / f"{name}.yaml")

    return compile_


@pytest.fixture
def sandbox():
    try:
        ready()
    except RunError as error:
        pytest.skip(str(error))


def test_word_problems_of_gsm8k_are_scored_by_their_number(example, episode):
    plan = example("math_team")
    held_out = load_tasks(plan, "eval")
    assert len(held_out) == 660
    task = next(t.row for t in held_out if float(t.row["answer"].replace(",", "")) >= 1000)
    verdict = "<comment>fine</comment><verdict>right</verdict>"
    for said, score in ((f"${float(task['answer'].replace(',', '')):,.2f}", 1), ("0", 0)):
        script = {"solve": ["..."], "verify": [verdict], "final": [f"<answer>{said}</answer>"]}
        played = episode(plan, task, script)
        assert played.totals == [score] * 3


@pytest.mark.usefixtures("sandbox")
def test_programs_of_mbpp_pass_their_own_tests_in_the_sandbox(example, episode):
    plan = example("reflective_code")
    held_out = load_tasks(plan, "eval")
    assert (len(load_tasks(plan, "train")), len(held_out)) == (121, 179)
    lines = (EXAMPLES.parent / "data/mbpp/eval.jsonl").read_text().splitlines()
    at = next(i for i, task in enumerate(held_out) if task.row["imports"])  # its tests need `import math`
    code = f"```python\n{json.loads(lines[at])['code']}\n```"
    played = episode(plan, held_out[at].row, {"plan": ["p"], "code": [code]})
    assert (played.spoken, played.totals, played.metrics["solved"]) == (["plan@1", "code@2"], [1, 1], 1)


@pytest.mark.usefixtures("sandbox")
def test_the_reference_of_mbpp_agrees_with_its_own_tests(example, episode):
    plan = example("coder_tester")
    task = load_tasks(plan, "eval")[0].row
    script = {
        "code": [f"```python\n{task['reference']}\n```"],
        "test": [json.dumps({"tests": task["tests"][1:3]})],
    }
    played = episode(plan, task, script)
    assert (played.spoken, played.totals) == (["code@1", "test@1"], [1, 2])
