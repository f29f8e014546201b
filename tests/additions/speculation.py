"""Speculation: tokens are guessed from the text itself (prompt lookup) and checked in one step."""

from __future__ import annotations

from typing import Any

from tiermoe.batch import Batch, prompt, verify
from tiermoe.model.cache.prefix import common_prefix


def looked_up(tokens: list[int], most: int) -> list[int]:
    """At most `most` tokens that followed the last two where they stood before."""
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 : at + 2 + most]
    return []


def speculate(engine: Any, ids: list[int], count: int, most: int = 4) -> list[int]:
    """`count` greedy tokens after `ids`."""
    cache = engine.new_cache()
    slab = cache.open()
    tokens = [*ids, int(engine.step(Batch((prompt(slab, ids),)), cache).argmax())]
    while len(tokens) < len(ids) + count:
        guessed = looked_up(tokens, most)
        row = verify(slab, cache.length(slab), [tokens[-1], *guessed])
        found = engine.step(Batch((row,)), cache, every=True).argmax(-1).tolist()
        right = common_prefix(guessed, found)
        cache.crop(slab, len(tokens) + right)
        tokens += found[: right + 1]
    return tokens[len(ids) : len(ids) + count]
