RATE = 1 / 0


def right() -> float:
    return RATE
