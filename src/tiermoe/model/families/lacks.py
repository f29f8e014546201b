"""The parts of a family's configs that no block computes, in words; empty: none. Such a model is run by transformers'
code."""

from __future__ import annotations

from typing import Any

from tiermoe.model.attention.linear import is_linear
from tiermoe.model.families.router_rules import hunyuan_top_k


def minimax_m3_lacks(config: Any) -> str:
    sparse = "minimax_m3_sparse" in config.layer_types
    apart = sparse and config.index_n_heads != config.num_key_value_heads
    return "an indexer of other groups of heads than share keys and values" if apart else ""


def deepseek_v4_lacks(config: Any) -> str:
    known = config.scoring_func in ("sqrtsoftplus", "sigmoid")
    return "" if known else f"routers that score by '{config.scoring_func}'"


def hunyuan_lacks(config: Any) -> str:
    return "" if len(set(hunyuan_top_k(config))) == 1 else "layers that use different numbers of experts"


def granite_windows_lack(config: Any) -> str:
    """Of GraniteMoE with sliding windows."""
    bases = {base for base in config.layer_rope_theta if base}
    return "" if bases <= {config.rope_parameters["rope_theta"]} else "layers with rotary embeddings of their own bases"


def indexer_lacks(config: Any) -> str:
    """Of families with indexers in latent attention."""
    kinds = getattr(config, "indexer_types", None) or []
    for layer, kind in enumerate(kinds[: config.num_hidden_layers]):
        alone = layer == 0 or is_linear(config, layer - 1)
        if kind == "shared" and alone and not is_linear(config, layer):
            return "a layer that shares what an indexer chose, behind none that has it"
    whole = getattr(config, "index_kpool", None) is None or config.index_kpool_always_select_tail
    return "" if whole else "pools without the positions behind them"
