"""What keeps a workflow's function from doing the same again is told at its line, before anything runs."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from masflow.compiler import check
from masflow.compiler.repeats import unrepeatable

IMPORTS = """
import asyncio, random, time, uuid
import numpy as np
from datetime import datetime
from random import choice as pick
"""


def told(body: str) -> list[tuple[str, str]]:
    text = IMPORTS + "async def main(task, agents, ctx):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    tree = ast.parse(text)
    function = tree.body[-1]
    assert isinstance(function, ast.AsyncFunctionDef)
    return [(text.splitlines()[line - 1].strip(), fix) for line, _, fix in unrepeatable(tree, function)]


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("x = random.random()", "ctx.rng"),
        ("x = pick([1, 2])", "ctx.rng"),
        ("x = np.random.rand(3)", "ctx.rng"),
        ("x = uuid.uuid4()", "ctx.rng"),
        ("x = time.time()", "from a tool"),
        ("x = datetime.now()", "from a tool"),
        ("x = hash('a')", "of your own"),
        ("x = open('a').read()", "ctx.tool"),
        ("x = await asyncio.gather(agents.a())", "masflow.gather"),
        ("x = asyncio.create_task(f())", "ctx.spawn"),
        ("await asyncio.sleep(1)", "ctx.tool"),
        ("for x in {1, 2}: pass", "sorted"),
        ("x = [y for y in set(task.words)]", "sorted"),
        ("x = list({y for y in task.words})", "sorted"),
        ("x = ', '.join(set(task.words))", "sorted"),
    ],
)
def test_a_line_that_a_replay_may_do_otherwise_is_told_with_what_to_write(line, fix):
    [(at, what)] = told(line)
    assert at == line and fix in what


@pytest.mark.parametrize(
    "line",
    [
        "x = ctx.rng.random()",
        "x = sorted({1, 2})",
        "x = len(set(task.words))",
        "for x in sorted(set(task.words)): pass",
        "x = uuid.uuid5(uuid.NAMESPACE_URL, 'a')",
        "x = task.random.random()",
        "x = ', '.join(task.words)",
    ],
)
def test_what_is_the_same_ever_after_is_left_alone(line):
    assert told(line) == []


def test_check_warns_at_the_functions_own_line_and_doesnt_run_it(tmp_path):
    source = """
        import time

        from masflow import workflow


        @workflow(roles={"a": {"prompt": "say {{ what }}"}})
        async def main(task, agents, ctx):
            await agents.a(what=str(time.time()))
            open("was-run", "w").close()
    """
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "main.py").write_text(textwrap.dedent(source))
    found = check(tmp_path / "main.py")
    assert [(p.code, p.line, Path(p.file).name) for p in found] == [
        ("warn-not-repeatable", 9, "main.py"),
        ("warn-not-repeatable", 10, "main.py"),
    ]
    assert not list(tmp_path.rglob("was-run"))
