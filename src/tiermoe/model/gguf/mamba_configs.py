"""Configs of transformers that GGUF files of models with layers of Mamba describe, a function an architecture of
llama.cpp."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.model.attention.mamba import MambaSizes
from tiermoe.model.families.table import ARCHITECTURES
from tiermoe.model.gguf.config import Config, common, granite, rotates
from tiermoe.model.gguf.mamba import mamba_sizes
from tiermoe.model.gguf.shapes import AGAIN, blocks, dense_layers, experts, in_first_block, inner, shape


def granitehybrid(file: GgufFile) -> Config:
    sizes, hidden = mamba_sizes(file), file.count("embedding_length", least=1)
    if sizes.values % hidden:
        raise ModelError(
            f"{file.path} says that layers of Mamba-2 widen {hidden} columns to {sizes.values}; "
            f"Granite widens them a whole number of times; {AGAIN}"
        )
    return {
        **granite(file),
        **_mamba_2("granitemoehybrid", sizes),
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": in_first_block(file, "ffn_gate_shexp.weight", 2)[0],
        "position_embedding_type": "rope" if rotates(file) else None,
        "layer_types": _kinds(file),
        "mamba_expand": sizes.values // hidden,
    }


def nemotron_h_moe(file: GgufFile) -> Config:
    config = common(file)
    del config["rope_parameters"]  # queries and keys have no position
    return {
        **config,
        **_mamba_2("nemotron_h", mamba_sizes(file)),
        "model_type": "nemotron_h",
        "layers_block_type": _kinds(file),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "num_key_value_heads": file.largest("attention.head_count_kv"),  # other layers have none
        "head_dim": file.count("attention.key_length", least=1),
        "n_routed_experts": experts(file),
        "n_shared_experts": file.count("expert_shared_count"),
        "moe_intermediate_size": inner(file),
        "moe_shared_expert_intermediate_size": in_first_block(file, "ffn_up_shexp.weight", 2)[0],
        "moe_latent_size": _rows(file, "ffn_latent_down"),
        "intermediate_size": _rows(file, "ffn_up") or inner(file),
        "routed_scaling_factor": file.decimal("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.of_model("expert_weights_norm", False)),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
    }


def jamba(file: GgufFile) -> Config:
    config, kinds, dense = common(file), _kinds(file), set(dense_layers(file))
    del config["rope_parameters"]  # queries and keys have no position
    inner_size, hidden = file.count("ssm.inner_size", least=1), file.count("embedding_length", least=1)
    attention = _every(file, [layer for layer, kind in enumerate(kinds) if kind == "full_attention"])
    mixtures = _every(file, [layer for layer in range(len(kinds)) if layer not in dense])
    if inner_size % hidden:
        raise ModelError(
            f"{file.path} says that layers of Mamba widen {hidden} columns to {inner_size}; Jamba widens them a whole "
            f"number of times; {AGAIN}"
        )
    return {
        **config,
        "model_type": "jamba",
        "num_key_value_heads": file.largest("attention.head_count_kv"),  # layers of Mamba have none
        "num_experts": experts(file),
        "intermediate_size": inner(file),
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": mixtures[0],
        "expert_layer_offset": mixtures[1],
        "mamba_expand": inner_size // hidden,
        "mamba_d_state": file.count("ssm.state_size", least=1),
        "mamba_d_conv": file.count("ssm.conv_kernel", least=1),
        "mamba_dt_rank": file.count("ssm.time_step_rank", least=1),
    }


def _every(file: GgufFile, layers: list[int]) -> tuple[int, int]:
    """(period, offset) of layers of one kind. ModelError where they do not come at one distance."""
    count = blocks(file)
    offset, *others = layers or [count]
    period = others[0] - offset if others else max(offset + 1, count - offset)
    if layers != list(range(offset, count, period)) or offset >= period:
        raise ModelError(f"{file.path} has layers of one kind at {layers}, which no Jamba has; {AGAIN}")
    return period, offset


def _mamba_2(family: str, sizes: MambaSizes) -> Config:
    """The sizes of layers of Mamba-2, by the names of a family's config."""
    values = (sizes.heads, sizes.columns, sizes.groups, sizes.state, sizes.kept + 1)
    return dict(zip(ARCHITECTURES[family].mamba, values, strict=True))


_KINDS = {"ssm_a": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}
"""A tensor of the layers of one kind → the kind. Those with attention may have experts, too."""


def _kinds(file: GgufFile) -> list[str]:
    """`layer_types` of a config: which layers have Mamba, and which attention; of those with neither, which have
    experts."""
    layers = range(blocks(file))
    return [
        next((kind for tensor, kind in _KINDS.items() if f"blk.{at}.{tensor}" in file.tensors), "mlp") for at in layers
    ]


def _rows(file: GgufFile, stem: str) -> int | None:
    """Rows of the first layer's matrix of this name; None where no layer has one."""
    names = (f"blk.{layer}.{stem}.weight" for layer in range(blocks(file)))
    return next((shape(file, name, 2)[0] for name in names if name in file.tensors), None)
