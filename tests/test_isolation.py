"""What users' functions do to their own process, they do to nobody else; every attack here is real."""

import os
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from masflow import isolation
from masflow.errors import RunError
from masflow.isolated import Sent, Weighed
from masflow.isolation import Call, Pool, packed

FUNCTIONS = '''
import os, random, signal, subprocess, sys, threading, time

def same(x): return x
def raises(x): raise ValueError("no luck")
def leaves(x): sys.exit(4)
def interrupts(x): raise KeyboardInterrupt
def ends(x): os._exit(3)
def dies(x): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(x):
    while True: pass
def stops_itself(x): os.kill(os.getpid(), signal.SIGSTOP)
def hoards(x):
    grown = []
    while True: grown.append(bytearray(50_000_000))
def floods(x):
    while True: print("y" * 10_000)
def says(x):
    print("seen", x)
    return x
def forks(x):
    os.fork()
    return x
def closes(x):
    os.closerange(0, 1 << 16)
    return x
def waits(x):
    time.sleep(x)
    return x
def draws(x):
    return random.random()
def order(x):
    return float(list({"a", "b", "c", "d", "e"}).index("a"))
def torches(x):
    return float("torch" in sys.modules or "pydantic" in sys.modules)
def starts(file):
    """A child in a session of its own, whose id it writes down; then it is too slow."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(file, "w").write(str(child.pid))
    time.sleep(60)
def calls_child(x):
    return float(subprocess.run(["echo", "5"], capture_output=True, text=True).stdout)
class Odd:
    def __repr__(self): raise RuntimeError
def odd(x): return Odd()
def keyed(x): return {Odd: 1}
NUMBER = 3
'''


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Call]:
    (tmp_path / "fns.py").write_text(FUNCTIONS)

    def make(name: str, value: Any = 1.0, **fields: Any) -> Call:
        arg = fields.pop("arg", "x")
        sent = Sent(
            f"{tmp_path}/fns.py:{name}", str(tmp_path), "", packed({arg: value}), (),
            fields.pop("timeout_s", 20.0), int(3e8), fields.pop("seed", "s"), fields.pop("many", None),
        )  # fmt: skip
        return Call(sent._replace(**fields))

    return make


def answered(pool: Pool, *calls: Call) -> list[Any]:
    pool.submit(calls)
    pool.wait(calls)
    return [call.answer for call in calls]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ValueError: no luck"),
        ("leaves", "ended with SystemExit: 4"),
        ("interrupts", "ended with KeyboardInterrupt"),
        ("ends", "ended its process with exit code 3"),
        ("dies", "ended its process (SIGSEGV)"),
        ("hangs", "OutOfTime: no result within 0.2 s"),
        ("stops_itself", "OutOfTime: no result within 0.2 s"),
        ("hoards", "MemoryError"),
        ("floods", "TooMuchOutput: printed more than 1 MiB"),
        ("odd", "gave a Odd that can't be shown; a reward is a finite number"),
    ],
)
def test_whatever_a_function_does_costs_its_own_call_alone(processes, call, name, reason):
    limit = 0.2 if "0.2" in reason else 20.0
    before, bad, after = answered(processes, call("same", 1), call(name, timeout_s=limit), call("same", 2.5))
    assert (before.value, after.value) == (1.0, 2.5)
    assert bad.value is None
    assert len(bad.problems) == 1
    assert reason in bad.problems[0]


def test_a_machine_that_was_halted_costs_no_call(processes, call, monkeypatch):
    """As a suspended or migrated virtual machine: the clock jumps, and nobody did anything meanwhile."""
    began = time.monotonic()

    def jumping() -> float:
        now = time.monotonic()
        return now + (400.0 if now - began > 0.4 else 0.0)

    monkeypatch.setattr(
        isolation, "time", types.SimpleNamespace(monotonic=jumping, monotonic_ns=time.monotonic_ns)
    )
    [found] = answered(processes, call("waits", 1.0, timeout_s=30.0))
    assert found == Weighed(1.0)


def test_calls_are_answered_by_a_process_with_descriptors_by_the_thousand(call):
    """`select` knows 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip(f"this machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    held, pool = [os.open(os.devnull, os.O_RDONLY) for _ in range(1500)], Pool(1)
    try:
        assert answered(pool, call("same", 2.0)) == [Weighed(2.0)]
    finally:
        pool.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_without_its_pipes_is_replaced(processes, call):
    found = answered(processes, call("closes", 1), call("same", 2), call("raises"), call("same", 3))
    assert [a.value for a in found] == [1, 2, None, 3]


def test_a_fork_gives_one_answer_and_its_other_half_ends(processes, call):
    assert [a.value for a in answered(processes, *(call("forks", n) for n in range(5)))] == [0, 1, 2, 3, 4]


def test_children_are_allowed_and_end_with_the_call_that_ran_out_of_time(processes, call, tmp_path):
    assert answered(processes, call("calls_child"))[0].value == 5
    file = tmp_path / "child"
    (late,) = answered(processes, call("starts", str(file), arg="file", timeout_s=1.0))
    assert "OutOfTime" in late.problems[0]
    child = Path("/proc", file.read_text())
    until = time.monotonic() + 5
    while _lives(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _lives(child)


def _lives(process: Path) -> bool:
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_draws_depend_on_the_call_alone_and_sets_have_one_order(processes, call):
    first = [a.value for a in answered(processes, call("draws", seed="a"), call("draws", seed="b"))]
    again = [a.value for a in answered(processes, call("draws", seed="b"), call("draws", seed="a"))]
    assert first == again[::-1]
    assert first[0] != first[1]
    other = Pool(1)
    try:
        assert answered(processes, call("order"))[0] == answered(other, call("order"))[0]
    finally:
        other.close()


def test_the_process_has_neither_torch_nor_pydantic(processes, call):
    assert answered(processes, call("torches"))[0].value == 0


def test_what_a_function_prints_is_passed_on(processes, call, capsys):
    answered(processes, call("says", 4))
    assert capsys.readouterr().err == "seen 4\n"


def test_each_call_has_arguments_of_its_own_whatever_they_are(processes, call):
    words = {"deep": [1, {"a": (None, "é\n")}]}
    (plain,) = answered(processes, call("odd", words))
    assert "Odd" in plain.problems[0]
    values = [float("inf"), float("nan"), 1e31, "good", None, True, 2]
    found = answered(processes, *(call("same", value) for value in values))
    assert [a.value for a in found] == [None, None, None, None, None, 1.0, 2.0]
    assert ["a reward is a finite number" in "".join(a.problems) for a in found] == [True] * 4 + [False] * 3


@pytest.mark.parametrize(
    ("value", "values", "problem"),
    [
        ([1, None, 2], [1, None, 2], ""),
        ([1, "x", 2], [1, None, 2], "gave 'x'; a reward is a finite number"),
        ([1, 2], [None] * 3, "gave 2 values for 3"),
        ([1, 2, 3, 4], [None] * 3, "gave 4 values for 3"),
        (7, [None] * 3, "gave 7; with 'batch: true' it gives a list of 3 values"),
        (None, [None] * 3, "gave None; with 'batch: true' it gives a list of 3 values"),
    ],
)
def test_one_call_for_many_owes_one_value_each(processes, call, value, values, problem):
    (found,) = answered(processes, call("same", value, many=3))
    assert found.value == values
    assert problem in "".join(found.problems)
    assert bool(found.problems) == bool(problem)


def test_a_function_that_is_not_there_stops_the_run(processes, call):
    for name, why in (("missing", "has no attribute 'missing'"), ("NUMBER", "3 is not a callable")):
        with pytest.raises(RunError, match=f"can't load .*{why}"):
            answered(processes, call(name))


def test_slow_calls_get_more_processes_and_the_others_do_not_wait(call, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef nap(x):\n    time.sleep(x)\n    return x\n")
    pool = Pool(4)
    try:
        naps = [call("same", 0.4, ref=f"{tmp_path}/slow.py:nap") for _ in range(4)]
        began = time.monotonic()
        answered(pool, *naps)
        assert time.monotonic() - began < 4 * 0.4
        assert sum(nap.seconds for nap in naps) >= 4 * 0.4
    finally:
        pool.close()


def test_a_changed_file_is_loaded_again_where_its_hash_says_so(processes, call, tmp_path):
    assert answered(processes, call("same", 2, hash="one"))[0].value == 2
    (tmp_path / "fns.py").write_text("def same(x): return -x\n")
    assert answered(processes, call("same", 2, hash="two"))[0].value == -2


SUDDEN = """
import os, sys, time
sys.path.insert(0, {tests!r})
from masflow.isolated import Sent, Weighed
from masflow.isolation import Call, Pool, packed
pool = Pool(1)
pool.submit([Call(Sent({ref!r}, {root!r}, "", packed({{"file": {file!r}}}), (), 60.0, int(4e9), "s", None))])
while not os.path.exists({file!r}) or not open({file!r}).read():
    time.sleep(0.02)
os._exit(0)
"""


def test_processes_end_with_the_process_that_started_them_however_it_ends(tmp_path):
    (tmp_path / "f.py").write_text(
        "import os, time\ndef stays(file):\n    open(file, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    )
    file = str(tmp_path / "pid")
    code = SUDDEN.format(tests=str(tmp_path), ref=f"{tmp_path}/f.py:stays", root=str(tmp_path), file=file)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    process = Path("/proc", Path(file).read_text())
    until = time.monotonic() + 5
    while _lives(process) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _lives(process)
