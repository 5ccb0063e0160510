"""Programs and tests without ill will: what is passed on, what is compared, what is said of failures."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler.graph import FunctionIR, Graph, ToolIR
from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.isolated import Sent
from masflow.isolation import Call, Pool, packed
from masflow.spec.runtime import Runtime
from masflow.tools import ToolBox, sandbox
from masflow.tools.sandbox import Limits, make, run_program, run_tests

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(wall_s=20, test_s=4, cpu_s=4)
PROGRAM = """
import math
from collections import Counter, deque
from fractions import Fraction

LIMIT = 3

class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)
    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)
    def __repr__(self):
        return f"Point({self.x}, {self.y})"
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return (self.x, self.y)[i]
    def moved(self, *, by):
        self.x += by
        return self

def same(value): return value
def first(values): return next(iter(values))
def evens(n):
    for i in range(n):
        yield 2 * i
def order(values): values.sort()
def fill(table): table["new"] = 1
def mapped(f, values): return [f(v) for v in values]
def adder(n): return lambda m: n + m
def depth(node): return 0 if node is None else 1 + depth(node.next)
def mark(node): node.seen = True
def fails(value):
    if value < 0:
        raise ValueError(f"negative: {value}")
    raise KeyError(value)
def count(text): return Counter(text)
def queue(values): return deque(values)
def half(n): return Fraction(n, 2)
def sum(a, b): return a + b + 1
def area(r): return math.pi * r ** 2
"""
PASS = """
assert same(None) is None and same(True) is True and same(False) is False
assert same(-7) == -7 and same(10 ** 5000) == 10 ** 5000 and type(same(1)) is int
assert same(0.1) == 0.1 and same(float("inf")) > 1e308 and same(float("nan")) != same(float("nan"))
assert same(2 - 3j) == 2 - 3j
assert same("z\\u00fcrich \\ud800 \\0") == "z\\u00fcrich \\ud800 \\0" and same(b"\\x00\\xff") == b"\\x00\\xff"
deep = [1, (2, 3), {4, 5}, {"six": [7]}, frozenset([8])]; assert same(deep) == deep
assert isinstance(same((1,)), tuple) and isinstance(same({1}), set) and isinstance(same(range(3)), range)
assert same({(1, 2): None}) == {(1, 2): None} and same(range(2, 9, 3)) == range(2, 9, 3)
assert Point(1, 2) == Point(1, 2) and Point(1, 2) != Point(1, 3) and not Point(1, 2) == 3
assert Point(1, 2) + Point(3, 4) == Point(4, 6) and repr(Point(1, 2)) == "Point(1, 2)"
assert Point(1, 2).x == 1 and len(Point(1, 2)) == 2 and Point(5, 6)[1] == 6 and list(Point(5, 6)) == [5, 6]
assert Point(1, 2).moved(by=3).x == 4 and isinstance(Point(1, 2), Point) and not isinstance(3, Point)
assert list(evens(3)) == [0, 2, 4] and first(evens(3)) == 0 and max(evens(4)) == 6 and 4 in evens(3)
given = evens(2); assert next(given) == 0 and next(given) == 2 and next(given, "end") == "end"
values = [3, 1, 2]; order(values); assert values == [1, 2, 3]
table = {}; fill(table); assert table == {"new": 1}
assert mapped(lambda v: v + 1, [1, 2]) == [2, 3] and mapped(str, [1]) == ["1"]
assert adder(2)(3) == 5 and mapped(adder(1), [1]) == [2] and mapped(lambda v: adder(v)(v), [2]) == [4]
assert sum(1, 2) == 4
assert area(1) == math.pi and math.isclose(area(2), 4 * math.pi) and LIMIT == 3
assert count("aab") == Counter("aab") and count("aab").most_common(1) == [("a", 2)]
assert list(queue([1, 2])) == [1, 2] and queue([1]).pop() == 1
from fractions import Fraction; assert half(3) == Fraction(3, 2) and same(Fraction(1, 3)) * 3 == 1
""".strip().split("\n")
PASS += [
    "class Node:\n    def __init__(self, next=None): self.next = next\nnode = Node(Node())\n"
    "assert depth(node) == 2\nmark(node)\nassert node.seen is True",
    "try:\n    fails(-1)\n    assert 0\nexcept ValueError as error:\n    assert str(error) == 'negative: -1'",
    "try:\n    fails(1)\n    assert False\nexcept KeyError:\n    pass",
    "print('said')",
]
FAIL = {
    "assert same(1) == 2": "AssertionError: ",
    "assert same([1]) == [1], 'unlike'\nassert same(0), 'zero'": "AssertionError: zero",
    "assert unknown(1) == 1": "NameError: name 'unknown' is not defined",
    "fails(-2)": "ValueError: negative: -2",
    "assert same(": "SyntaxError",
    "import sys\nsys.exit(0)": "SystemExit",
    "assert abs(Point(1, 2) - 3) < 9": "TypeError",
    "same(open('/dev/null'))": "TypeError",
}


def test_values_objects_and_functions_cross_as_a_test_expects(bubblewrap):
    found = run_tests(PROGRAM, PASS, imports=["import math"], limits=LIMITS)
    assert found.passed == (True,) * len(PASS), [
        (t, why) for t, why in zip(PASS, found.reasons, strict=True) if why
    ]
    assert (found.pass_rate, found.error) == (1.0, "")
    assert found.called == (True,) * (len(PASS) - 1) + (False,)


def test_a_failed_test_says_why(bubblewrap):
    found = run_tests(PROGRAM, list(FAIL), limits=LIMITS)
    assert found.passed == (False,) * len(FAIL)
    for reason, start in zip(found.reasons, FAIL.values(), strict=True):
        assert reason.startswith(start)


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        ("def double(", "raised", "SyntaxError"),
        ("raise ValueError('no')", "raised", "ValueError: no"),
        ("import sys; sys.exit(3)", "ended", "SystemExit: 3"),
        ("import ctypes; ctypes.string_at(0)", "crashed", "ended"),
        ("x = bytearray(10 ** 11)", "memory", "MemoryError"),
        ("", "", "NameError: name 'double' is not defined"),
    ],
)
def test_a_program_that_cant_be_loaded_fails_every_test_and_says_why(bubblewrap, code, error, reason):
    found = run_tests(code, ["assert double(1) == 2"] * 2, limits=LIMITS)
    assert (found.passed, found.pass_rate, found.error) == ((False, False), 0.0, error)
    assert all(why.startswith(reason) for why in found.reasons)


def test_time_is_counted_as_the_programs_own(bubblewrap):
    """A machine that is busy with other work ends nothing before the program has had its time."""
    limits = Limits(wall_s=60, test_s=50, cpu_s=1)
    found = run_tests(
        "def f(x):\n    while x: pass\n    return x", ["assert f(1)", "assert f(0) == 0"], limits=limits
    )
    assert (found.passed, found.error) == ((False, True), "timeout")
    assert found.reasons[0] == "TimeoutError: out of CPU time"


@pytest.mark.slow
def test_no_program_outlives_its_own_time(bubblewrap):
    limits = Limits(wall_s=60, test_s=50, cpu_s=1)
    assert run_tests("while True: pass", ["f"], limits=limits).error == "timeout"
    assert run_program("while True: pass", limits=limits).error == "timeout"
    stubborn = "while True:\n    try:\n        while True: pass\n    except TimeoutError: pass"
    assert run_program(stubborn, limits=limits).error == "timeout"


def test_a_programs_module_is_as_any(bubblewrap):
    code = "import sys, dataclasses\n@dataclasses.dataclass\nclass Pair:\n    a: int\n    b: int = 2\n"
    code += "def get(): return dataclasses.astuple(Pair(1)), __name__\nif __name__ == '__main__': 1 / 0\n"
    code += "print('hi')"
    found = run_tests(code, ["assert get() == ((1, 2), 'program')"], limits=LIMITS)
    assert found.passed == (True,) and found.stdout == "hi\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(input()[::-1])", ("olleh\n", "", 0, "")),
        ("import sys; print('bad', file=sys.stderr); sys.exit(4)", ("", "bad\n", 4, "raised")),
        ("import os; os.kill(os.getpid(), 11)", ("", "", -11, "crashed")),
        ("exit()", ("", "", 0, "")),
        ("x = [0] * 10 ** 11", ("", None, 1, "memory")),
        ("def f():\n    1 / 0\nprint(1)\nf()", ("1\n", None, 1, "raised")),
    ],
)
def test_a_program_by_itself(bubblewrap, code, expected):
    ran = run_program(code, "hello\n", limits=LIMITS)
    out, err, status, error = expected
    assert (ran.stdout, ran.exit, ran.error) == (out, status, error), ran
    assert err is None or ran.stderr == err
    assert "<string>" not in ran.stderr


def test_what_a_program_reads_cant_be_written_to(bubblewrap):
    code = "import os\nos.write(0, b'more')"
    assert "Bad file descriptor" in run_program(code, "given", limits=LIMITS).stderr


def test_the_same_program_gives_the_same_sets_every_time(bubblewrap):
    code = "print({str(n) for n in range(30)}, hash('a'))"
    assert run_program(code, limits=LIMITS).stdout == run_program(code, limits=LIMITS).stdout


# -- the tool -------------------------------------------------------------------------------------


def test_the_tool_runs_programs_and_judges_them(bubblewrap):
    python = make({"test_s": 4})
    found = python(
        code="def double(x): return 2 * x", tests=["assert double(1) == 2", "assert double(1) == 3"]
    )
    assert (found["passed"], found["pass_rate"], found["error"]) == ([True, False], 0.5, "")
    assert found["text"] == "assert double(1) == 2: passed\nassert double(1) == 3: AssertionError: "
    ran = python(code="print(int(input()) + 1)", stdin="41")
    assert (ran["text"], ran["stdout"], ran["exit"], ran["error"]) == ("42\n", "42\n", 0, "")
    assert "ZeroDivisionError" in python(code="1 / 0")["text"]
    assert python(code="x", tests=[])["pass_rate"] == 0
    wrong: Any = None
    with pytest.raises(TypeError, match="code must be text"):
        python(code=wrong)
    wrong = "assert 1"
    with pytest.raises(TypeError, match="tests must be a list of texts"):
        python(code="", tests=wrong)


# -- without bubblewrap ---------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine where no bwrap is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MASFLOW_SANDBOX", "bubblewrap")
    sandbox._missing.cache_clear()
    yield monkeypatch
    sandbox._missing.cache_clear()


def test_without_bubblewrap_nothing_runs_and_it_says_what_to_do(bare):
    for use in (lambda: make({}), lambda: run_program("1"), lambda: run_tests("1", ["1"])):
        with pytest.raises(RunError) as caught:
            use()
        assert "bubblewrap isn't installed" in str(caught.value)
        assert "apt-get install bubblewrap" in caught.value.fix and "NOT SAFE" in caught.value.fix


def test_a_run_whose_tool_has_no_sandbox_doesnt_begin(bare):
    tool = ToolIR(name="run", function=FunctionIR("python"))
    with pytest.raises(RunError, match="bubblewrap isn't installed"):
        ToolBox(Plan(root="w", workflows={"w": Graph(name="w", tools=(tool,))}))
    ToolBox(
        Plan(
            root="w", workflows={"w": Graph(name="w", tools=(tool,))}, runtime=Runtime(sandbox="limits_only")
        )
    )


def test_a_reward_that_has_no_sandbox_stops_the_run(bare):
    args = packed({"code": "def double(x): return 2 * x", "tests": ["assert double(1) == 2"]})
    sent = Sent(f"{ROOT}/rewards/code.py:pass_rate", str(ROOT), "", args, (), 60.0, 0, "", None)
    processes = Pool(1)
    try:
        call = Call(sent)
        processes.submit([call])
        with pytest.raises(RunError, match="bubblewrap isn't installed"):
            processes.wait([call])
    finally:
        processes.close()


def test_limits_only_runs_programs_and_holds_their_limits(bare):
    ToolBox(Plan(root="w", workflows={"w": Graph(name="w")}, runtime=Runtime(sandbox="limits_only")))
    assert os.environ["MASFLOW_SANDBOX"] == "limits_only"
    assert run_program("print(1)").stdout == "1\n"
    found = run_tests("def f(x):\n    while x == 2: pass\n    return x",
                      ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"],
                      limits=LIMITS.model_copy(update={"test_s": 0.5}))  # fmt: skip
    assert (found.passed, found.error) == ((True, False, True), "timeout")
    assert run_program("x = bytearray(10 ** 10)", limits=LIMITS).error == "memory"
    ran = run_program("import os; print(os.getcwd())", limits=LIMITS)
    assert not Path(ran.stdout.strip()).exists()


def test_a_runtime_without_a_word_asks_for_bubblewrap(monkeypatch):
    monkeypatch.setenv("MASFLOW_SANDBOX", "limits_only")
    ToolBox(Plan(root="w", workflows={"w": Graph(name="w")}))
    assert os.environ["MASFLOW_SANDBOX"] == "bubblewrap"


@pytest.mark.slow
def test_reference_programs_of_mbpp_pass_their_tests(bubblewrap):
    place = Path(os.environ.get("MASFLOW_DATA", "")) / "mbpp" / "sanitized.jsonl.gz"
    if not place.is_file():
        pytest.skip("MASFLOW_DATA has no mbpp/sanitized.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(place.read_bytes()).splitlines()[::3]]
    limits = Limits(wall_s=120, test_s=30, cpu_s=30)
    found = {
        row["task_id"]: run_tests(row["code"], row["test_list"], imports=row["test_imports"], limits=limits)
        for row in rows
    }
    assert len(found) >= 100 and not {name: v.reasons for name, v in found.items() if v.pass_rate < 1}
