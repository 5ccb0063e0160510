"""Programs judged by tests, in the sandbox of `masflow.tools.sandbox`; a model may have written both."""

from masflow.tools.sandbox import Limits, run_tests

LIMITS = Limits(wall_s=28, test_s=15, cpu_s=4)
"""Endless loops end by their own time, not the clock's: a busy machine changes no score."""


def pass_rate(code: str | None, tests: list[str], imports: list[str] = []) -> float:  # noqa: B006
    """The share of tests that a program passes; 0 without a program.

    Args:
        imports: statements that the tests need before them.
    """
    if not tests:
        raise ValueError("a task without tests can't be scored")
    return run_tests(code or "", tests, imports=imports, limits=LIMITS).pass_rate


def agreement(tests: list[str] | None, reference: str, imports: list[str] = []) -> float:  # noqa: B006
    """The share of a tester's tests that a right program passes; 0 without tests.

    Equal tests count once, and a test that calls nothing of the program agrees with nobody: `assert True`
    says nothing.
    """
    different = list(dict.fromkeys(test.strip() for test in tests or []))
    if not different:
        return 0.0
    found = run_tests(reference, different, imports=imports, limits=LIMITS)
    return sum(map(min, found.passed, found.called)) / len(different)
