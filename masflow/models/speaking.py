"""Who makes the logits of rows that are drawn together: the protocol, and one over Hugging Face modules.

Shapes: B rows, U openings, T tokens, L tokens in the arena, H key-value heads, D head size, V vocabulary.
Rows are padded on the right, each has its own length, and they may join and leave at any time. Knows neither
text nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from masflow.models.backbone import Backbone
from masflow.models.cache import Arena

__all__ = ["ModuleSpeaker", "Opening", "Prefix", "Speaker", "Stacked"]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a row's first `length` tokens under one version of a policy; immutable, shared."""

    length: int
    keys: tuple[Tensor, ...]
    """A layer: (H, length, D)."""
    values: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


@dataclass(frozen=True)
class Opening:
    """One distinct prompt to begin rows from."""

    ids: tuple[int, ...]
    """The whole prompt."""
    adapter: str | None = None
    """PEFT's name of the adapter that speaks; None: the model as it is."""
    prefix: Prefix | None = None
    """Of its first tokens, where they are cached; always shorter than `ids`."""
    copies: int = 1
    """Rows that start from it."""

    @property
    def num_new(self) -> int:
        """Tokens that are to be prefilled."""
        return len(self.ids) - (self.prefix.length if self.prefix else 0)


class Speaker(Protocol):
    """Rows that are drawn together on one backbone; a row is known by its place, 0 … num_rows - 1."""

    @property
    def num_rows(self) -> int: ...

    @property
    def shares_prompts(self) -> bool:
        """Rows of one opening hold its keys and values once."""
        ...

    def admit(self, openings: Sequence[Opening]) -> Tensor:
        """Prefill. The new rows stand behind those that are there, opening by opening, copy by copy.

        Returns:
            (n, V) float32 (or float64) logits of each new row's first reply token.
        """
        ...

    def step(self, token_B: Tensor) -> Tensor:
        """Feed one token a row, (B,) int64; (B, V) logits of the next."""
        ...

    def leave(self, rows: Sequence[int], keep: Sequence[bool]) -> list[Prefix | None]:
        """These rows go, the others keep their order.

        Returns:
            Where `keep`, keys and values of all tokens that the row was fed: its prompt and its reply without
            the last token.
        """
        ...


class Stacked(Protocol):
    """All adapters of a backbone at once."""

    def rows(self, names: Sequence[str | None]) -> AbstractContextManager[object]:
        """Inside the block row b of what the modules compute speaks by the adapter `names[b]`."""
        ...


class ModuleSpeaker:
    """Any architecture, through its Hugging Face modules and an arena for their keys and values."""

    shares_prompts = False

    def __init__(self, backbone: Backbone, stacked: Stacked | None = None):
        """`stacked` None: whichever adapter is on speaks, whatever an opening says."""
        self._backbone, self._stacked = backbone, stacked
        self._arena = Arena(backbone.model.config)
        self._names: tuple[str | None, ...] = ()

    @property
    def num_rows(self) -> int:
        return self._arena.num_rows

    def admit(self, openings: Sequence[Opening]) -> Tensor:
        """Prefill in buckets of like length, then give every copy a row of the arena."""
        first_row = [0]
        for opening in openings:
            first_row.append(first_row[-1] + opening.copies)
        device = self._backbone.device
        places: list[int] = []
        parts: list[Tensor] = []
        self._arena.make_room(first_row[-1], max(len(o.ids) for o in openings))
        for bucket in _buckets(openings, 2048 if device.type == "cpu" else 16384):
            arena, logits_UV = self._prefill([openings[u] for u in bucket])
            copies = [openings[u].copies for u in bucket]
            source_n = torch.repeat_interleave(torch.arange(len(bucket)), torch.tensor(copies)).to(device)
            rows = [first_row[u] + c for u in bucket for c in range(openings[u].copies)]
            self._arena.put(arena, source_n, rows)
            places += rows
            parts.append(logits_UV[source_n])
        self._names += tuple(o.adapter for o in openings for _ in range(o.copies))
        self._arena.settle(first_row[-1])
        logits_nV = parts[0] if len(parts) == 1 else torch.cat(parts)
        if places == list(range(len(places))):
            return logits_nV
        return logits_nV[torch.tensor(places, device=device).argsort()]

    def _prefill(self, openings: Sequence[Opening]) -> tuple[Arena, Tensor]:
        """An arena with one row an opening; (U, V) logits behind each prompt."""
        device = self._backbone.device
        arena = Arena(self._backbone.model.config)
        arena.seed([o.prefix for o in openings])
        width = max(o.num_new for o in openings)
        new = [o.ids[len(o.ids) - o.num_new :] for o in openings]
        ids_UT = torch.tensor([(*ids, *(0,) * (width - len(ids))) for ids in new], device=device)
        last_U = torch.tensor([len(ids) - 1 for ids in new], device=device)
        with self._speaking(tuple(o.adapter for o in openings)):
            hidden_UTD = self._hidden(arena, ids_UT)
            logits_UV = self._backbone.logits(hidden_UTD[torch.arange(len(new), device=device), last_U])
        arena.lengthen([len(ids) for ids in new])
        return arena, logits_UV

    def step(self, token_B: Tensor) -> Tensor:
        """One token a row through the modules."""
        with self._speaking(self._names):
            logits_BV = self._backbone.logits(self._hidden(self._arena, token_B[:, None])[:, -1])
        self._arena.lengthen(1)
        return logits_BV

    def _hidden(self, arena: Arena, ids_BT: Tensor) -> Tensor:
        mask, positions_BT = arena.expect(ids_BT.shape[1], ids_BT.device)
        return self._backbone.hidden(ids_BT, mask, positions_BT, arena.cache)

    def _speaking(self, names: Sequence[str | None]) -> AbstractContextManager[object]:
        return nullcontext() if self._stacked is None else self._stacked.rows(names)

    def leave(self, rows: Sequence[int], keep: Sequence[bool]) -> list[Prefix | None]:
        """Close the gaps that these rows leave in the arena."""
        kept = [
            Prefix(int(self._arena.lengths[row]), *self._arena.row(row)) if wanted else None
            for row, wanted in zip(rows, keep, strict=True)
        ]
        gone = set(rows)
        stay = [row for row in range(self.num_rows) if row not in gone]
        self._arena.select(stay)
        self._names = tuple(self._names[row] for row in stay)
        return kept


def _buckets(openings: Sequence[Opening], max_tokens: int) -> list[list[int]]:
    """Numbers of openings to prefill together: longest first, padding within a sixteenth of the tokens or 64,
    those with a prefix apart."""
    buckets: list[list[int]] = []
    order = sorted(range(len(openings)), key=lambda u: (openings[u].prefix is not None, -openings[u].num_new))
    width = padding = 0
    for u in order:
        size = openings[u].num_new
        fits = bool(buckets) and (openings[buckets[-1][0]].prefix is None) == (openings[u].prefix is None)
        total = (len(buckets[-1]) + 1) * width if fits else 0
        if fits and total <= max_tokens and padding + width - size <= max(64, total // 16):
            buckets[-1].append(u)
            padding += width - size
        else:
            buckets.append([u])
            width, padding = size, 0
    return buckets
