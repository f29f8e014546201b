"""llama.cpp's architectures of MoE models: one entry each.

An entry says which family of transformers a file of it is, what its config says, and what its tensors are called in
transformers' model. The converter is llama.cpp's `conversion/`, a class an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tiermoe.errors import ModelError
from tiermoe.model.gguf import configs
from tiermoe.model.gguf.configs import Config
from tiermoe.model.gguf.linear_attention import linear_rows
from tiermoe.model.gguf.shapes import experts
from tiermoe.store.gguf.file import GgufFile
from tiermoe.store.gguf.header import GgufTensor
from tiermoe.store.gguf.parameter import Rows
from tiermoe.store.gguf.values import count

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "token_embd_norm": "model.embedding_norm",
}
"""Tensors outside of blocks."""

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of a block, in every architecture."""


def _shared(name: str) -> dict[str, str]:
    return {f"ffn_{matrix}_shexp": f"mlp.{name}.{matrix}_proj" for matrix in ("gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """config: the fields of transformers' config for a file. more: names of a block's tensors, beside `BLOCK` or in its
    place. experts: name of a block's experts. turned:
    the halves of each head's queries and keys take turns (`model.gguf.orders.turned`). centred: norms are stored as
    weight + 1. linear: the parameters of layers of linear attention that a tensor holds, by their names in the layer;
    none of other tensors."""

    config: Callable[[GgufFile], Config]
    more: Mapping[str, str] = field(default_factory=dict)
    experts: str = "mlp.experts"
    turned: bool = False
    centred: bool = False
    linear: Callable[[GgufFile, str, GgufTensor], dict[str, Rows]] | None = None


_LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}
_SHARED_GATE = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "exp_probs_b": "feed_forward.expert_bias",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
_QWEN35 = GgufArchitecture(
    configs.qwen35moe, _LATE_NORM | _shared("shared_expert") | _SHARED_GATE, centred=True, linear=linear_rows
)

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "qwen3moe": GgufArchitecture(configs.qwen3moe),
    "qwen2moe": GgufArchitecture(configs.qwen2moe, _shared("shared_expert") | _SHARED_GATE),
    "llama": GgufArchitecture(configs.mixtral, turned=True),
    "olmoe": GgufArchitecture(configs.olmoe),
    "gpt-oss": GgufArchitecture(
        configs.gpt_oss, _LATE_NORM | {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
    ),
    "deepseek2": GgufArchitecture(configs.deepseek2, _LATENT | _CORRECTION | _shared("shared_experts")),
    "qwen35moe": _QWEN35,
    # Qwen3-Next's layers, with their projection's matrices apart, as the file has them, are Qwen3.5's
    "qwen3next": _QWEN35,
    "glm4moe": GgufArchitecture(configs.glm4moe, _LATE_NORM | _CORRECTION | _shared("shared_experts")),
    "lfm2moe": GgufArchitecture(configs.lfm2moe, _LFM2, experts="feed_forward.experts"),
    "minimax-m2": GgufArchitecture(configs.minimaxm2, {"exp_probs_b": "mlp.e_score_correction_bias"}),
    "ernie4_5-moe": GgufArchitecture(
        configs.ernie45moe,
        {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_bias"} | _shared("shared_experts"),
    ),
}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """The entry of a file. ModelError where there is none, or the file is of a dense model."""
    name = file.architecture
    if not count(file, "expert_count", 0):
        raise ModelError(
            f"{file.path} is a '{name}' model without experts: tiermoe runs Mixture-of-Experts models; llama.cpp runs "
            f"a dense one"
        )
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} is of the architecture '{name}', which tiermoe does not read from GGUF files; it reads "
            f"{', '.join(sorted(ARCHITECTURES))}; take the model's safetensors"
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> Config:
    """The fields of transformers' config, with 'model_type'. ModelError as `architecture_of`, or where the file lacks
    an entry."""
    config = architecture_of(file).config(file)
    used = config["num_experts_per_tok"]
    if used > experts(file):
        raise ModelError(f"{file.path} says that a token uses {used} of {experts(file)} experts; download it again")
    return config
