"""Tiny random checkpoints of the families that transformers' code runs, and of models that read more than text: tables
of what their configs need beside `tiny`'s usual entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import tiny
from tiny import make_random, write_tokenizer

_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LATENT = {"num_key_value_heads": 4}
_THREE = ["linear_attention", "full_attention", "linear_attention"]
_SPARSE = ["dense", "sparse", "sparse"]

FAMILIES: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_topk": 3},
    "axk2": {**_LATENT, "gated_norm_rank": 8},
    "beam": {"mlp_layer_types": _SPARSE},
    "cohere2_moe": {},
    "dots3_note_text": _LATENT,
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "inkling2_text": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 4,
        "unpadded_vocab_size": 128,
    },
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 4},
    "laguna": {},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""model_type → config entries. (Those of `tiny.CONFIGS` are tested by `test_parity`; Gemma 4
is there without embeddings of each layer, and has a decoder of ours.)"""


_SMALL_PART: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "depth": 1,
    "num_heads": 2, "out_hidden_size": 64, "text_hidden_size": 64, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip

_SAM: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16, "mlp_dim": 32,
    "global_attn_indexes": [0], "image_size": 64,
}  # fmt: skip
_SOUND = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}

LARGER: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "aria": ("aria_text", {}, {}),
    "dots3_note": (
        "dots3_note_text", {}, {
            "vision_config": {"mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": 64},
            "audio_config": {
                "adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 16, "feature_size": 16,
            },
        },
    ),
    "deepseek_ocr2": (
        "deepseek_ocr2_text", {"mlp_layer_types": _SPARSE}, {
            "vision_config": {
                "sam_config": {**_SAM, "downsample_channels": [8, 32]}, "encoder_config": _SMALL_PART,
            },
        },
    ),
    "gemma4": ("gemma4_text", {"hidden_size_per_layer_input": 0}, {}),
    "glm4v_moe": ("glm4v_moe_text", {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}, {}),
    "glm5_next": ("glm5_next_text", {}, {}),
    "inkling2": ("inkling2_text", {}, {}),
    "inkling_mm_model": ("inkling_text", {}, {"vision_config": {"num_hidden_layers": 4, "patch_size": 4}}),
    "internvl": ("qwen3_moe", {}, {"vision_config": {"image_size": [28, 28]}}),
    "kimi_k25": ("deepseek_v3", {}, {}),
    "llama4": ("llama4_text", {}, {}),
    "minimax_m3_vl": ("minimax_m3_vl_text", {}, {}),
    "mistral3": ("mistral4", {}, {}),
    "mistral_large4": ("mistral_large4_text", {**_LATENT, "no_rope_layers": [1, 0, 1]}, {}),
    "nemo_speechlm": (
        "nemotron_h", {}, {
            "audio_config": {
                "asr_config": _SMALL_PART,
                "diarization_config": {"audio_config": _SMALL_PART, "head_config": {"audio_hidden_size": 32}},
            },
        },
    ),
    "nemotron_h_omni": (
        "nemotron_h", {}, {
            "vision_config": {"video_temporal_patch_size": 2},
            "audio_config": {
                **_SMALL_PART, "subsampling_conv_channels": 8, "projection_hidden_size": 32, "projection_bias": False,
            },
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"layer_types": _THREE}, {}),
    "qwen3_omni_moe": ("qwen3_omni_moe_text", {}, {}),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe_text", {"rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}, "sliding_window": None}, {
            "vision_config": {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "audio_config": {**_SOUND, "downsample_hidden_size": 8, "output_dim": 64},
            "vision_start_token_id": 127,
        },
    ),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {}, {}),
    "qwen4_exp": ("qwen4_exp_text", {}, {}),
}  # fmt: skip
"""model_type of a model that reads more than text → that of its text part, entries of that and of the other parts'
configs. That of `qwen3_omni_moe` is the thinker's."""

_SPEAKING: dict[str, dict[str, Any]] = {
    "talker_config": {
        "text_config": {**_SMALL_PART, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
                        "shared_expert_intermediate_size": 16, "vocab_size": 64},
        "code_predictor_config": {**_SMALL_PART, "vocab_size": 64, "num_code_groups": 4},
        "num_code_groups": 4, "thinker_hidden_size": 64, "spatial_merge_size": 2,
    },
    "code2wav_config": {
        "codebook_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_quantizers": 4, "decoder_dim": 32,
    },
}  # fmt: skip
"""Small configs of the parts of Qwen3-Omni that speak."""


def config_of(model_type: str, **changes: Any) -> Any:
    """A small config of a family."""
    return tiny.config_of(model_type, **{**FAMILIES.get(model_type, {}), **changes})


def larger_config(model_type: str) -> Any:
    """A small config of a model that reads more than text."""
    if model_type == "qwen3_omni_moe":
        thinker = larger_config("qwen3_omni_moe_thinker").to_dict()
        return AutoConfig.for_model(model_type, thinker_config=thinker, **_SPEAKING)
    text, its, changes = LARGER[model_type]
    usual = CONFIG_MAPPING[model_type]()
    parts = {
        name: {**tiny.known(type(getattr(usual, name)), _SMALL_PART), **changes.get(name, {})}
        for name in usual.sub_configs
        if name != "text_config" and getattr(usual, name, None) is not None
    }
    return AutoConfig.for_model(model_type, text_config=config_of(text, **its).to_dict(), **{**changes, **parts})


def write_small(directory: Path, model_type: str, **changes: Any) -> Path:
    """Writes a random float32 checkpoint of a family into `directory` and returns it. Skips the test where this
    transformers has no such family."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no '{model_type}'")
    torch.manual_seed(0)
    config = larger_config(model_type) if model_type in LARGER else config_of(model_type, **changes)
    model = _auto_class(config)._from_config(config, dtype=torch.float32, experts_implementation="eager")
    make_random(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def plain_model(directory: Path) -> Any:
    """The model with transformers' eager experts (see `tiny.oracle`); of Qwen3-Omni the part that answers."""
    config = AutoConfig.from_pretrained(directory)
    # transformers 5.24's whole Llama 4 fails where there are no pictures
    cls = AutoModelForCausalLM if config.model_type == "llama4" else _auto_class(config)
    model = cls.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    model = getattr(model, "thinker", model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def _auto_class(config: Any) -> Any:
    """transformers' class of a model: the whole of a larger one."""
    mappings = (transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
    return next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
