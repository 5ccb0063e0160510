"""Keys and values of the rows that are drawn together: an arena with room for more rows and more tokens.

Shapes: B rows, H heads, L tokens, T new tokens, D head size. A row's tokens stand at 0 … its length - 1;
behind them is what no mask lets through. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from masflow.errors import RunError

__all__ = ["Arena", "window_of"]

_STEP = 64
"""Tokens of room that a full arena makes at once."""


class Kept(Protocol):
    """A row's first tokens: `speaking.Prefix`."""

    @property
    def length(self) -> int: ...
    @property
    def keys(self) -> tuple[Tensor, ...]: ...
    @property
    def values(self) -> tuple[Tensor, ...]: ...


class ArenaLayer(DynamicLayer):
    """One layer's part: `room` holds keys and values, (rows, H, tokens, D) each, finite everywhere."""

    def __init__(self, arena: Arena):
        super().__init__()
        self._arena = arena
        self.room: list[Tensor] = []

    def get_seq_length(self) -> int:
        return self._arena.longest

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, T, D) keys and values behind each row's own; all of them, (B, H, longest + T, D)."""
        arena = self._arena
        rows, end = arena.num_rows, arena.longest + key_states.shape[-2]
        both = (key_states, value_states)
        self.reserve(rows, end, both)
        for room, states in zip(self.room, both, strict=True):
            if arena.is_even:
                room[:rows, :, arena.longest : end] = states
            else:
                room[arena.rows_B1, :, arena.places_BT] = states.transpose(1, 2)
        self.is_initialized = True
        self.keys, self.values = (room[:rows, :, :end] for room in self.room)
        return self.keys, self.values

    def reserve(self, rows: int, tokens: int, like: Sequence[Tensor] = ()) -> None:
        """Have room for so many rows and tokens; `like`: what keys and values are, (…, H, L, D)."""
        if not self.room:
            self.room = [t.new_zeros((0, t.shape[-3], 0, t.shape[-1])) for t in like]
        for number, room in enumerate(self.room):
            if rows > room.shape[0] or tokens > room.shape[2]:
                size = max(rows, room.shape[0]), max(tokens + _STEP * (tokens > room.shape[2]), room.shape[2])
                bigger = room.new_zeros((size[0], room.shape[1], size[1], room.shape[3]))
                bigger[: room.shape[0], :, : room.shape[2]] = room
                self.room[number] = bigger


class Arena:
    """All layers' keys and values, and each row's length."""

    def __init__(self, config: Any):
        self.layers = [ArenaLayer(self) for _ in DynamicCache(config=config).layers]
        self.cache = Cache(layers=[*self.layers])
        self._set(np.zeros(0, dtype=np.int64))

    def _set(self, lengths: np.ndarray) -> None:
        self.lengths: np.ndarray = lengths
        """(B,) int64."""
        self.num_rows = len(lengths)
        self.longest = int(lengths.max(initial=0))
        self.is_even = bool((lengths == self.longest).all())

    # -- going on ---------------------------------------------------------------------------------

    def expect(self, width: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """What T more tokens a row need: the mask (B, 1, T, longest + T), None where rows are even and it
        would be causal; the positions (B, T), None from 0."""
        if self.is_even and (width == 1 or self.longest == 0):
            if self.longest == 0:
                return None, None
            return None, torch.full((self.num_rows, 1), self.longest, device=device)
        lengths_B1 = torch.from_numpy(self.lengths[:, None]).to(device)
        self.places_BT = lengths_B1 + torch.arange(width, device=device)
        self.rows_B1 = torch.arange(self.num_rows, device=device)[:, None]
        place_L = torch.arange(self.longest + width, device=device)
        return (place_L <= self.places_BT[:, :, None])[:, None], self.places_BT

    def lengthen(self, by: int | Sequence[int]) -> None:
        """So many tokens more a row were written and count."""
        if isinstance(by, int):
            self.lengths = self.lengths + by
            self.longest += by
        else:
            self._set(self.lengths + np.asarray(by, dtype=np.int64))

    # -- rows -------------------------------------------------------------------------------------

    def seed(self, prefixes: Sequence[Kept | None]) -> None:
        """Begin with these rows; None is an empty one."""
        lengths = np.array([p.length if p else 0 for p in prefixes], dtype=np.int64)
        for number, layer in enumerate(self.layers):
            for row, prefix in enumerate(prefixes):
                if prefix is not None:
                    both = (prefix.keys[number], prefix.values[number])
                    layer.reserve(len(lengths), int(lengths.max()), both)
                    for room, tokens in zip(layer.room, both, strict=True):
                        room[row, :, : prefix.length] = tokens
        self._set(lengths)

    def make_room(self, rows: int, tokens: int) -> None:
        """For so many more rows of so many tokens."""
        for layer in self.layers:
            layer.reserve(self.num_rows + rows, tokens)
        self._joining = np.zeros(rows, dtype=np.int64)

    def put(self, other: Arena, source_n: Tensor, rows: Sequence[int]) -> None:
        """Copy rows `source_n` (int64) of another arena to these places among the rows that join."""
        places = [self.num_rows + row for row in rows]
        in_order = places == list(range(places[0], places[0] + len(places)))
        target: Any = slice(places[0], places[-1] + 1) if in_order else torch.tensor(places)
        self._joining[list(rows)] = other.lengths[source_n.cpu().numpy()]
        needed = self.num_rows + len(self._joining), max(self.longest, other.longest)
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            layer.reserve(*needed, theirs.room)
            for room, tokens in zip(layer.room, theirs.room, strict=True):
                room[target, :, : other.longest] = tokens[:, :, : other.longest].index_select(0, source_n)

    def settle(self, rows: int) -> None:
        """The rows that join are here."""
        assert len(self._joining) == rows
        self._set(np.concatenate([self.lengths, self._joining]))

    def row(self, row: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Copies of a row's keys and values, (H, its length, D) a layer."""
        length = int(self.lengths[row])
        keys, values = (
            tuple(layer.room[kind][row, :, :length].clone() for layer in self.layers) for kind in (0, 1)
        )
        return keys, values

    def select(self, stay: Sequence[int]) -> None:
        """Keep these rows, ascending; what stands before the first gap isn't moved."""
        if not stay:  # between calls no memory is held
            for layer in self.layers:
                layer.room, layer.keys, layer.values = [], None, None
        fixed = next((n for n, row in enumerate(stay) if n != row), len(stay))
        moved = torch.tensor(stay[fixed:])
        for layer in self.layers if len(moved) else ():
            for room in layer.room:
                tail = room[:, :, : self.longest].index_select(0, moved.to(room.device))
                room[fixed : len(stay), :, : self.longest] = tail
        self._set(self.lengths[list(stay)])


def window_of(config: Any) -> int | None:
    """Tokens within which all layers see everything before them; None: no bound.

    Raises:
        RunError: a layer keeps a running state instead of keys and values.
    """
    windows: list[int] = []
    for layer in DynamicCache(config=config).layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows.append(int(layer.sliding_window))
        elif type(layer) is not DynamicLayer:
            kind = type(layer).__name__
            raise RunError(
                f"models with layers of kind {kind} are not supported",
                "use a model of plain attention layers",
            )
    return min(windows, default=None)
