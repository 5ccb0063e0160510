def join(left: str, /) -> str:
    return left
