"""What a verdict costs: `python -m tests.bench.sandbox_cost`, on an idle machine; milliseconds, medians."""

import statistics
import time
from collections.abc import Callable

from masflow.tools.sandbox import ready, run_program, run_tests

DOUBLE = "def double(x): return 2 * x"
RUNS = 15


def median_ms(call: Callable[[], object]) -> float:
    spent = []
    for _ in range(RUNS):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return 1e3 * statistics.median(spent)


def main() -> None:
    ready("bubblewrap")
    run_tests(DOUBLE, ["assert double(2) == 4"])
    print(f"a program by itself: {median_ms(lambda: run_program('1')):.0f}")
    for count in (1, 3, 10, 50):
        tests = ["assert double(2) == 4"] * count
        cost = median_ms(lambda tests=tests: run_tests(DOUBLE, tests))
        print(f"a program and {count} of its tests: {cost:.0f}, a verdict {cost / count:.1f}")


if __name__ == "__main__":
    main()
