"""Models in GGUF files run where they lie: logits and tokens are those of transformers' eager model with the weights
that the gguf package dequantises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gguf_files
from gguf_engines import eager_greedy, engine_of, greedy, logits_of
from gguf_files import kinds
from parity import close, tokens
from tiermoe.batch import Batch, decode, prompt
from tiermoe.model.gguf.outline import outline_of
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.model_config import ModelConfig

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "factor": 4.0}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
        "short_factor": [1 + i / 8 for i in range(8)], "long_factor": [1 + i for i in range(8)],
        "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}),
    "deepseek": ("deepseek", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v32": ("deepseek_v32", {}),
    "deepseek_v32 yarn": ("deepseek_v32", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v4": ("deepseek_v4", {"swiglu_limit": 0.5, "index_topk": 3, "sliding_window": 16}),
    "deepseek_v4 yarn": (
        "deepseek_v4",
        {"rope_parameters": YARN, "scoring_func": "sigmoid", "layer_types": ["compressed_sparse_attention"] * 3},
    ),
    "hy_v4": ("hy_v4", {"index_topk": 10}),
    "hy_v4 yarn": (
        "hy_v4",
        {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "indexer_types": ["full"] * 3},
    ),
    "qwen3_next": ("qwen3_next", {"linear_num_value_heads": 6}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"linear_num_value_heads": 6}),
    "qwen4_exp": ("qwen4_exp_text", {"linear_num_value_heads": 6}),
    "qwen4_exp of longer n-grams": (
        "qwen4_exp_text",
        {
            "ple_layer_ids": [3],
            "ngram_size": 4,
            "ple_embed_dim": 192,
            "ple_conv_kernel_size": 3,
            "seed": 77,
            "make_ngram_vocab_size_divisible_by": 128,
            "hc_count": 3,
            "indexer_compress_ratio": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen4_exp without n-grams": ("qwen4_exp_text", {"ple_layer_ids": []}),
    "kimi_linear": ("kimi_linear", {"n_group": 1, "topk_group": 1, "linear_head_dim": 32}),
    "glm5_next": ("glm5_next_text", {"linear_head_dim": 32, "linear_lower_bound": -2.0, "swiglu_limit": 0.5}),
    "glm5_next of shared choices": (
        "glm5_next_text",
        {
            "linear_lower_bound": None,
            "layer_types": ["linear_attention", *["indexed_attention"] * 2],
            "indexer_types": ["full", "full", "shared"],
        },
    ),
    "ling3": ("bailing_hybrid", {"head_dim": 32, "kda_lower_bound": -3.0}),
    "phimoe": ("phimoe", {"attention_bias": True, "lm_head_bias": True, "rope_parameters": LONG}),
    "phimoe without biases": ("phimoe", {"sliding_window": 7}),
    "dots1": ("dots1", {"head_dim": 32, "routed_scaling_factor": 1.5, "n_shared_experts": 2}),
    "dots1 with biases": ("dots1", {"attention_bias": True, "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.5}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm_moe_dsa of wide indexers alone": ("glm_moe_dsa", {"indexer_types": ["full"] * 3, "index_n_heads": 64}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m3": ("minimax_m3_vl_text", {}),
    "minimax_m3 of other blocks": (
        "minimax_m3_vl_text",
        {"index_block_size": 3, "index_topk_blocks": 3, "index_local_blocks": 2, "shared_intermediate_size": 64},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", {"attention_value_scale": 0.5, "sliding_window": 7}),
    "mistral4": ("mistral4", {}),
    "exaone_moe": ("exaone_moe", {}),
    "afmoe": ("afmoe", {}),
    "llama4": ("llama4_text", {}),
    "llama4 of other layers": ("llama4_text", {"interleave_moe_layer_step": 1, "tie_word_embeddings": True}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "hy_v3": ("hy_v3", {"router_scaling_factor": 1.5}),
    "hy_v3 of more shared experts": ("hy_v3", {"num_shared_experts": 2, "mlp_layer_types": ["sparse"] * 3}),
    "mellum": (
        "mellum",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "mellum without windows": ("mellum", {"layer_types": ["full_attention"] * 3, "sliding_window": None}),
    "gemma4": ("gemma4_text", {}),
    "gemma4 with values of their own": (
        "gemma4_text",
        {
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
            "final_logit_softcapping": None,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": ("lfm2_moe", {"routed_scaling_factor": 1.0}),  # the converter writes no other
    "granitemoe": ("granitemoeshared", {"shared_intermediate_size": 0, "residual_multiplier": 0.5}),
    "granitemoeshared": ("granitemoeshared", {"shared_intermediate_size": 64, "attention_multiplier": 0.2}),
    "granitemoehybrid": ("granitemoehybrid", {"shared_intermediate_size": 64, "max_position_embeddings": 1 << 20}),
    "granitemoe_swa": ("granitemoe_swa", {"sliding_window": 7, "shared_intermediate_size": 64}),
    "granitemoe_swa without a shared expert": ("granitemoe_swa", {"layer_rope_theta": None}),
    "jamba": ("jamba", {}),
    "jamba of other periods": (
        "jamba",
        {"attn_layer_period": 8, "attn_layer_offset": 2, "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h without latents": ("nemotron_h", {"moe_latent_size": None, "tie_word_embeddings": True}),
}


ELSE_ORDERED = ("gpt_oss", "llama4", "llama4 of other layers", "qwen3_next")
"""Models whose matrices are not in the order of transformers' parameters."""


GLM5 = ("glm5_next", "glm5_next of shared choices")


LEFT = (
    "deepseek_v4", "deepseek_v4 yarn", "hy_v4", "hy_v4 yarn", "afmoe", "hunyuan_v1_moe", "lfm2_moe", "qwen4_exp",
    "qwen4_exp of longer n-grams", "qwen4_exp without n-grams", "gemma4", "gemma4 with values of their own", "ling3",
    *GLM5,
)  # fmt: skip
"""Models whose outlines are left to transformers' code."""


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_and_tokens_are_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = gguf_files.model_of(family, **changes)
    file = gguf_files.write(tmp_path / "model.gguf", model, family, kinds("q8_0", "q5_0", "q4_0"))
    engine = engine_of(file, store=tmp_path / "store")
    ids = tokens(1, 40)[0].tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    found = logits_of(engine, ids)
    assert (found - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    assert greedy(engine, ids[:16], 14) == eager_greedy(model, ids[:16], 14)
    engine.close()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ELSE_ORDERED])
def test_tensors_are_the_dequantised_ones_bit_for_bit(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    model = gguf_files.model_of(family, **changes)
    file = gguf_files.write(tmp_path / "model.gguf", model, family, kinds("q8_0", "q5_0", "q4_0"))
    checkpoint = inspect_model(file, str(file), tmp_path / "store").checkpoint
    wanted = model.state_dict()
    for path in checkpoint.tensors:
        assert torch.equal(checkpoint.read(path).float(), wanted[path]), path


@pytest.mark.parametrize(
    "name",
    [
        "minimax_m3", "granitemoe_swa", "qwen4_exp", "hy_v3", "gemma4", "mellum", "deepseek_v32", "glm_moe_dsa",
        "ling3", "glm5_next",
    ],
)  # fmt: skip
def test_a_ragged_batch_and_a_forked_prefix(name: str, tmp_path: Path) -> None:
    """Sequences of other lengths than a window or the blocks that an indexer chooses, in one step."""
    family, changes = MODELS[name]
    model = gguf_files.model_of(family, **changes)
    file = gguf_files.write(tmp_path / "model.gguf", model, family, kinds("q8_0", "q5_0", "q4_0"))
    engine = engine_of(file, store=tmp_path / "store")
    long, short, third = (tokens(1, count, seed=count)[0].tolist() for count in (41, 6, 30))
    cache = engine.new_cache(4, 48)
    slabs = [cache.open() for _ in range(3)]
    engine.step(Batch((prompt(slabs[0], long[:-1]),)), cache)
    fork = cache.fork(slabs[0])
    engine.step(Batch((prompt(slabs[1], short[:-1]),)), cache)
    rows = (decode(slabs[0], 40, long[40]), decode(slabs[1], 5, short[5]), prompt(slabs[2], third), decode(fork, 40, 7))
    found = engine.step(Batch(rows, ragged=True), cache)
    engine.close()
    for logits, ids in zip(found, (long, short, third, [*long[:-1], 7]), strict=True):
        with torch.no_grad():
            assert close(logits, model(torch.tensor([ids])).logits[0, -1])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LEFT])
def test_names_and_shapes_tell_what_transformers_code_does(name: str, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.model_of(family, **changes), family, kinds("q8_0"))
    inspected = inspect_model(file, str(file), tmp_path / "store")
    for dtype in (torch.float32, torch.bfloat16):
        blueprint = replace(inspected, dtype=dtype)
        found = outline_of(blueprint.checkpoint, blueprint.config, dtype)
        wanted = replace(blueprint, known=None).outline
        assert found is not None
        assert abs(found.dense_bytes - wanted.dense_bytes) < 1024  # without buffers of rotary embeddings
        assert sorted(found.packable) == sorted(wanted.packable)
        assert replace(found, dense_bytes=0, packable=()) == replace(wanted, dense_bytes=0, packable=())


def test_a_file_that_is_not_as_its_config_says_is_left_to_transformers_code(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.model_of("qwen3_moe"), "qwen3_moe", kinds("q8_0"))
    blueprint = inspect_model(file, str(file), tmp_path / "store")
    assert blueprint.known is not None
    fewer = {"num_experts": 4, "num_local_experts": 4}
    for changes in ({"head_dim": 32}, fewer, {"hidden_act": "gelu"}, {"num_hidden_layers": 2}):
        config = ModelConfig({**blueprint.config.fields, **changes}, {})
        assert outline_of(blueprint.checkpoint, config, torch.bfloat16) is None
    assert outline_of(blueprint.checkpoint, blueprint.config, torch.float16) is None


START = """
import sys
from pathlib import Path
from tiermoe.platform import process_memory
process_memory.import_libraries(own_process=True)
from tiermoe.config import settings
from tiermoe.engine.load import start
from tiermoe.model.hf.blueprint import inspect_model
asked = settings(threads=1, memory="4GiB", store=sys.argv[2])
engine = start(inspect_model(Path(sys.argv[1]), sys.argv[1], asked.store), asked)
assert not [name for name in sys.modules if name.startswith("transformers.models.qwen3_moe.modeling")]
engine.close()
"""


def test_the_first_start_imports_no_modelling_code(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "model.gguf", gguf_files.model_of("qwen3_moe"), "qwen3_moe", kinds("q8_0"))
    done = subprocess.run(
        [sys.executable, "-c", START, file, tmp_path / "store"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
