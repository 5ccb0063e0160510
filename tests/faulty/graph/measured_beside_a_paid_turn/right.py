def right(answer: str | None) -> float:
    return 1.0
