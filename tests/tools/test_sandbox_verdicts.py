"""Programs, and tests, that attack their verdicts: the score is what the program is worth, and no more."""

import pytest

from masflow.tools.sandbox import Limits, run_tests

HONEST = "def double(x):\n    return 2 * x\n"
TESTS = ("assert double(2) == 4", "assert double(5) == 10", "assert double(0) == 0")
LIMITS = Limits(wall_s=20, test_s=3, cpu_s=2, memory_mb=160, processes=8, tmpfs_mb=2, file_mb=1, output_kb=4)


@pytest.fixture(autouse=True)
def sandboxed(bubblewrap):
    """Every attack here is on the real sandbox."""


def score(code, tests=TESTS, **more):
    return run_tests(code, tests, limits=LIMITS, **more)


FORGED = {
    "leaves with status 0 before the tests": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "leaves from its function": "import os\ndef double(x): os._exit(0)",
    "raises what a harness may take for the end": "def double(x): raise SystemExit(0)",
    "raises StopIteration": "def double(x): raise StopIteration",
    "raises GeneratorExit": "def double(x): raise GeneratorExit",
    "closes every channel": "import os\nos.closerange(0, 1 << 16)\n" + HONEST,
    "closes every channel in its function": "import os\ndef double(x): os.closerange(0, 1 << 16)",
    "writes verdicts wherever it can": """
import os
def double(x):
    for number in range(4096):
        for text in (b"+", b"\\0\\0\\0\\1+", b"passed", b"\\0\\0\\0\\12answer"):
            try: os.write(number, text)
            except OSError: pass
    return 2 * x
""",
    "writes verdicts before it is loaded": """
import os
for number in range(4096):
    for text in (b"+", b"\\0\\0\\0\\1+", b"begun", b"l3:s5:readyl1:s6:doubles0:"):
        try: os.write(number, text)
        except OSError: pass
""" + HONEST,
    "equals everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __hash__(self): return 4
def double(x): return Yes()
""",
    "is a number that equals everything": """
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def double(x): return Yes(7)
""",
    "patches what tests are made of": """
import builtins, sys
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
builtins.compile = lambda *a, **k: (lambda: None).__code__
builtins.exec = builtins.eval = lambda *a, **k: None
builtins.__build_class__ = None
sys.settrace(lambda *a: None)
sys.excepthook = lambda *a: sys.exit(0)
import __main__
for name in list(vars(__main__)):
    if callable(getattr(__main__, name)): setattr(__main__, name, lambda *a, **k: True)
def double(x): return 7
""",
    "answers the line itself": """
import __main__, gc
def double(x):
    for peer in gc.get_objects():
        if type(peer).__name__ == "Peer":
            for _ in range(3):
                peer.send(["answer", "", True, None])
                peer.send(["ask", "call", [peer, True], {}])
                peer.send(["ask", "set", [1, "passed", True], {}])
    return 7
""",
    "says something endless on the line": """
import __main__, gc, os
def double(x):
    for peer in gc.get_objects():
        if type(peer).__name__ == "Peer":
            peer.line.sendall((1 << 24).to_bytes(4, "big") + b"l99999999:" * 100000)
    os._exit(0)
""",
    "nests without an end": """
def double(x):
    deep = []
    for _ in range(100000): deep = [deep]
    return deep
""",
}  # fmt: skip


@pytest.mark.parametrize("attack", FORGED)
def test_no_verdict_can_be_forged(attack):
    found = score(FORGED[attack])
    assert found.passed == (False, False, False), found


PATCHED = """
import math, builtins
def abs(x): return 0
def round(x, *digits): return 2.5
def isinstance(x, kind): return True
def all(values): return True
def sorted(values, **keys): return []
def len(values): return 0
class math:
    isclose = staticmethod(lambda *a, **k: True)
Counter = lambda *a: 0
builtins.abs = abs
def half(x): return HALF
def twice(values): return TWICE
"""
HELPED = [
    "assert abs(half(5) - 2.5) < 1e-6",
    "assert round(half(5), 3) == 2.5",
    "assert math.isclose(half(5), 2.5)",
    "assert isinstance(half(5), float)",
    "assert sorted(twice([1, 2])) == [2, 4]",
    "assert len(twice([1, 2])) == 2",
    "assert all(x in (2, 4) for x in twice([1, 2])) and twice([1, 2])",
    "assert Counter(twice([1, 2])) == Counter([2, 4])",
]


def test_what_tests_use_of_python_cant_be_replaced():
    wrong = PATCHED.replace("HALF", "'x'").replace("TWICE", "['x']")
    assert score(wrong, HELPED).passed == (False,) * 8
    right = PATCHED.replace("HALF", "x / 2").replace("TWICE", "[2 * v for v in values]")
    assert score(right, HELPED).passed == (True,) * 8


OBJECT = """
class Zero:
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __mod__ = __mul__ = __abs__ = lambda *a: 0
    def __lt__(self, other): return True
    def __contains__(self, other): return True
    def __float__(self): return 2.5
    def __round__(self, *digits): return 2.5
    def __index__(self): return 4
def half(x): return Zero()
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert abs(half(5) - 2.5) < 1e-6",
        "assert abs(2.5 - half(5)) < 1e-6",
        "assert half(5) < 3",
        "assert 4 in half(5)",
        "assert round(half(5), 1) == 2.5",
        "assert half(5) in [2.5]",
        "assert half(5) % 2 == 0",
    ],
)
def test_an_object_of_the_program_answers_no_arithmetic_of_the_test(test):
    assert score(OBJECT, [test]).passed == (False,)


SPY = """
import gc, sys
def texts():
    found = []
    frame = sys._getframe()
    while frame:
        found += [repr(dict(frame.f_locals)), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    found += [o for o in gc.get_objects() if isinstance(o, str)]
    for thing in gc.get_objects():
        try: found += [str(v) for v in vars(thing).values()]
        except Exception: pass
    return " ".join(found)
def double(x):
    return "".join(["zebra", "corn"]) in texts()
"""


def test_a_program_never_sees_what_a_test_expects():
    tests = ["assert double(1) == 'zebracorn' or double(1)", "assert double('zebracorn') is True"]
    assert score(SPY, tests).passed == (False, True)  # the second shows that it finds what there is to find


def test_the_arguments_that_a_test_compares_with_cant_be_emptied():
    cheat = "def ordered(values):\n    values.clear()\n    return []"
    test = "given = [3, 1]\nassert ordered(given) == sorted(given)"
    assert score(cheat, [test]).passed == (False,)


def test_a_test_cant_be_spoilt_by_the_one_before():
    code = "calls = []\ndef double(x):\n    calls.append(x)\n    return 2 * x if len(calls) == 1 else 7"
    assert score(code).passed == (True, True, True)
    stops = (
        "import os, signal\n"
        "def double(x):\n"
        "    if x == 5 and os.fork() == 0:\n"
        "        os.setsid()\n"
        "        while True: os.kill(-1, signal.SIGSTOP)\n"
        "    while x == 5: pass\n"
        "    return 2 * x\n"
    )
    quick = LIMITS.model_copy(update={"test_s": 1.0})
    assert run_tests(stops, TESTS, limits=quick).passed == (True, False, True)


MALICIOUS = {
    "leaves": "import os\nos._exit(0)",
    "says so everywhere": "import os\nfor n in range(4096):\n    try: os.write(n, b'\\0\\0\\0\\1+')\n"
    "    except OSError: pass\nassert False",
    "ends all processes": "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
    "never ends": "while True: pass",
    "floods": "import os\nfor n in range(200): os.write(1, bytes(1 << 16))\nassert False",
    "forks on": "import os\nwhile os.fork(): pass\nassert False",
    "patches": "import builtins\nbuiltins.compile = None\nbuiltins.exec = None\nassert False",
    "isn't one": "def (",
}


def test_tests_that_a_model_wrote_cant_touch_each_others_verdicts():
    tests = [
        t for attack in MALICIOUS.values() for t in (attack, "assert double(2) == 5", "assert double(2) == 4")
    ]
    found = run_tests(HONEST, tests, limits=LIMITS.model_copy(update={"test_s": 1.0}))
    assert found.passed == (False, False, True) * len(MALICIOUS), list(
        zip(MALICIOUS, found.reasons[::3], strict=True)
    )


def test_later_tests_arent_there_for_a_test_to_read():
    spy = """
import gc, sys
frame, said = sys._getframe(), ""
while frame:
    said += repr(dict(frame.f_locals))
    frame = frame.f_back
said += repr([o for o in gc.get_objects() if isinstance(o, (list, dict, tuple))])
assert "".join(["dou", "ble(first)"]) in said and "".join(["dou", "ble(second)"]) not in said
"""
    tests = ["first = 1\nassert double(first) == 2\n" + spy, "second = 2\nassert double(second) == 4"]
    assert score(HONEST, tests).passed == (True, True)
