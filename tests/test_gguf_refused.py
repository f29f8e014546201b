"""GGUF files that contradict themselves are refused in a line; what a file that does not say something means."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

import gguf_files
from gguf_engines import eager, logits_in
from gguf_files import altered, kinds
from parity import close, tokens
from tiermoe.errors import ModelError
from tiermoe.model.hf.blueprint import inspect_model

Given = Callable[..., Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Case → its file."""

    @cache
    def written(name: str) -> Path:
        out = tmp_path_factory.mktemp("gguf") / "model.gguf"
        return gguf_files.write(out, gguf_files.model_of(name), name, kinds("q8_0"))

    return written


@pytest.fixture
def given(files: Callable[[str], Path], tmp_path: Path) -> Given:
    """(case, other entries or tensors) → a file."""
    return lambda name, **other: altered(files(name), tmp_path / "model.gguf", **other)


def config_of(file: Path) -> Any:
    return inspect_model(file, "model", file.parent / "store").config


_INDEXER = [
    ("attention.indexer.top_k", None, r"says nothing of [\w-]+.attention.indexer.top_k; convert the model again"),
    ("attention.indexer.head_count", 0, "indexer.head_count is 0, which is not a whole number of at least 1"),
    ("attention.indexer.key_length", 8, r"indexer.\w+.weight has the shape .*, by the file's entries it has"),
    ("attention.q_lora_rank", None, r"says nothing of [\w-]+.attention.q_lora_rank"),
    ("expert_gating_func", 1, r"routers that score by function 1, not by sigmoid \(2\); download it again"),
]
ENTRIES: dict[str, list[tuple[str, Any, str]]] = {
    "afmoe": [("expert_weights_norm", False, "has no sigmoid router whose weights sum to 1")],
    "granitemoeshared": [("rope.scaling.finetuned", False, "has no rotary embedding")],
    "deepseek_v4": [
        ("attention.compress_ratios", [8], "does not say how many positions each of 3 layers compresses"),
        ("attention.compress_ratios", [8, -4, 0], "does not say how many positions"),
        ("attention.compress_ratios", [8, 16, 0], "compresses 8 or 16 positions into an entry"),
        ("swiglu_clamp_exp", [0.5, 0.5, 1.0], "does not limit the gate of all experts by one number"),
        ("expert_gating_func", 1, "score by function 1, which no DeepSeek-V4 does"),
        ("hyper_connection.count", 0, "a whole number of at least 1"),
    ],
    "hy_v4": [
        ("attention.indexer.types", None, "does not say which of its 3 layers have an indexer"),
        ("attention.indexer.types", [True, False], "does not say which of its 3 layers"),
        ("attention.indexer.types", [False, True, True], "has no indexer in its first layer, which every"),
        ("attention.indexer.key_length", 24, "indexer.attn_q_b of 256 rows has no heads of 24, of which 8 are"),
        ("rope.dimension_count", 7, r"has no heads of \d+, of which 7 are rotated"),
        ("swiglu_clamp_exp", None, "does not limit the gate of all experts by one number"),
        ("expert_gating_func", 1, "routers that score by no sigmoid, which every Hunyuan 4 does"),
    ],
    "dots1": [("expert_gating_func", 1, r"has no sigmoid router, which every dots\.llm1 has; download it again")],
    "deepseek_v32": _INDEXER,
    "glm_moe_dsa": [
        *_INDEXER,
        ("attention.indexer.types", [True, False], "does not say which of its 3 layers have an indexer; download it"),
        ("attention.indexer.types", 1, "does not say which of its 3 layers have an indexer"),
        # files of converters that are older than the indexer in llama.cpp
        ("attention.indexer.types", [True] * 3, r"has no tensor blk.1.indexer.proj.weight; convert the model again"),
    ],
    "glm5_next of shared choices": [
        ("kda.gate_lower_bound", 2.0, "kda.gate_lower_bound is 2.0, not a number below 0; download it again"),
        ("attention.indexer.kpool", None, "says nothing of glm5-next.attention.indexer.kpool; convert the"),
        ("attention.indexer.kpool", 0, "attention.indexer.kpool is 0, which is not a whole number of at least"),
        ("attention.indexer.kpool", 4, "index_kpool_compress_ape has the shape .*, by the file's entries"),
        ("attention.indexer.kpool", 3, "index_topk .* must be divisible by index_kpool"),
        ("attention.indexer.types", [True], "does not say which of its 3 layers have an indexer; download it"),
        ("expert_gating_func", 1, "has no sigmoid router, which every GLM-5 Next has"),
        ("swiglu_clamp_exp", [1.0, 2.0, 3.0], "does not limit the gate of all experts by one number"),
        ("hyper_connection.count", None, "says nothing of glm5-next.hyper_connection.count"),
        ("rope.dimension_count", 8, "transformers .* refuses what .* NoPE"),
    ],
    "ling3": [
        ("kda.gate_lower_bound", None, "kda.gate_lower_bound is None, not a number below 0; download it again"),
        ("kda.gate_lower_bound", 5.0, "kda.gate_lower_bound is 5.0, not a number below 0"),
        ("kda.safe_gate", False, "or no bound of its decays .*, and every Ling 3.0 has both; download it"),
        ("kda.head_dim", None, "says nothing of bailingmoe3.kda.head_dim; convert the"),
        ("kda.head_dim", 8, "has the shape .*, by the file's entries it has"),
        ("expert_gating_func", 1, r"has no sigmoid router \(expert_gating_func\)"),
        ("expert_gating_func", None, "says nothing of bailingmoe3.expert_gating_func"),
        ("attention.q_lora_rank", 8, "leads to queries by two matrices .*; choose a file of another model"),
        ("rope.dimension_sections", 4, "a model that reads pictures .*; choose a file of a model that reads"),
    ],
    "granitemoe_swa": [
        ("attention.rope_pattern", [True], "does not say which of its layers have a rotary embedding"),
        ("attention.sliding_window_pattern", None, "does not say which of its layers have a window"),
        ("attention.sliding_window", None, "says nothing of granite_swa.attention.sliding_window"),
        ("logit_scale", None, "says nothing of granite_swa.logit_scale"),
    ],
    "hy_v3": [
        ("expert_gating_func", 1, "has no sigmoid router whose weights sum to 1, which every Hunyuan 3 has"),
        ("expert_weights_norm", None, "has no sigmoid router whose weights sum to 1"),
        ("expert_weights_scale", None, "says nothing of hy_v3.expert_weights_scale; convert the"),
    ],
    "llama4": [("attention.sliding_window", 0, "has no chunks of positions")],
    "llama4 of other layers": [
        ("attention.key_length", 32, r"rope_freqs.weight is F32 of shape \(8,\), not F32 of 16 factors"),
    ],
    "mellum": [
        ("attention.sliding_window_pattern", None, "does not say which of its layers have a window"),
        ("expert_weights_scale", 2.0, "scales its experts' weights by 2, which no"),
        ("rope.scaling.factor", None, "says nothing of mellum.rope.scaling.factor; convert the model again"),
    ],
    "mimo_v2_flash": [
        ("attention.head_count_kv", [1, 4, 1], r"has \[4\] heads of keys in layers with a window and \[1\] in"),
        ("attention.head_count_kv", [1, 2], r"MiMo-V2-Flash twice as many as in others"),
        ("attention.head_count_kv", 2, r"has \[2\] heads of keys in layers with a window and \[2\] in others"),
        ("attention.sliding_window_pattern", [0, 1], "does not say which of its layers have a window"),
        ("attention.value_scale", None, "says nothing of mimo2.attention.value_scale; convert the model again"),
        ("attention.value_length", 15, "attn_qkv has 176 rows, which are not 96 of queries and some heads"),
        ("rope.scaling.type", "linear", "scales its rotary embedding"),
    ],
    "minimax_m3": [
        ("attention.indexer.block_size", None, "says nothing of minimax-m3.attention.indexer.block_size; convert the"),
        ("attention.indexer.top_k", 0, "attention.indexer.top_k is 0, which is not a whole number of at least 1"),
        ("attention.indexer.key_length", 8, r"indexer.\w+.weight has the shape .*, by the file's entries it has"),
        ("expert_gating_func", 1, "has no sigmoid router whose weights sum to 1, which every MiniMax-M3 has"),
        ("expert_gating_func", None, "says nothing of minimax-m3.expert_gating_func"),
        ("expert_weights_norm", None, "has no sigmoid router whose weights sum to 1"),
        ("expert_weights_scale", None, "says nothing of minimax-m3.expert_weights_scale"),
    ],
    "phimoe": [
        ("expert_used_count", 3, "a token uses 3 experts, and Phi-MoE's routers choose 2; download it again"),
        ("rope.scaling.original_context_length", None, r"nothing of phimoe\.rope\.scaling\.original_context_length"),
    ],
    "gemma4": [
        ("embedding_length_per_layer_input", 8, "has embeddings of each layer, which no Gemma 4 with experts has"),
        ("attention.shared_kv_layers", 2, "has layers that share keys and values, which no Gemma 4 with experts has"),
        ("attention.sliding_window_pattern", None, "does not say which of its layers have a window; download it again"),
        (
            "attention.head_count_kv",
            [1, 2, 2],
            r"how many heads of keys layers of a kind have \(\[1, 2, 2",
        ),
        ("attention.head_count_kv", [1, 2], "does not say how many heads of keys layers of a kind have"),
        ("attention.key_length_swa", None, "says nothing of gemma4.attention.key_length_swa; convert the"),
        ("rope.freq_base_swa", None, "says nothing of gemma4.rope.freq_base_swa"),
        ("rope.dimension_count_swa", 8, "scales its rotary embedding, or rotates parts of heads, and no Gemma 4 does"),
    ],
    "qwen4_exp": [
        ("attention.compress_ratios", [0, 0, 0], "how many positions a block has .* the converter writes 0"),
        ("attention.compress_ratios", [0, 4], "does not say by one number above 0"),
        ("attention.compress_ratios", None, "compress_ratios: None"),
        ("attention.indexer.top_k", None, r"says nothing of qwen4exp\.attention\.indexer\.top_k"),
        ("hyper_connection.count", 1, "a whole number of at least 2"),
        ("hyper_connection.low_rank", None, r"says nothing of qwen4exp\.hyper_connection\.low_rank"),
        ("ple.layers", [0, 2], r"n-gram features in the layers \[0, 2\]"),
        ("ple.layers", [3], r"in the layers \[3\], and llama\.cpp's converter writes those of one of 3 layers"),
        ("ple.layer_multipliers", [1, 3], r"\[1, 3\], which are not 3 whole numbers of at least 0"),
        ("ple.layer_multipliers", ("UINT64[]", [1, 3, 1 << 63]), "which are not 3 whole numbers"),
        ("ple.head_vocab_sizes", [67, 71, 0, 79], "which are not 4 whole numbers of at least 1"),
        ("ple.head_offsets", [0, 67, 138, 400], r"has 296 rows, by the file's entries n-grams have 479"),
        ("ple.head_offsets", None, r"says nothing of qwen4exp\.ple\.head_offsets"),
        ("ple.eos_token_id", None, r"says nothing of qwen4exp\.ple\.eos_token_id"),
    ],
}
"""Case → an entry, what it is changed to (None: it is not there), what is said."""


@pytest.mark.parametrize(("name", "entry"), [(name, row) for name, rows in ENTRIES.items() for row in rows])
def test_entries_that_no_model_has(name: str, entry: tuple[str, Any, str], given: Given) -> None:
    key, value, message = entry
    more = {"rope.scaling.factor": 2.0} if value == "linear" else {}
    with pytest.raises(ModelError, match=message):
        config_of(given(name, **{key: value}, **more))


_NORMED = [f"blk.2.indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")]
_FACTORS = r"divides the frequencies .* and Gemma 4 the first by 1 and all others by"
_OF_LLAMA4 = "and Llama 4 those of waves over 8,192 positions by one number of at least 1"
TENSORS: list[tuple[str, dict[str, Any], str]] = [
    *(("minimax_m3", {lost: None}, f"has no tensor {lost}; convert the model again") for lost in _NORMED),
    ("minimax_m3", {"blk.0.ffn_gate.weight": None}, r"ffn_gate and ffn_up of layer 0 have .* \[None, \(64, 64\)\]"),
    (
        "qwen3_next", {"blk.0.ssm_in.weight": [[0.0] * 8] * 300},
        "a layer's ssm_in has 300 rows, by the file's entries it has 448",
    ),
    ("qwen4_exp", {"per_layer_token_embd.weight": None}, r"has no tensor per_layer_token_embd\.weight"),
    ("qwen4_exp", {"blk.1.indexer.k_proj.weight": None}, r"has no tensor blk\.1\.indexer\.k_proj\.weight"),
    *(("gemma4", {"rope_freqs.weight": each}, _FACTORS) for each in ([2.0] * 16, [1.0, 1e30] * 8, [1e30] * 16)),
    ("llama4 of other layers", {"rope_freqs.weight": [1.0] * 7 + [0.5]}, _OF_LLAMA4),
    ("llama4 of other layers", {"rope_freqs.weight": [1.0, 3.0, *[8.0] * 6]}, "divides the frequencies of its rotary"),
    (
        "phimoe", {"rope_factors_short.weight": None},
        "has one of rope_factors_short.weight and rope_factors_long.weight, and Phi-MoE both or none",
    ),
    (
        "phimoe", {"rope_factors_short.weight": [1.0] * 5},
        r"rope_factors_short.weight is F32 of shape \(5,\), not F32 of 8 factors; download it again",
    ),
    (
        "hy_v3", {
            **{f"blk.{at}.ffn_{name}_shexp.weight": [[0.0] * 64] * 40 for at in (1, 2) for name in ("gate", "up")},
            **{f"blk.{at}.ffn_down_shexp.weight": [[0.0] * 40] * 64 for at in (1, 2)},
        },
        "has 40 columns between the matrices of the shared experts and 32 between",
    ),
]  # fmt: skip
"""Case, tensors that it lacks (None) or has other values of, what is said."""


@pytest.mark.parametrize(("name", "tensors", "message"), TENSORS)
def test_tensors_that_no_model_has(name: str, tensors: dict[str, Any], message: str, given: Given) -> None:
    changed = {key: None if each is None else np.array(each, dtype=np.float32) for key, each in tensors.items()}
    with pytest.raises(ModelError, match=message):
        config_of(given(name, tensors=changed))


def test_only_tables_are_whole_numbers(given: Given) -> None:
    table = np.zeros((64, 64), dtype=np.int32)
    with pytest.raises(ModelError, match="is stored as I32, in which only tables of experts are"):
        config_of(given("qwen3_moe", tensors={"blk.0.attn_q.weight": table}))


_FULL, _SHARED = "full", "shared"
_PUBLISHED_MIMO = AutoConfig.for_model("mimo_v2_flash", sliding_window=128, sliding_window_size=128).sliding_window
SILENT: list[tuple[str, dict[str, Any], str, Any]] = [
    # the converter says nothing where config.json has no `scoring_func`, as transformers writes it; nor older ones
    ("deepseek_v2", {"expert_gating_func": None}, "model_type", "deepseek_v2"),
    ("deepseek_v3", {"expert_gating_func": None}, "model_type", "deepseek_v3"),
    ("dots1", {"expert_gating_func": None}, "n_routed_experts", 8),
    ("hy_v3", {"expert_gating_func": None}, "num_experts", 8),
    # GLM-5 and 5.1; GLM-5.2
    ("glm_moe_dsa of 8 layers", {"context_length": 202_752}, "indexer_types", [_FULL] * 8),
    (
        "glm_moe_dsa of 8 layers", {"context_length": 1_048_576}, "indexer_types",
        [_FULL, _FULL, _FULL, _SHARED, _SHARED, _SHARED, _FULL, _SHARED],
    ),
    ("glm5_next", {"kda.gate_lower_bound": None}, "linear_lower_bound", None),
    ("glm5_next", {"attention.indexer.types": None}, "indexer_types", [_FULL] * 3),
    ("glm5_next", {"attention.indexer.kpool_select_tail": None}, "index_kpool_always_select_tail", True),
    ("granitemoe_swa", {"attention.rope_pattern": [True, False, True]}, "layer_rope_theta", [1e4, 0, 1e4]),
    ("granitemoe_swa", {"attention.rope_pattern": None}, "layer_rope_theta", [1e4] * 3),  # llama.cpp rotates all
    # no entry has the numbers of MiniMax-M3's gate
    ("minimax_m3", {}, "swiglu_limit", AutoConfig.for_model("minimax_m3_vl_text").swiglu_limit),
    ("minimax_m3", {}, "swiglu_alpha", AutoConfig.for_model("minimax_m3_vl_text").swiglu_alpha),
    # the converter copies the published number; transformers makes its own of it
    ("mimo_v2_flash", {"attention.sliding_window": 128}, "sliding_window", _PUBLISHED_MIMO),
]  # fmt: skip
"""Case, entries that a file has otherwise, and what its config then has."""


@pytest.mark.parametrize(("name", "entries", "field", "wanted"), SILENT)
def test_what_other_files_mean(name: str, entries: dict[str, Any], field: str, wanted: Any, given: Given) -> None:
    more = {"attention.indexer.types": None} if "8 layers" in name else {}
    assert getattr(config_of(given(name, **entries, **more)), field) == wanted


def test_a_file_of_mellum_without_a_base_of_windows_has_the_other(given: Given) -> None:
    rope = config_of(given("mellum", **{"rope.freq_base_swa": None})).rope_parameters
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e5}


def test_copies_of_an_indexer_in_layers_that_share_are_not_read(tmp_path: Path) -> None:
    """As published files of GLM-5.2 have them."""
    name = "glm_moe_dsa of wide indexers alone"
    every = gguf_files.model_of(name)
    types = {"attention.indexer.types": [True, False, True]}
    file = gguf_files.write(tmp_path / "model.gguf", every, name, kinds("q8_0"), **types)
    model = gguf_files.model_of(name, indexer_types=[_FULL, _SHARED, _FULL])
    model.load_state_dict({path: every.state_dict()[path] for path in model.state_dict()})
    assert len(model.state_dict()) == len(every.state_dict()) - 5
    ids = tokens(1, 40)[0].tolist()
    found = logits_in(file, ids, store=tmp_path / "store")
    assert close(found, eager(model, ids))
    assert not close(found, eager(every, ids))
