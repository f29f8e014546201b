"""A key/value cache that takes a token without being copied."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer

ROOM = 64  # positions by which a cache grows: appending a token copies it every 64th time only


class Room:
    """A key/value cache with places for tokens to come: a layer's `keys` and `values` are views of its first ones."""

    def __init__(self, cache: DynamicLayer) -> None:
        self.keys, self.values = _grown(cache.keys), _grown(cache.values)
        self._shown: tuple[torch.Tensor, torch.Tensor] | None = None

    def show(self, cache: DynamicLayer, length: int) -> None:
        """Makes the first `length` positions what the layer holds."""
        cache.keys, cache.values = self._shown = self.keys.narrow(2, 0, length), self.values.narrow(2, 0, length)

    def takes_one_more(self, cache: DynamicLayer) -> bool:
        """Whether the layer holds what was last shown, and not what somebody cropped, reordered or copied."""
        shown = self._shown is not None and cache.keys is self._shown[0] and cache.values is self._shown[1]
        return shown and cache.keys.shape[2] < self.keys.shape[2]


def room_in(cache: DynamicLayer) -> Room:
    """The room of a cache's layer, made or made larger where it has none for one more token."""
    room: Room | None = getattr(cache, "tiermoe_room", None)
    if room is None or not room.takes_one_more(cache):
        room = cache.tiermoe_room = Room(cache)
    return room


def _grown(held: torch.Tensor) -> torch.Tensor:
    batch, heads, length, columns = held.shape
    grown = torch.empty((batch, heads, length + ROOM, columns), dtype=held.dtype)
    grown[:, :, :length] = held
    return grown
