"""Question answering: exact match and token F1, texts normalised as SQuAD does (arXiv 1606.05250)."""

import re
import string
from collections import Counter


def normalise(text: str) -> str:
    """Lower case, without punctuation, without the articles a, an, the, blanks joined."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, answers: list[str] | str) -> float:
    """1 when the prediction equals one of the gold answers after normalising, else 0."""
    return float(normalise(prediction) in {normalise(a) for a in _golds(answers)})


def token_f1(prediction: str, answers: list[str] | str) -> float:
    """Harmonic mean of precision and recall over words, against the gold answer that fits best."""
    return max(_f1(normalise(prediction).split(), normalise(a).split()) for a in _golds(answers))


def found(ids: list[str], gold: list[str] | str) -> float:
    """Share of the gold passages' ids among those that a search brought up."""
    golds = set(_golds(gold))
    return len(golds & set(ids)) / len(golds)


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return float(said == gold)
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold))


def _golds(answers: list[str] | str) -> list[str]:
    golds = [answers] if isinstance(answers, str) else list(answers)
    if not golds:
        raise ValueError("a task without gold answers can't be scored")
    return golds
