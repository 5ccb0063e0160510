"""Work beside other work: as much at once as allowed, answered to whoever asks, whatever happens in it."""

import os
import threading
import time

import pytest

from masflow.tools.beside import Lanes


def test_work_runs_beside_other_work_and_not_more_than_allowed():
    lanes, now, most, three = Lanes(), [], [], threading.Barrier(3, timeout=20)

    def work(i):
        now.append(i)
        most.append(len(now))
        three.wait()  # passes only with three at once
        now.remove(i)
        return i * i

    begun = [lanes.begin("a", 3, lambda i=i: work(i)) for i in range(9)]
    assert [one.result() for one in begun] == [i * i for i in range(9)]
    assert max(most) == 3


def test_one_name_does_not_wait_for_another():
    lanes, held = Lanes(), threading.Event()
    slow = lanes.begin("slow", 1, lambda: held.wait(20))
    assert lanes.begin("quick", 1, lambda: 7).result() == 7
    assert not slow.is_over()
    held.set()
    assert slow.result() is True


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), KeyboardInterrupt()])
def test_what_work_raises_goes_to_who_asks_and_the_lane_goes_on(error):
    def breaks():
        raise error

    lanes = Lanes()
    broken, sound = lanes.begin("a", 1, breaks), lanes.begin("a", 1, lambda: 1)
    with pytest.raises(type(error)):
        broken.result()
    assert sound.result() == 1


def test_threads_end_with_their_lanes():
    lanes, names = Lanes(), []
    begun = [lanes.begin("ends", 2, lambda: names.append(threading.current_thread())) for _ in range(2)]
    for one in begun:
        one.wait()
    del lanes
    until = time.monotonic() + 10
    while any(thread.is_alive() for thread in names) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in names)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_was_forked_off_begins_with_threads_of_its_own():
    lanes = Lanes()
    assert lanes.begin("a", 1, lambda: 1).result() == 1
    child = os.fork()
    if child == 0:
        os._exit(5 if lanes.begin("a", 1, lambda: 5).result() == 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert lanes.begin("a", 1, lambda: 2).result() == 2
