def join(left: str, right: str) -> str:
    return left + right
