"""Every family that transformers' code runs, against the plain model with transformers' eager experts."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import tiermoe
import tiny
from families_document import FILE, document
from parity import ROUNDED, close, logits, tokens
from patience import until
from small_families import FAMILIES, LARGER, config_of, plain_model, write_small
from tiermoe.batch import Batch, decode, prompt
from tiermoe.model.decoder import Decoder
from tiermoe.model.families import decoder_family, family_of, not_computed
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.hf.configs import Configs
from tiermoe.model.hf.experts import IMPLEMENTATION, experts_left_out, register
from tiermoe.model.hf.generic import measured_cache, tensors_in
from tiermoe.model.packing import packable
from tiermoe.model.stored_weights import loading_needs


def stepped(engine: Any, ids: list[int], length: int) -> list[int]:
    """ids and the likeliest tokens after them by the engine's steps, of which the last ones run in a fork; after the
    end it is padded."""
    cache = engine.new_cache(2)
    slab, ids = cache.open(), list(ids)
    logits = engine.step(Batch((prompt(slab, ids),)), cache)
    while len(ids) < length:
        ids.append(0 if 2 in ids else int(logits[0].argmax()))
        slab = cache.fork(slab) if len(ids) == length - 3 else slab
        logits = engine.step(Batch((decode(slab, len(ids) - 1, ids[-1]),)), cache)
    return ids


_GROWING = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}

HEARING = {"nemo_speechlm"}
"""Sees nothing."""


@pytest.mark.parametrize("model_type", sorted([*FAMILIES, *LARGER]))
def test_a_family(model_type: str, tmp_path: Path) -> None:
    """Logits of many tokens, and the tokens that both of the engine's ways generate, under a cache that cannot hold all
    experts, with the next layers' routers asked where they can be."""
    directory = write_small(tmp_path, model_type)
    plain = plain_model(directory)
    forecasts = family_of(model_type).forecasts
    ours, _ = tiermoe.load(
        directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1, decoder="generic", chunk=4,
        preset="mixtral-offload" if forecasts else "lru",
    )  # fmt: skip
    ids = tokens(2, 9)
    mine, theirs = logits(ours, model_type, ids), logits(plain, model_type, ids)
    assert close(mine, theirs) if model_type in ROUNDED else torch.equal(mine, theirs)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = plain.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert forecasts or not ours.tiermoe.loader.counts.speculative_loads
    assert stepped(ours.tiermoe, ids[0].tolist(), expected.shape[1]) == expected[0].tolist()
    unread = "does not read sound" if model_type in HEARING else "does not read pictures"
    assert any(unread in each for each in ours.tiermoe.plan.warnings) == (model_type in LARGER)
    seeds = count(2)  # what one prompt needs may all be cached after it

    def read_ahead() -> int:
        logits(ours, model_type, tokens(2, 9, seed=next(seeds)))
        return ours.tiermoe.loader.counts.speculative_loads

    if forecasts:
        until(read_ahead)  # on a busy machine a prediction may be taken back before any lane has begun with it
    ours.tiermoe.close()


def test_the_document_lists_what_is_tested() -> None:
    assert FILE.read_text() == document(), "run: python tests/families_document.py"


@pytest.mark.parametrize(("model_type", "kept"), [("jamba", "dt_proj"), ("nemotron_h", "gate")])
def test_layers_whose_weights_code_computes_with_stay(model_type: str, kept: str, tmp_path: Path) -> None:
    """And what is packed to 4 bits runs."""
    directory = write_small(tmp_path, model_type)
    kinds = {name.rpartition(".")[2] for name in inspect_model(directory, model_type).outline.packable}
    assert kept not in kinds
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=4, lanes=1, decoder="generic", preset="lru")
    assert bool(logits(ours, model_type, tokens(1, 9)).isfinite().all())
    ours.tiermoe.close()


def test_a_matrix_whose_rows_are_several_tensors_is_packed(tmp_path: Path) -> None:
    directory = write_small(tmp_path, "minimax_m3_vl")
    packed = packable(inspect_model(directory, "tiny"))
    gate, up = packed["model.language_model.layers.0.mlp.gate_up_proj"]
    assert (gate.rpartition("mlp.")[2], up.rpartition("mlp.")[2]) == ("gate_proj.weight", "up_proj.weight")
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, dense_bits=8)
    mine = ours.tiermoe.decoder.layers[0].feed_forward.first[0].packed
    decoded = mine.encoding.decode(mine.fields, mine.out, mine.in_, torch.float32)
    theirs = plain_model(directory).model.language_model.layers[0].mlp.gate_up_proj.weight
    assert (decoded - theirs).abs().max() < 0.01 * theirs.abs().max()
    ours.tiermoe.close()


@pytest.mark.parametrize("model_type", ["deepseek_v32", "gemma4_text", "jamba", "kimi_linear"])
def test_the_cache_takes_what_the_model_says_of_itself(model_type: str) -> None:
    """Tensors of a real cache, against what a pass on the meta device measured."""
    torch.manual_seed(0)
    config = config_of(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        cache = model(tokens(1, 24), use_cache=True).past_key_values
    held = sum(sum(each.untyped_storage().nbytes() for each in tensors_in(vars(layer))) for layer in cache.layers)
    with experts_left_out(family_of(model_type), config), torch.device("meta"):
        register()
        skeleton = type(model)._from_config(config, dtype=torch.float32, experts_implementation=IMPLEMENTATION)
    grown = measured_cache(skeleton, 64)
    assert grown is not None
    assert sum(layer.nbytes(24, 24) for layer in grown) == held


# configs that have a decoder of ours, and the text part of a larger model

_CHUNKED = ["chunked_attention", "full_attention", "chunked_attention"]
_ALONE = "a layer that shares what an indexer chose, behind none that has it"


@pytest.mark.parametrize(
    ("model_type", "changes", "lacking"),
    [
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "embeddings of each layer"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "layers that share keys and values"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ("gemma4_text", {"hidden_activation": "quick_gelu"}, "quick_gelu, rotary embedding 'unknown'"),
        ("gemma4_text", {"use_bidirectional_attention": "vision", "attention_k_eq_v": False}, ""),
        ("glm5_next_text", {"index_kpool_always_select_tail": False}, "pools without the positions behind them"),
        ("glm5_next_text", {"indexer_types": ["full", "full", "shared"]}, _ALONE),
        ("glm5_next_text", {"indexer_types": ["full", "shared", "full"]}, ""),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, _ALONE),
        ("granitemoe_swa", {"layer_rope_theta": [0, 1e4, 1e5]}, "layers with rotary embeddings of their own bases"),
        ("granitemoe_swa", {"layer_rope_theta": None}, ""),
        ("hy_v4", {"indexer_types": ["shared", "full", "full"]}, _ALONE),
        ("hunyuan_v1_moe", {"moe_topk": [2, 3, 4]}, "layers that use different numbers of experts"),
        ("hunyuan_v1_moe", {"moe_topk": [3, 3, 3]}, ""),
        ("hunyuan_v1_moe", {"rope_parameters": _GROWING}, "silu, rotary embedding 'dynamic'"),
        ("llama4_text", {"num_experts_per_tok": 2}, "several experts a token"),
        ("llama4_text", {"layer_types": ["full_attention"] * 3}, "positions without chunks, or chunks without them"),
        ("llama4_text", {"attention_chunk_size": None, "layer_types": _CHUNKED}, "chunks of no size"),
    ],
)
def test_what_no_block_computes_is_named(model_type: str, changes: dict[str, Any], lacking: str) -> None:
    written = tiny.config_of(model_type, **changes)
    config = Configs(written, written, False).plain()
    assert not_computed(config) == lacking
    assert (decoder_family(config) is not None) == (not lacking)


def test_a_shared_expert_beside_the_block_has_the_config_s_activation(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, "granitemoeshared", torch.float32, hidden_act="gelu")
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    assert isinstance(ours.tiermoe.decoder, Decoder)
    plain, ids = tiny.oracle(directory, "granitemoeshared", torch.float32), tokens(2, 9)
    assert close(logits(ours, "", ids), logits(plain, "", ids))
    ours.tiermoe.close()


def test_hunyuan_4_runs_as_it_is_published(tmp_path: Path) -> None:
    """By the published names, and with an MTP layer, which transformers does not have: the plan does not count it."""
    directory = tiny.write(tmp_path, "hy_v4", torch.float32)
    plain, ids = tiny.oracle(directory, "hy_v4", torch.float32), tokens(2, 9)
    published = {
        ".attn_hc.": ".hc_attn_layer.hc_pre.hc_", ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
        "hc_head.hc_": "hc_head.hc_head_", ".sinks": ".learnable_sink_param",
        ".self_attn.gate_proj": ".self_attn.linear_gate",
    }  # fmt: skip
    tensors = {}
    for name, tensor in plain.state_dict().items():
        for own, theirs in published.items():
            name = name.replace(own, theirs)
        tensors[name] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    without = loading_needs(inspect_model(directory, "without"), 0)
    layer = {name: tensor.clone() for name, tensor in tensors.items() if ".layers.2." in name}
    tensors |= {name.replace(".layers.2.", ".mtp_layers.0."): tensor for name, tensor in layer.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert loading_needs(inspect_model(directory, "with"), 0) == without
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    assert isinstance(ours.tiermoe.decoder, Decoder)
    assert close(logits(ours, "hy_v4", ids), logits(plain, "hy_v4", ids))
    ours.tiermoe.close()


@pytest.mark.parametrize("family", ["glm5_next_text", "bailing_hybrid", "hy_v4"])
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    directory, ids = tiny.write(tmp_path, family, torch.float32), tokens(2, 21, seed=3)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    plain = tiny.oracle(directory, family, torch.float32)
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))
    ours.tiermoe.close()


@pytest.mark.parametrize("model_type", ["gemma4", "glm5_next", "internvl", "kimi_k25", "minimax_m3_vl", "qwen3_5_moe"])
def test_the_text_part_of_a_larger_model_has_its_family_s_decoder(model_type: str, tmp_path: Path) -> None:
    directory = write_small(tmp_path, model_type)
    ours, _ = tiermoe.load(directory, memory="4GiB", device="cpu", bits=16, cache="40%", lanes=1)
    assert isinstance(ours.tiermoe.decoder, Decoder)
    plain, ids = plain_model(directory), tokens(2, 9)
    assert close(logits(ours, model_type, ids), logits(plain, model_type, ids))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **options), plain.generate(ids, **options))
    ours.tiermoe.close()
