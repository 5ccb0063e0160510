"""What `masflow run` prints."""

import re

from masflow.runtime.report import trajectory_text
from masflow.trace import Scored

WORKFLOW = """
name: order
task: {question: str}
roles:
  b_role: {prompt: "ask {{ question }}", reply: {max_tokens: 8}}
  reader: {prompt: "read {{ find }}", tools: [sums], reply: {max_tokens: 8}}
tools: {sums: {use: calculator}, double: {use: "twice.py:double"}}
nodes:
  ask: {role: b_role}
  z_find: {tool: double, args: {n: 4}}
  find: {call: "twice.py:double", args: {n: "{{ z_find }}"}}
  read: {role: reader}
edges: [start -> ask -> z_find -> find -> read -> end]
rewards: [{name: form, use: well_formed, level: turn}]
"""
CALL = '<tool_call>{"name": "sums", "arguments": {"expression": "1 + 1"}}</tool_call>'


def test_turns_and_results_are_printed_in_the_order_in_which_they_happened(played):
    answers = iter([CALL, "two"])
    one = played(
        WORKFLOW,
        {"ask": ["what"], "read": lambda request: next(answers)},
        {"question": "q"},
        {"twice.py": "def double(n): return 2 * n\n"},
    )
    shown = trajectory_text(Scored(one, {}, {}, {}))
    heads = [line for line in shown.splitlines() if line.startswith("──")]
    assert [re.split(r" · ", head.removeprefix("── "))[0] for head in heads] == [
        "ask",
        "z_find",
        "find",
        "read",
        "read",
        "read",
    ]
    assert ["· tool" in head for head in heads] == [False, True, False, False, True, False]
