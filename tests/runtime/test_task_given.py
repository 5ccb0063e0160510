"""A task from the command line: what it may leave out, and what is said of one that doesn't fit."""

import pytest

from masflow.errors import SpecError
from masflow.runtime.trial import parse_task

WORKFLOW = """
name: tiny
task: {question: str, gold: {type: str, hidden: true}}
roles:
  solver: {prompt: "Answer {{ question }}"}
nodes:
  solve: {role: solver}
edges:
  - start -> solve -> end
"""


def test_hidden_fields_may_be_left_out(compiled):
    assert parse_task('{"question": "who"}', compiled(WORKFLOW))["question"] == "who"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{question: who}", "not JSON"),
        ('["who"]', "a task is a JSON object, not list"),
        ('{"question": 3}', "question"),
        ('{"qestion": "who"}', "question"),
        ('{"question": "who", "gold": 3}', "gold"),
    ],
)
def test_a_task_that_does_not_fit_is_told_with_an_example(compiled, text, said):
    with pytest.raises(SpecError) as caught:
        parse_task(text, compiled(WORKFLOW))
    (problem,) = caught.value.problems
    assert (problem.code, problem.file) == ("bad-task", "--task")
    assert said in problem.message
    assert problem.fix == 'write {"question": "str"}'
