"""Any Python function is a tool: whatever may be called by name, and what is said of what may not."""

import pytest

from masflow.compiler import check, compile_workflow
from masflow.compiler.plan import Plan
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

CODE = '''
import asyncio, functools

def plain(x, y=1): return x + y
async def later(x):
    await asyncio.sleep(0)
    return x
half = functools.partial(plain, y=0.5)
double = lambda x: 2 * x
@functools.cache
def cached(x): return x
@functools.wraps(plain)
def wrapped(**given): return plain(**given)
class Times:
    """A tool of two words."""
    def __init__(self, k=1): self.k = k
    def __call__(self, x): return self.k * x
    def twice(self, x): return 2 * self.k * x
three = Times(3)
bound = three.twice
def anything(**given): return given
def keyed(*, x): return x
def changes(x):
    x.append(1)
    return x
def many(x):
    yield x
def first(x, /): return x
NUMBER = 3
'''
TOOLS = {
    "f.py:plain": 3, "f.py:plain, y: 5": 7, "f.py:later": 2, "f.py:half": 2.5, "f.py:double": 4,
    "f.py:cached": 2, "f.py:wrapped": 3, "f.py:Times, k: 4": 8, "f.py:three": 6, "f.py:bound": 12,
    "f.py:anything, a: b": {"a": "b", "x": 2}, "f.py:keyed": 2,
}  # fmt: skip
OTHERS = {"statistics:mean": ("{data: [1, 2]}", 1.5), "json:dumps": ("{obj: [1]}", "[1]"),
          "f.py:changes": ("{x: [2]}", [2, 1])}  # fmt: skip


def workflow(tmp_path, uses):
    """One tool and one node of each (use, args), all in a row."""
    (tmp_path / "f.py").write_text(CODE)
    (tmp_path / "pyproject.toml").touch()
    tools = ""
    for i, (use, _) in enumerate(uses):
        ref, _, settings = use.partition(", ")
        tools += f'  t{i}: {{use: "{ref}", {settings}}}\n'
    nodes = "".join(f"  n{i}: {{tool: t{i}, args: {args}}}\n" for i, (_, args) in enumerate(uses))
    row = " -> ".join(["start", *(f"n{i}" for i in range(len(uses))), "end"])
    found = ", ".join(f'v{i}: "{{{{ n{i} }}}}"' for i in range(len(uses)))
    file = tmp_path / "w.yaml"
    file.write_text(f"name: w\ntools:\n{tools}nodes:\n{nodes}edges: [{row}]\noutput: {{{found}}}\n")
    return file


def played(file, root):
    name, graphs = compile_workflow(file)
    player = Player(Plan(name, graphs, root_dir=str(root)))
    state = player.start({}, EpisodeKey(7, "train", 3, 0, "t", 0))
    return play(player, [state], ScriptedEngine({}).generate)[0]


def test_whatever_may_be_called_by_name_is_a_tool(tmp_path):
    uses = [(use, "{x: 2}") for use in TOOLS] + [(use, args) for use, (args, _) in OTHERS.items()]
    one = played(workflow(tmp_path, uses), tmp_path)
    assert (one.outcome, one.detail) == ("ok", "")
    expected = [*TOOLS.values(), *(value for _, value in OTHERS.values())]
    assert list(one.output.values()) == expected
    assert one.effects[-1].args == {"x": [2]}  # what the function did to its argument stays with it


@pytest.mark.parametrize(
    ("use", "args", "message"),
    [
        ("f.py:first", "{x: 2}", "parameter 'x' is positional only; arguments are passed by name"),
        ("math:sqrt", "{x: 2}", "parameter 'x' is positional only; arguments are passed by name"),
        ("f.py:plain", "{z: 2}", "unknown argument 'z'; known: x, y"),
        ("f.py:plain", "{}", "f.py:plain also needs 'x'"),
        ("f.py:gone", "{x: 2}", "gone"),
        ("nowhere.py:f", "{x: 2}", "nowhere.py"),
        ("f.py:NUMBER", "{x: 2}", "NUMBER"),
        ("no_such_module:f", "{x: 2}", "no_such_module"),
    ],
)
def test_what_may_not_is_refused_with_the_reason(tmp_path, use, args, message):
    problems = check(workflow(tmp_path, [(use, args)]))
    assert problems and message in " ".join(problem.message for problem in problems)
    assert all(problem.line and problem.fix for problem in problems)


def test_a_generator_is_no_result(tmp_path):
    one = played(workflow(tmp_path, [("f.py:many", "{x: 2}")]), tmp_path)
    assert one.outcome == "tool_error"
    assert "f.py:many): TypeError: the result must be plain data" in one.detail
