"""What is wrong with a workflow that is a function stands at its file and line, with the value and a fix."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from masflow.compiler import check, compile_experiment, compile_workflow, dump_plan, load_plan
from masflow.errors import SpecError

GOOD = '''
from dataclasses import dataclass, field
from typing import Annotated, Literal

from masflow import gather, workflow


@dataclass
class Claim:
    question: str
    kind: Literal["yes", "no"]
    note: str | None
    answers: Annotated[list[str], "hidden"]
    gold: str = field(metadata={"hidden": True})


@dataclass
class Verdict:
    why: str
    right: bool


def close(said: str, answers: list) -> float:
    return float(said in answers)


def lookup(query: str) -> str:
    """Look something up."""
    return query


ROLES = {
    "scout": {
        "prompt": "find {{ topic }} for {{ question }}",
        "tools": ["lookup"],
    },
}


@workflow(
    task=Claim,
    params={"n": 2},
    roles={
        "lead": {"prompt": "judge {{ question }}", "reply": Verdict},
        **ROLES,
    },
    tools={"lookup": lookup},
    rewards=[
        {"name": "close", "use": close, "otherwise": 0,
         "args": {"said": "{{ output.why }}", "answers": "{{ answers }}"}},
    ],
    output={"why": "{{ result }}"},
)
async def research(task, agents, ctx):
    """Asks around.

    More words.
    """
    return (await agents.lead()).why
'''


def written(folder: Path, *changes: tuple[str, str], name: str = "research.py") -> Path:
    text = GOOD
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "pyproject.toml").touch()
    (folder / name).write_text(text)
    return folder / name


def line_of(path: Path, text: str) -> int:
    return next(i for i, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_what_the_decorator_declares_is_a_workflow(tmp_path):
    root, graphs = compile_workflow(written(tmp_path))
    graph = graphs[root]
    assert (root, graph.summary) == ("research", "Asks around.")
    assert [(f.name, str(f.type), f.hidden) for f in graph.task] == [
        ("question", "str", False), ("kind", "[yes, no]", False), ("note", "str?", False),
        ("answers", "[str]", True), ("gold", "str", True),
    ]  # fmt: skip
    assert str(graph.role("lead").reply).count("right") == 1 and graph.role("scout").tools == ("lookup",)
    assert [(n.name, n.kind) for n in graph.nodes] == [
        ("lead", "role"),
        ("scout", "role"),
        ("lookup", "tool"),
    ]
    assert graph.program is not None and graph.program.function.hash
    assert graph.tools[0].function.ref == f"{tmp_path / 'research.py'}:lookup"
    assert graph.rewards[0].function is not None and graph.rewards[0].function.params == ("said", "answers")


def test_the_digest_follows_what_the_functions_file_imports_from_the_project(tmp_path):
    digests = []
    for text in ("def steps():\n    return 1\n", "def steps():\n    return 2\n"):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        written(
            folder,
            (
                "from masflow import gather, workflow",
                "import claims_steps_of_test\n\nfrom masflow import gather, workflow",
            ),
        )
        (folder / "claims_steps_of_test.py").write_text(text)
        (folder / "e.yaml").write_text(
            "workflow: research.py\nmapping: {models: {m: {roles: rest}}}\nbase: a/b\n"
        )
        digests.append(compile_experiment(folder / "e.yaml").digest)
    assert digests[0] != digests[1]


def test_a_plan_with_a_function_goes_to_json_and_back(tmp_path):
    written(tmp_path)
    (tmp_path / "e.yaml").write_text(
        "workflow: research.py\nmapping: {models: {m: {roles: rest}}}\nbase: a/b\n"
    )
    plan = compile_experiment(tmp_path / "e.yaml")
    assert load_plan(dump_plan(plan)) == plan


def test_the_digest_follows_the_functions_file_and_not_its_place(tmp_path):
    digests = []
    for name, changes in (("a", ()), ("b", ()), ("c", (("(await agents.lead()).why", "'no'"),))):
        (tmp_path / name).mkdir()
        written(tmp_path / name, *changes)
        (tmp_path / name / "e.yaml").write_text(
            "workflow: research.py:research\nmapping: {models: {m: {roles: rest}}}\nbase: a/b\n"
        )
        digests.append(compile_experiment(tmp_path / name / "e.yaml").digest)
    assert digests[0] == digests[1] != digests[2]


FAULTS = [
    ('"tools": ["lookup"]', '"tools": ["lokup"]', "unknown-tool", "unknown tool 'lokup'", "write 'lookup'"),
    ('"prompt": "judge {{ question }}"', '"promt": "judge {{ question }}"', "unknown-key", "promt", "prompt"),
    ("    params={", "    parms={", "unknown-key", "unknown key 'parms'", "write 'params'"),
    ("judge {{ question }}", "judge {{ answers }}", "hidden-field", "hidden field 'answers'", "leave"),
    ("judge {{ question }}", "judge {{ question", "bad-expression", "unexpected end of template", ""),
    ('"{{ answers }}"', '"{{ answres }}"', "unknown-name", "answres", "answers"),
    ("    note: str | None", "    note: list[str] | None", "unknown-type", "can't be null", "leave out"),
    ("    kind: Literal", "    kind: complex  # Literal", "unknown-type", "complex", ""),
    ("(task, agents, ctx)", "(task)", "wrong-signature", "called with task, agents and ctx", "async def"),
    ("    params={", "    state={", "not-declared", "'state' isn't declared", "remove 'state'"),
    ("    tools={", '    nodes={"x": {}},\n    tools={', "not-declared", "'nodes' isn't declared", "remove"),
    ('tools={"lookup"', 'tools={"lead": lookup, "lookup"', "name-clash", "'lead' names two", "rename"),
    ('"use": close', '"use": lambda said, answers: 1', "local-function", "isn't at the top level", "move it"),
    ('"use": close', '"use": "rew.py:close"', "missing-file", "rew.py", ""),
    ('"scout": {', '"task": {', "reserved-name", "task", ""),
    ('"scout": {', '"question": {', "name-clash", "question", ""),
    ('"tools": ["lookup"],', '"conversation": "node",', "node-in-function", "conversation", "thread="),
    ('"otherwise": 0', '"level": "turn", "nodes": ["leed:x"]', "unknown-node", "leed:x", "lead"),
    ("    tools={", '    workflows={"x": "missing.py:f"},\n    tools={', "missing-file", "missing.py", ""),
    ("    tools={", '    workflows={"x": close},\n    tools={', "not-a-workflow", "'close'", "@workflow"),
    ("    tools={", "    workflows=[1],\n    tools={", "wrong-type", "'workflows' is a mapping", "NAME"),
    ("    tools={", '    workflows={"x": {}},\n    tools={', "missing-key", "doesn't say which", "use"),
    ("    tools={", "    timeout_s=0,\n    tools={", "out-of-bounds", "timeout_s", ""),
    ('    params={"n": 2}', '    params={"n": object()}', "bad-value", "a object is no data", ""),
    ('    params={"n": 2}', '    params={"n": float("nan")}', "bad-value", "nan isn't a finite number", ""),
    ('    params={"n": 2}', "    params={3: 2}", "bad-value", "a name is text; got 3 (int)", ""),
    (
        "    answers: Annotated",
        '    more: "Missing"\n    answers: Annotated',
        "bad-value",
        "'Missing'",
        "YAML",
    ),
]


IDS = [f"{code}-{new[:20]}" for _, new, code, *_ in FAULTS]


@pytest.mark.parametrize(("old", "new", "code", "message", "fix"), FAULTS, ids=IDS)
def test_a_fault_is_told_at_its_own_line(tmp_path, old, new, code, message, fix):
    path = written(tmp_path, (old, new))
    found = [p for p in check(path) if not p.code.startswith("warn-")]
    assert code in [p.code for p in found], found
    [problem] = [p for p in found if p.code == code][:1]
    assert message in problem.message and fix in problem.fix, problem
    assert problem.fix and Path(problem.file).name == "research.py"
    line = path.read_text().splitlines()[problem.line - 1]
    assert new.split("\n")[0].split(":")[0].strip() in line or problem.line in lines_allowed(path, code), (
        problem
    )


def lines_allowed(path: Path, code: str) -> set[int]:
    """Lines of what holds the fault, where it has no line of its own."""
    inside = {
        "unknown-name": '"args": {',
        "hidden-field": '"lead": {',
        "bad-expression": '"lead": {',
        "not-async": "@workflow(",
        "wrong-signature": "@workflow(",
        "unknown-type": "task=Claim",
        "bad-value": "task=Claim",
        "unknown-node": '{"name": "close"',
        "local-function": "rewards=[",
        "node-in-function": '"scout": {',
        "unknown-tool": '"scout": {',
        "missing-file": '{"name": "close"',
        "name-clash": '"question": {',
    }
    return {line_of(path, inside[code])} if code in inside else set()


def test_a_plain_function_cant_wait_for_agents(tmp_path):
    path = written(tmp_path, ("async def research", "def research"), ("(await agents.lead()).why", "1"))
    [problem] = check(path)
    assert (problem.code, problem.line) == ("not-async", line_of(path, "@workflow("))
    assert problem.fix == "write 'async def research(task, agents, ctx)'"


def test_a_function_that_yields_is_told_so(tmp_path):
    [problem] = check(written(tmp_path, ("return (await agents.lead()).why", "yield 1")))
    assert problem.code == "not-async" and "yields values; a workflow returns one" in problem.message


def test_a_file_in_a_folder_imports_its_neighbours_as_in_a_package(tmp_path):
    from masflow.functions import load_callable

    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "flows" / "deep"
    folder.mkdir(parents=True)
    (folder / "beside_of_test.py").write_text('SAY = "judge {{ question }}"\n')
    (tmp_path / "flows" / "above_of_test.py").write_text("N = 2\n")
    head = (
        "from .beside_of_test import SAY\nfrom ..above_of_test import N\nfrom masflow import gather, workflow"
    )
    path = written(
        folder,
        ("from masflow import gather, workflow", head),
        ('"judge {{ question }}"', "SAY"),
        ('params={"n": 2}', 'params={"n": N}'),
    )
    (folder / "pyproject.toml").unlink()
    root, graphs = compile_workflow(path)
    assert graphs[root].role("lead").prompt == "judge {{ question }}" and graphs[root].params == {"n": 2}
    assert load_callable(f"{path}:research", tmp_path).__name__ == "research"


def test_an_experiment_names_a_function_and_what_is_wrong_with_the_name_stands_there(tmp_path):
    written(tmp_path)
    for ref, code, message in (
        ("research.py:reserch", "unknown-function", "has no function 'reserch'"),
        ("reserch.py", "missing-file", "workflow 'reserch.py' not found"),
        ("research.py:close", "not-a-workflow", "'close'"),
        ("empty.py", "no-workflow", "has no function with '@workflow'"),
        ("broken.py:f", "import-fails", "importing"),
        ("slow.py:f", "import-fails", "ends the process"),
        ("two.py", "ambiguous-workflow", "several workflows: a, b"),
    ):
        (tmp_path / "empty.py").write_text("x = 1\n")
        (tmp_path / "broken.py").write_text("import nothing_like_it\n\n\nasync def f(): ...\n")
        (tmp_path / "slow.py").write_text("import os\nos._exit(3)\n")
        two = "from masflow import workflow\n\n\n@workflow()\nasync def a(t, a, c): ...\n\n\n"
        (tmp_path / "two.py").write_text(two + "@workflow()\nasync def b(t, a, c): ...\n")
        (tmp_path / "e.yaml").write_text(
            f"mapping: {{models: {{m: {{roles: rest}}}}}}\nbase: a/b\nworkflow: {ref}\n"
        )
        [problem] = [p for p in check(tmp_path / "e.yaml") if p.code == code]
        assert message in problem.message and problem.fix
        assert (Path(problem.file).name, problem.line) == ("e.yaml", 3), problem


def test_a_function_where_an_experiment_belongs_is_told_how_it_is_named(tmp_path):
    path = written(tmp_path)
    for ref in (path, f"{path}:research"):
        with pytest.raises(SpecError, match=f"this is a Python file(?s:.*)'workflow: {ref}'"):
            compile_experiment(ref)


def test_a_file_that_is_no_python_is_told_at_its_line(tmp_path):
    path = written(tmp_path, ("    return (await agents.lead()).why", "    return ("))
    [problem] = check(path)
    assert (problem.code, problem.line) == ("bad-python", line_of(path, "    return ("))
    assert Path(problem.file).name == "research.py" and problem.fix


def test_a_script_that_compiles_its_own_workflow_at_import_is_told_where(tmp_path):
    path = written(tmp_path)
    path.write_text(path.read_text() + "\n\nfrom masflow.compiler import check\n\ncheck(__file__)\n")
    [problem] = check(path)
    assert problem.code == "import-fails" and "compiles workflows at import" in problem.message
    assert f"(line {line_of(path, 'check(__file__)')})" in problem.message and "__main__" in problem.message
    text = path.read_text().replace("check(__file__)", 'if __name__ == "__main__":\n    check(__file__)')
    path.write_text(text)
    assert check(path) == []


def test_a_workflow_that_runs_itself_is_refused(tmp_path):
    source = """
        from masflow import workflow


        @workflow(roles={"a": {"prompt": "say it"}}, workflows={"again": "loop.py:loop"})
        async def loop(task, agents, ctx):
            await ctx.run("again")
    """
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "loop.py").write_text(textwrap.dedent(source))
    [problem] = check(tmp_path / "loop.py")
    assert problem.code == "recursive-workflow" and problem.line == 5


def test_a_role_cant_fill_in_a_hidden_field_of_a_workflow_that_it_calls(tmp_path):
    source = """
        from masflow import workflow


        HIDDEN = {"q": str, "gold": {"type": str, "hidden": True}}


        @workflow(task=HIDDEN, roles={"a": {"prompt": "say {{ q }}"}})
        async def inner(task, agents, ctx): ...


        @workflow(roles={"b": {"prompt": "say it", "tools": ["inner"]}}, workflows={"inner": inner})
        async def outer(task, agents, ctx): ...
    """
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "both.py").write_text(textwrap.dedent(source))
    [problem] = [p for p in check(tmp_path / "both.py") if p.code == "hidden-parameter"]
    assert "'gold'" in problem.message and problem.line == 12


CALLS = [
    ("await agents.leed()", "unknown-role", "unknown role 'leed'", "write 'lead'"),
    ('await ctx.tool("lokup", query="x")', "unknown-tool", "unknown tool 'lokup'", "write 'lookup'"),
    ('await ctx.run("other")', "unknown-workflow", "unknown workflow 'other'", "use a known workflow"),
    (
        'await agents.scout(topik="x")',
        "warn-unread-value",
        "no prompt of role 'scout' reads 'topik'",
        "'topic'",
    ),
    ('await agents.scout(key="x")', "warn-missing-value", "prints 'topic'", "agents.scout(topic=…)"),
    ('await agents.lead(prompt="about {{ it }}")', "warn-missing-value", "prints 'it'", "it=…"),
]


@pytest.mark.parametrize(("call", "code", "message", "fix"), CALLS, ids=[case[0] for case in CALLS])
def test_a_call_that_is_written_out_is_checked_at_its_line(tmp_path, call, code, message, fix):
    path = written(tmp_path, ("    return (await agents.lead()).why", f"    {call}\n    return 'no'"))
    [problem] = [p for p in check(path) if p.code == code]
    assert problem.line == line_of(path, call)
    assert message in problem.message and fix in problem.fix


def test_calls_with_other_values_or_in_other_ways_are_left_to_the_episode(tmp_path):
    calls = """
    more = {"topic": "x"}
    await agents.scout(**more)
    one = agents.scout
    await one(topic="x", key="k")
    name = "lead"
    await agents[name](prompt=name + "{{ question }}")
    await agents.scout(topic="y", key="z", prompt="say {{ topic }}{% if more %}{{ more }}{% endif %}")
    return (await agents.lead()).why"""
    assert check(written(tmp_path, ("    return (await agents.lead()).why", calls))) == []


def test_every_workflow_of_a_python_file_is_checked(tmp_path):
    text = GOOD.replace("judge {{ question }}", "judge {{ answers }}")
    more = GOOD[GOOD.index("@workflow(") :].replace("def research", "def second")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "both.py").write_text(text + "\n\n" + more.replace('"lookup": lookup', '"lookup": "lookkup"'))
    codes = {p.code for p in check(tmp_path / "both.py")}
    assert {"hidden-field", "unknown-tool"} <= codes


def test_the_builder_takes_the_function_itself(tmp_path):
    import sys

    from masflow import dsl

    path = written(tmp_path, name="claims_for_builder.py")
    sys.path.insert(0, str(tmp_path))
    try:
        from claims_for_builder import research  # type: ignore[import-not-found]

        made = dsl.experiment(research, dsl.mapping({"m": {"roles": "rest"}}), base="a/b", params={"n": 3})
        plan = compile_experiment(made)
    finally:
        sys.path.remove(str(tmp_path))
    assert plan.root == "research" and plan.graph.params == {"n": 3}
    assert plan.graph.program is not None and plan.graph.program.function.ref == f"{path}:research"


def test_importing_masflow_for_its_decorator_is_light():
    import subprocess
    import sys

    code = (
        "import sys; from masflow import gather, workflow;"
        "print([m for m in ('torch', 'ray', 'pydantic', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
