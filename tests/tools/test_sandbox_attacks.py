"""Programs that attack: none gets what it wants, and each gets the score that it is worth.

Evidence is taken outside wherever it can be: a server that nobody reached, a file that nobody touched, a
process that is gone. What a program says of itself comes beside it.
"""

import os
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest

from masflow.tools.sandbox import Limits, run_program, run_tests

HONEST = "def double(x):\n    return 2 * x\n"
TESTS = ("assert double(2) == 4", "assert double(5) == 10", "assert double(0) == 0")
LIMITS = Limits(wall_s=20, test_s=2, cpu_s=2, memory_mb=160, processes=8, tmpfs_mb=2, file_mb=1, output_kb=4)


@pytest.fixture(autouse=True)
def sandboxed(bubblewrap):
    """Every attack here is on the real sandbox."""


def score(code, tests=TESTS, **limits):
    return run_tests(code, tests, limits=LIMITS.model_copy(update=limits))


def test_an_honest_program_passes_where_the_attacks_below_are_made():
    assert score(HONEST).passed == (True, True, True)
    assert score(HONEST.replace("2 * x", "x * x")).passed == (True, False, True)


# -- what isn't there -----------------------------------------------------------------------------


CONNECT = """
import socket
for family, place in ((socket.AF_INET, ("127.0.0.1", PORT)), (socket.AF_INET6, ("::1", PORT)),
                      (40, (2, PORT)), (socket.AF_UNIX, "\\0masflow")):
    try:
        socket.socket(family).connect(place)
        print("reached", family)
    except OSError:
        print("no")
try:
    print("named", socket.getaddrinfo("example.org", 80))
except OSError:
    print("no")
"""


def test_the_network_is_out_of_reach():
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)
    ran = run_program(CONNECT.replace("PORT", str(server.getsockname()[1])), limits=LIMITS)
    assert ran.stdout == "no\n" * 5, ran
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()


READ = """
import os
for place in PLACES:
    for way in (lambda p: open(p).read(), os.listdir, os.stat):
        try:
            print("got", place, way(place))
        except OSError:
            pass
print(dict(os.environ))
"""


def test_the_hosts_files_and_environment_cant_be_read(tmp_path, monkeypatch):
    word = secrets.token_hex(8)
    monkeypatch.setenv("MASFLOW_TEST_KEY", word)
    (tmp_path / "secret").write_text(word)
    (tmp_path / "secret").chmod(0o666)
    places = [str(tmp_path / "secret"), __file__, "/etc/passwd", "/root", "/home", "/proc/1/environ", "/sys"]
    places += ["/proc/self/environ", "/var", "/dev/mem", "/dev/vda"]
    ran = run_program(READ.replace("PLACES", repr(places)), limits=LIMITS)
    assert "got" not in ran.stdout and word not in ran.stdout + ran.stderr
    assert "HOME" in ran.stdout and ran.error == ""


WRITE = """
import os
os.symlink(CANARY, "/tmp/link")
os.symlink("/", "/tmp/root")
for place in ("/tmp/link", "/tmp/root" + CANARY, CANARY, CANARY + "2", "/usr/lib/new", "/new", "/dev/new",
              "/dev/shm/new", "../new", "/tmp/../new"):
    try:
        open(place, "w").write("attacked")
        print("wrote", place)
    except OSError:
        pass
try:
    os.link(CANARY, "/tmp/hard")
    print("linked")
except OSError:
    pass
"""


def test_nothing_outside_can_be_written_also_through_links(tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("as it was")
    canary.chmod(0o666)
    tmp_path.chmod(0o777)
    ran = run_program(WRITE.replace("CANARY", repr(str(canary))), limits=LIMITS)
    assert (ran.stdout, ran.error) == ("", ""), ran
    assert canary.read_text() == "as it was" and os.listdir(tmp_path) == ["canary"]


SIGNAL = """
import os, signal
for pid in (PIDS, os.getppid(), -1):
    for number in (0, signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
seen = 0
for pid in range(1, 40000):
    try:
        os.kill(pid, 0)
        seen += 1
    except ProcessLookupError:
        pass
print(seen)
"""


def test_other_processes_cant_be_signalled_or_seen():
    ran = run_program(SIGNAL.replace("PIDS", f"{os.getpid()}, {os.getppid()}"), limits=LIMITS)
    assert (ran.stdout, ran.error) == ("2\n", ""), ran  # itself, and its own sandbox's first process


GAIN = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
for name, *args in (
    ("unshare", 0x10000000), ("unshare", 0x20000), ("mount", b"none", b"/tmp", b"tmpfs", 0, 0),
    ("ptrace", 16, 1, 0, 0), ("memfd_create", b"x", 0), ("shmget", 0, 4096, 0o1600), ("syscall", 425, 8, 0),
    ("setuid", 0), ("setgid", 0), ("chroot", b"/tmp"), ("setgroups", 0, 0),
):
    if getattr(libc, name)(*args) != -1:
        print("could", name)
for name in ("AS", "NPROC", "CPU", "FSIZE", "NOFILE"):
    kind = getattr(resource, "RLIMIT_" + name)
    try:
        resource.setrlimit(kind, (resource.getrlimit(kind)[1] + 1,) * 2)
        print("raised", name)
    except ValueError:
        pass
print(os.getuid(), os.geteuid())
"""


def test_no_rights_can_be_gained():
    ran = run_program(GAIN, limits=LIMITS)
    assert ran.stdout == "65534 65534\n", ran


# -- what there is too much of --------------------------------------------------------------------


def test_a_fork_bomb_stays_small_and_costs_its_own_test_alone():
    bomb = (
        "import os\n"
        "def double(x):\n"
        "    if x == 5:\n"
        "        most = 0\n"
        "        try:\n"
        "            while True:\n"
        "                if os.fork() == 0:\n"
        "                    while True: pass\n"
        "                most += 1\n"
        "        except BlockingIOError:\n"
        "            return most\n"
        "    return 2 * x\n"
    )
    tests = [*TESTS, f"assert 1 <= double(5) <= {LIMITS.processes}"]
    assert score(bomb, tests).passed == (True, False, True, True)


def test_threads_count_as_processes():
    ran = run_program(
        "import threading, time\n"
        "try:\n"
        "    for started in range(1000):\n"
        "        threading.Thread(target=time.sleep, args=(0.3,)).start()\n"
        "except RuntimeError:\n"
        "    print(started)\n",
        limits=LIMITS,
    )
    assert 1 <= int(ran.stdout) <= LIMITS.processes


def test_a_process_that_wants_too_much_memory_gets_an_error():
    hog = "def double(x):\n    if x == 5:\n        return len(bytearray(10 ** 9))\n    return 2 * x\n"
    found = score(hog)
    assert (found.passed, found.error) == ((True, False, True), "memory")


def test_many_processes_that_want_too_much_together_are_ended():
    hog = (
        "import os, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        kept = b'x' * (60 << 20)\n"
        "        time.sleep(30)\n"
        "time.sleep(30)\n"
    )
    began = time.monotonic()
    assert run_program(hog, limits=LIMITS).error == "memory"
    assert time.monotonic() - began < 10


def test_the_disk_cant_be_filled():
    ran = run_program(
        "total = 0\n"
        "for number in range(40):\n"
        "    try:\n"
        "        with open(f'/tmp/{number}', 'wb', buffering=0) as file:\n"
        "            for _ in range(40):\n"
        "                total += file.write(bytes(1 << 16))\n"
        "    except OSError as error:\n"
        "        last = error\n"
        "print(total, last.errno)\n",
        limits=LIMITS,
    )
    total, errno = map(int, ran.stdout.split())
    assert total <= LIMITS.tmpfs_mb << 20 and errno == 28  # no space left
    one = "open('/tmp/one', 'wb', buffering=0).write(bytes(3 << 19)) == 1 << 20 or print('larger')"
    assert run_program(one, limits=LIMITS).stdout == ""


def test_names_of_files_without_end_are_ended():
    names = "import itertools, os\nfor n in itertools.count(): os.close(os.open(f'/tmp/{n}', os.O_CREAT))"
    assert run_program(names, limits=LIMITS).error == "files"


@pytest.mark.parametrize("loop", ["while True: pass", "import time; time.sleep(1000)"])
def test_loops_and_sleeps_without_an_end_are_ended(loop):
    began = time.monotonic()
    assert run_program(loop, limits=LIMITS.model_copy(update={"wall_s": 1.0})).error == "timeout"
    found = score(loop + "\n" + HONEST, test_s=0.5)
    assert (found.passed, found.error) == ((False,) * 3, "timeout")
    assert time.monotonic() - began < 12


def test_sleeping_in_every_test_ends_with_the_whole_calls_time():
    sleeper = "import time\ndef double(x):\n    time.sleep(0.7)\n    return 2 * x\n"
    began = time.monotonic()
    found = score(sleeper, ["assert double(1) == 2"] * 100, wall_s=2.0)
    assert time.monotonic() - began < 8
    assert found.error == "timeout" and sum(found.passed) <= 2 and not any(found.passed[3:])


def test_one_test_that_runs_out_of_time_costs_nothing_else():
    found = score(HONEST.replace("return", "while x == 5: pass\n    return"), test_s=0.7)
    assert (found.passed, found.error) == ((True, False, True), "timeout")


@pytest.mark.parametrize("stream", [1, 2])
def test_a_flood_of_output_is_cut_and_ended(stream):
    flood = f"import os\nwhile True: os.write({stream}, b'spam' * 4096)"
    ran = run_program(flood, limits=LIMITS)
    assert ran.error == "output" and len(ran.stdout + ran.stderr) == LIMITS.output_kb << 10
    found = score(HONEST.replace("return", f"{flood[10:]}\n    return").replace("def", "import os\ndef"))
    assert (found.pass_rate, found.error) == (0, "output")


def test_a_daemon_is_not_left_behind():
    name = secrets.token_hex(7)
    daemon = (
        "import ctypes, os, time\n"
        "def leave():\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        f"            ctypes.CDLL(None).prctl(15, b'{name}')\n"
        "            for number in range(64):\n"
        "                try: os.close(number)\n"
        "                except OSError: pass\n"
        "            time.sleep(60)\n"
        "        os._exit(0)\n"
        "    time.sleep(0.3)\n"
    )
    seen = threading.Event()
    over = threading.Event()

    def look():
        while not over.is_set():
            if named(name):
                seen.set()
            time.sleep(0.02)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        assert run_program(daemon + "leave()", limits=LIMITS).error == ""
        assert seen.wait(1), "the daemon never was there: this test shows nothing"
        assert score(daemon + HONEST + "leave()").pass_rate == 1
        time.sleep(0.1)
        assert not named(name)
    finally:
        over.set()
        looker.join()


def named(name):
    found = []
    for place in Path("/proc").glob("[0-9]*/comm"):
        try:
            if place.read_text().strip() == name:
                found.append(place)
        except OSError:
            continue
    return found


def test_nothing_stays_for_the_next_program():
    writes = "open('/tmp/note', 'w').write('x')\n"
    reads = "import os\nprint(os.listdir('/tmp'))"
    assert run_program(writes, limits=LIMITS).error == ""
    assert run_program(reads, limits=LIMITS).stdout == "[]\n"
