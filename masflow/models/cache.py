"""The key-value cache of a decoding batch: grows by steps, not by a copy a token. Knows no masks.

Shapes: B rows, H heads, L tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from masflow.errors import RunError

__all__ = ["make_cache", "select_rows", "window_of"]

_STEP = 32
"""Tokens of room that a full cache makes at once."""


class RoomyLayer(DynamicLayer):
    """A `DynamicLayer` with spare room behind its tokens; `keys` and `values` are views of what is filled."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append (B, H, L', D) keys and values; all of them, (B, H, L + L', D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._room = [key_states[:, :, :0], value_states[:, :, :0]]
            self._length = 0
        length = self._length + key_states.shape[-2]
        if length > self._room[0].shape[-2]:
            self._room = [_grown(room, self._length, length + _STEP) for room in self._room]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, self._length : length] = states
        self._length = length
        self.keys, self.values = (room[:, :, :length] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self._room = [room.index_select(0, indices) for room in self._room]
        self.keys, self.values = (room[:, :, : self._length] for room in self._room)


def make_cache(config: Any) -> Cache:
    """An empty cache for every layer of a model whose window is at least as long as what it will hold."""
    layers = DynamicCache(config=config).layers
    return Cache(layers=[RoomyLayer() for _ in layers])


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep these rows (int64) of the batch, in this order; a row may be taken several times."""
    for layer in cache.layers:
        assert isinstance(layer, RoomyLayer)
        layer.batch_select_indices(rows)


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


def _grown(room: Tensor, filled: int, size: int) -> Tensor:
    bigger = torch.empty((*room.shape[:2], size, room.shape[3]), dtype=room.dtype, device=room.device)
    bigger[:, :, :filled] = room[:, :, :filled]
    return bigger
