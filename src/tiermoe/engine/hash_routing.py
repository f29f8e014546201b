"""Layers whose experts follow from the token alone (hash layers; DeepSeek-V4's first ones): their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiermoe.engine.forecasts import router_beside
from tiermoe.families import Family
from tiermoe.model.shells import is_shell


class TokenTable:
    """`decide.prediction.protocol.HashTable` of a router's own table (vocabulary, K) of expert indices."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table.cpu()

    def __getitem__(self, token_id: int) -> Sequence[int]:
        experts: list[int] = self._table[token_id].tolist()
        return experts


def token_tables(model: Any, family: Family) -> dict[int, TokenTable]:
    """MoE layer → the table of its router, of the layers that have one."""
    if family.hash_table is None:
        return {}
    routers = [router_beside(shell, model) for shell in model.modules() if is_shell(shell)]
    tables = {layer: getattr(router, family.hash_table, None) for layer, router in enumerate(routers)}
    return {layer: TokenTable(table) for layer, table in tables.items() if table is not None}
