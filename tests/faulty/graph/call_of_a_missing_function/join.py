def join() -> str:
    return ''
