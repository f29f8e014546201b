"""Names of weights in GGUF files and in transformers, and how a family's files differ from its model in transformers.
The names are those of llama.cpp's converter (`conversion/`, a class an architecture)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
"""Tensors outside of blocks → modules of transformers' `model`; the output layer is beside it."""
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
"""Of latent attention: tensors of a block → modules of a layer."""
SINKS = {"attn_sinks": "self_attn.sinks"}
LATE_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Of files that call the second norm otherwise than most."""


def block_names(
    block: str = "mlp",
    *,
    router: str = "gate",
    correction: str | None = None,
    shared: str | None = None,
    attention: str = "self_attn",
    output: str = "o_proj",
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    head_norms: tuple[str, str] = ("q_norm", "k_norm"),
    dense: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, str]:
    """Tensors of a block → modules of a layer, by what transformers calls the feed-forward part, the router in it, its
    correction, its shared expert, attention, its output layer, the two norms, the norms of heads and the matrices of
    dense blocks."""
    names = {
        "attn_norm": norms[0],
        "attn_q": f"{attention}.q_proj",
        "attn_k": f"{attention}.k_proj",
        "attn_v": f"{attention}.v_proj",
        "attn_output": f"{attention}.{output}",
        "attn_q_norm": f"{attention}.{head_norms[0]}",
        "attn_k_norm": f"{attention}.{head_norms[1]}",
        "ffn_norm": norms[1],
        "ffn_gate_inp": f"{block}.{router}",
    }
    for tensor, name in zip(("gate", "up", "down"), dense, strict=True):
        names[f"ffn_{tensor}"] = f"{block}.{name}"
        if shared:
            names[f"ffn_{tensor}_shexp"] = f"{block}.{shared}.{name}"
    return names | ({"exp_probs_b": f"{block}.{correction}"} if correction else {})


@dataclass(frozen=True, slots=True)
class Gguf:
    """A family in GGUF files."""

    architectures: tuple[str, ...]  # llama.cpp's names
    names: Mapping[str, str]  # tensors of a block → modules or parameters of a layer
    experts: str = "mlp.experts"  # path of a layer's experts in it
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    turned: bool = False  # the halves of each head's queries and keys take turns (`LlamaModel.permute`)
    centred: bool = False  # norms have their weights, and transformers' these less 1
    apart: tuple[str, ...] = ()  # tensors that are no parameter of their own; of blocks by their stems
    within: str = "linear_attn"  # the block that `Family.gguf_parts` are of
    fused: Mapping[str, str] = field(default_factory=dict)
    """End of the names of gate and up → the module that is both in the model, and in the file is not."""
    part_of: str = ""  # model_type of a larger model, if transformers has no class for the text part alone
    states_shapes: bool = True
    """A file's outline follows from the blocks alone (`gguf.outline`); else transformers' code gives it."""
