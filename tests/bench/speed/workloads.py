"""What every side of a comparison works on: prompts with exact numbers of tokens, groups, replies.

Knows neither masflow nor a peer: each side reads the same `Workload` and loads the same Hugging Face folder.
A token is a word here: prompts and replies are whole words of one made vocabulary.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = Path(os.environ.get("BENCH_MODELS", "runs/speed/models"))
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
LR = 1e-5


@dataclass(frozen=True)
class Workload:
    """One kind of work; a *sample* is one reply that is drawn and trained on."""

    name: str
    model: str
    """A folder in `MODELS`."""
    prompt_tokens: int
    reply_tokens: int = 32
    group: int = 8
    """Samples (episodes) of one task."""
    tasks: int = 4
    """Distinct prompts of a step."""
    roles: int = 1
    """Each a model of its own."""
    turns: int = 1
    """Of each role in one episode; the prompt grows by the reply and the other's message."""
    nodes: int = 1
    """One role after another, each with a prompt of this length that hangs on the reply before it."""
    credit: str = ""
    """With nodes: how actions drawn at nodes are credited; empty: whole trajectories are drawn."""
    micro: int | None = None
    """Rows of TRL's micro-batches, where it is faster with fewer than all."""
    steps: int = 3
    """Measured, after one that warms up."""

    @property
    def episodes(self) -> int:
        return self.tasks * self.group

    @property
    def samples(self) -> int:
        """Replies drawn and trained in one step."""
        return self.episodes * self.roles * self.turns * self.nodes

    @classmethod
    def read(cls, text: str) -> Workload:
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(asdict(self))


def words(count: int) -> list[str]:
    """So many different words, in a fixed order; none is a single character."""
    syllables = [c + v for c in CONSONANTS for v in VOWELS]
    size = len(syllables)

    def word(number: int) -> str:
        first, rest = divmod(number, size)
        return syllables[rest] + (syllables[first] if first < size else word(first - size))

    return [word(size + number) for number in range(count)]


def known_words(folder: Path) -> list[str]:
    """Words that the folder's tokenizer knows as one token each."""
    return (folder / "words.txt").read_text(encoding="utf-8").split()


def prompts(work: Workload, folder: Path, count: int, seed: int = 0) -> list[str]:
    """Texts of `prompt_tokens - 2` words; a beginning and a line break complete them (`prompt_text`)."""
    known, rng = known_words(folder), random.Random(seed)
    return [
        "".join(f" {word}" for word in rng.choices(known, k=work.prompt_tokens - 2)) for _ in range(count)
    ]


def prompt_text(text: str, tokenizer: Any) -> str:
    """The prompt as a model sees it: what masflow writes where a tokenizer has no chat template."""
    return f"{tokenizer.bos_token or ''}{text}\n"


def next_prompt(before: str, reply: str, message: str, tokenizer: Any) -> str:
    """The prompt of a role's next turn in a conversation."""
    return f"{before}{reply}{tokenizer.eos_token}{message}\n"


def reward(reply: str) -> float:
    """Share of words that begin before n: cheap, and different within a group."""
    found = reply.split()
    return sum(word[0] < "n" for word in found) / max(1, len(found)) + 1e-3 * (sum(map(ord, reply)) % 7)
