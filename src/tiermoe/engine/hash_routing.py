"""Layers whose experts follow from the token alone (hash layers; DeepSeek-V4's first ones): their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermoe.model.families.table import Family
from tiermoe.model.hf.shells import routers_of


class TokenTable:
    """`policies.prediction.HashTable` of a router's own table (vocabulary, K) of expert indices."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table.cpu()

    def __getitem__(self, token_id: int) -> Sequence[int]:
        experts: list[int] = self._table[token_id].tolist()
        return experts


def token_tables(model: Any, family: Family) -> dict[int, TokenTable]:
    """MoE layer → the table of its router, of the layers that have one."""
    if family.hash_table is None:
        return {}
    tables = {layer: getattr(router, family.hash_table, None) for layer, (_, router) in enumerate(routers_of(model))}
    return {layer: TokenTable(table) for layer, table in tables.items() if table is not None}
