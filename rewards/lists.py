"""Lists of names compared as sets."""


def set_f1(said: list[str], gold: list[str]) -> float:
    """Harmonic mean of precision and recall over distinct names, whatever their case and blanks."""
    names, golds = ({" ".join(word.lower().split()) for word in words} for words in (said, gold))
    if not golds:
        raise ValueError("a task without gold names can't be scored")
    return 2 * len(names & golds) / (len(names) + len(golds))
