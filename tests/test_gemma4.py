"""Gemma 4: which of its configs have a decoder of ours, and the text part of a larger model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiermoe
import tiny
from parity import close, logits, tokens
from small_families import plain_model, write_small
from tiermoe.model.architectures import decodes, not_computed
from tiermoe.model.decoder import Decoder


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"hidden_size_per_layer_input": 8}, "embeddings of each layer"),
        ({"num_kv_shared_layers": 1}, "layers that share keys and values"),
        ({"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ({"hidden_activation": "quick_gelu"}, "quick_gelu, rotary embedding 'unknown'"),
        ({"use_bidirectional_attention": "vision", "attention_k_eq_v": False}, ""),
    ],
)
def test_what_no_block_computes_is_named(changes: dict[str, Any], lacking: str) -> None:
    config = tiny.config_of("gemma4_text", **changes)
    assert not_computed(config) == lacking
    assert decodes(config) == (not lacking)


@pytest.mark.parametrize("model_type", ["gemma4", "internvl", "kimi_k25", "qwen3_5_moe"])
def test_the_text_part_of_a_larger_model_has_its_family_s_decoder(model_type: str, tmp_path: Path) -> None:
    directory = write_small(tmp_path, model_type)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    assert isinstance(ours.tiermoe.steps.decoder, Decoder)
    plain, ids = plain_model(directory), tokens(2, 9)
    assert close(logits(ours, model_type, ids), logits(plain, model_type, ids))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))
    ours.tiermoe.close()
