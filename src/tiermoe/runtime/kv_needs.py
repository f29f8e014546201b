"""What the key/value cache needs: that of transformers' growing cache, which keeps a window where a layer has one."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer


def kv_bytes(config: Any, latent: bool, context: int, chunk: int, batch: int, itemsize: int) -> int:
    """Bytes of keys and values of `context` tokens in all layers, and of the copy of one layer's that transformers'
    growing cache makes while it appends. A layer with a sliding window holds the window and what was appended last, up
    to `chunk` tokens. `latent`: a compressed cache, of which one layer at a time is expanded."""
    heads, kv_heads, head_dim = attention_shape(config)
    expanded = 0
    if latent:
        per_token = int(config.kv_lora_rank + config.qk_rope_head_dim)
        expanded = int(heads * (2 * config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    else:
        per_token = 2 * kv_heads * head_dim
    positions = _positions(config, context, chunk)
    return batch * itemsize * (per_token * (sum(positions) + 2 * max(positions)) + expanded * context)


def _positions(config: Any, context: int, chunk: int) -> list[int]:
    """How many positions each layer of the cache holds at the most."""
    layers = int(getattr(config, "num_decoder_layers", None) or config.num_hidden_layers)
    if getattr(config, "is_encoder_decoder", False):
        return [context] * (2 * layers)  # the decoder's own and the cross attention to the prompt
    windows = [
        layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else context
        for layer in DynamicCache(config=config).layers
    ]
    # a window is a view of all that was concatenated: the tokens before it stay until the next ones come
    held = [min(window - 1 + chunk, context) if window < context else context for window in windows]
    return held or [context] * layers


def attention_shape(config: Any) -> tuple[int, int, int]:
    """(heads, key/value heads, size of a head) of a config, whatever its family calls them."""
    heads = int(getattr(config, "num_attention_heads", 0) or config.num_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    hidden = int(getattr(config, "hidden_size", 0) or config.d_model)
    head_dim = int(getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or hidden // heads)
    return heads, kv_heads, head_dim
