"""Layers whose experts follow from the token alone (hash layers; DeepSeek-V4's first ones): their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermoe.model.decoder import Decoder
from tiermoe.model.families.family import Family


class TokenTable:
    """`policies.prediction.HashTable` of a router's own table (vocabulary, K) of expert indices."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table.cpu()

    def __getitem__(self, token_id: int) -> Sequence[int]:
        experts: list[int] = self._table[token_id].tolist()
        return experts


def decoder_tables(decoder: Decoder) -> dict[int, TokenTable]:
    """MoE layer → its table, of the layers of a decoder of ours that have one."""
    return {layer: TokenTable(table) for layer, table in decoder.tables.items()}


def router_tables(routers: Sequence[Any], family: Family) -> dict[int, TokenTable]:
    """MoE layer → the table of its router of transformers', of the layers that have one."""
    if family.hash_table is None:
        return {}
    tables = {layer: getattr(router, family.hash_table, None) for layer, router in enumerate(routers)}
    return {layer: TokenTable(table) for layer, table in tables.items() if table is not None}
