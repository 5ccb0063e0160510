"""The vote at the end of a debate."""

from collections import Counter


def majority(answers: list[str | None]) -> str | None:
    """The answer given most often, whatever its case and blanks; ties go to the one that stands first."""
    said = [" ".join(a.lower().split()) for a in answers if a is not None]
    return Counter(said).most_common(1)[0][0] if said else None
