"""The verifier: how many tests a program passes."""


def verdict(got: list[float | None], wanted: list[int]) -> dict:
    """`pass_rate`: share of the values that are as wanted; `solved`: 1 when all are, else 0."""
    passed = [value == want for value, want in zip(got, wanted, strict=True)]
    return {"pass_rate": sum(passed) / len(passed), "solved": int(all(passed))}
