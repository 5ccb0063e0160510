join = ["left", "right"]


def both(left: str) -> str:
    return left
