"""Question answering: exact match and token F1, as SQuAD 1.1 (arXiv 1606.05250) and HotpotQA (1809.09600) do.

Where their scripts meet an answer without words (the band "The The"), F1 is 0, and so it is here.
"""

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


def hotpot_f1(prediction: str, answers: list[str] | str) -> float:
    """Token F1, but yes, no and noanswer are right or wrong as a whole, as HotpotQA's script has it."""
    return max(_f1_of_whole(normalise(prediction), normalise(a)) for a in _golds(answers))


def shared_f1(prediction: str, answers: list[str] | str, share: str, num_roles: int) -> float:
    """What each role is paid of the answer's F1: all of it (`full`), or its equal part (`split`)."""
    if share not in ("full", "split"):
        raise ValueError(f"share is {share!r}; known: full, split")
    return hotpot_f1(prediction, answers) / (num_roles if share == "split" else 1)


def found(ids: list[str], gold: list[str] | str) -> float:
    """Share of the gold passages' ids among those that a search brought up."""
    golds = set(_golds(gold))
    return len(golds & set(ids)) / len(golds)


def _f1_of_whole(said: str, gold: str) -> float:
    if said != gold and {said, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    return _f1(said.split(), gold.split())


def _f1(said: list[str], gold: list[str]) -> float:
    if not said or not gold:
        return 0.0
    common = sum((Counter(said) & Counter(gold)).values())
    return 2 * common / (len(said) + len(gold))


def _golds(answers: list[str] | str) -> list[str]:
    golds = [answers] if isinstance(answers, str) else list(answers)
    if not golds:
        raise ValueError("a task without gold answers can't be scored")
    return golds
