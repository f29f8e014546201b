"""Gemma 4: dense blocks beside routed experts, routers that norm what they take, scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import CONVERT, GgufFile
from tiermoe.model.attention.grouped import grouped, window_at
from tiermoe.model.families.family import Family
from tiermoe.model.families.gguf import (
    FREQUENCIES,
    Config,
    Gguf,
    block_names,
    common_fields,
    divisors,
    kv_heads,
    window_layers,
)
from tiermoe.model.layer import Layer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import DenseBlock, MoeBlock, add_to, dense, moe_layer
from tiermoe.model.parts import Norm
from tiermoe.model.routers import Router, RouterRule
from tiermoe.model.weights import NormKind, Scope

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
"""Tensors of a block → modules or parameters of a layer, beside the usual ones."""
_SLIDING, _FULL = "sliding_attention", "full_attention"
_UNTURNED = 1e30
"""What the frequencies of columns that are not rotated are divided by (`generate_extra_tensors`)."""
_ABSENT = {
    "embedding_length_per_layer_input": "embeddings of each layer",
    "attention.shared_kv_layers": "layers that share keys and values",
}
"""Entry → what Gemma 4 with experts has not, where it is not 0."""


class Gemma4(Family):
    name, model_type = "Gemma 4", "gemma4_text"
    gguf = Gguf(
        ("gemma4",),
        block_names(norms=("input_layernorm", "pre_feedforward_layernorm")) | NAMES,
        "experts",
        apart=(FREQUENCIES,),
    )
    normalised = True
    scales_embedding = True
    norms = NormKind(late=True)

    def layer(self, w: Scope, config: ModelConfig, index: int) -> Layer:
        part = w.at("self_attn")
        attention = grouped(
            part,
            config,
            index,
            window=window_at(config, index),
            scale=1.0,
            norms=("q_norm", "k_norm"),
            norm_values=True,
            keys_are_values=not part.has("v_proj"),
        )
        return Layer(
            w.norm("input_layernorm"),
            attention,
            w.norm("pre_feedforward_layernorm"),
            side_by_side(w, config),
            norm_attended=w.norm("post_attention_layernorm"),
        )

    def lacks(self, config: ModelConfig) -> str:
        if config.hidden_size_per_layer_input:
            return "embeddings of each layer"
        if config.num_kv_shared_layers:
            return "layers that share keys and values"
        return "attention to later tokens" if config.use_bidirectional_attention == "all" else ""

    def embedding_scale(self, config: ModelConfig, dtype: torch.dtype) -> float:
        return float(torch.tensor(config.hidden_size**0.5).to(dtype))

    def config(self, file: GgufFile) -> Config:
        """ModelError for a file of a model that none with experts is like."""
        for key, part in _ABSENT.items():
            if file.count(key, 0):
                raise file.refusal(f"has {part}, which no Gemma 4 with experts has", "take the model's safetensors")
        file.refuse_dense_layers("Gemma 4 with experts")
        config, kinds = common_fields(file), window_layers(file)
        if _FULL not in kinds:
            raise file.refusal("has no layer without a window, which every Gemma 4 has")
        columns = file.count("attention.key_length", least=1)
        heads = _heads_of_keys(file, kinds)
        return {
            **config,
            "enable_moe_block": True,
            "num_experts": file.experts,
            "top_k_experts": config["num_experts_per_tok"],
            "moe_intermediate_size": file.expert_columns,
            "intermediate_size": file.shape("blk.0.ffn_down.weight")[1],
            "layer_types": kinds,
            "sliding_window": file.count("attention.sliding_window", least=1),
            "head_dim": file.count("attention.key_length_swa", least=1),
            "global_head_dim": columns,
            "num_key_value_heads": heads.get(_SLIDING, heads[_FULL]),
            "num_global_key_value_heads": heads[_FULL],
            "attention_k_eq_v": f"blk.{kinds.index(_FULL)}.attn_v.weight" not in file.tensors,
            "rope_parameters": _rope(file, config["rope_parameters"], columns),
            "final_logit_softcapping": file.decimal("final_logit_softcapping", None),
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        }


def side_by_side(w: Scope, config: ModelConfig) -> SideBySide:
    """The feed-forward part of the layer at `w`."""
    experts = config.num_experts
    rule = RouterRule(config.top_k_experts, normalise=True, rounded=False)
    router = Router(
        w.tensor("router.proj.weight", experts, w.hidden),
        rule,
        prepared=NormedInput(w.norm_without_weight(w.hidden), w.tensor("router.scale", w.hidden), w.hidden**-0.5),
        expert_scale=w.tensor("router.per_expert_scale", experts),
    )
    return SideBySide(
        dense=dense(w.at("mlp"), config.intermediate_size, config.hidden_activation),
        moe=MoeBlock(router, layer=moe_layer(w, experts, rule.top_k, config.moe_intermediate_size, w.hidden)),
        norm_dense=w.norm("post_feedforward_layernorm_1"),
        norm_before_experts=w.norm("pre_feedforward_layernorm_2"),
        norm_experts=w.norm("post_feedforward_layernorm_2"),
        norm_sum=w.norm("post_feedforward_layernorm"),
        scale=w.number("layer_scalar"),
    )


@dataclass(frozen=True, slots=True)
class NormedInput:
    """Input of a router: hidden states normed without a weight, times scale (H) and root."""

    norm: Norm
    scale: Tensor
    root: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """(T, H) → (T, H)."""
        return self.norm(hidden) * self.scale * self.root


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A dense block beside routed experts. Router and experts take the residual stream."""

    dense: DenseBlock
    moe: MoeBlock
    norm_dense: Norm  # of the dense block's output
    norm_before_experts: Norm  # of the experts' input
    norm_experts: Norm  # of the experts' output
    norm_sum: Norm  # of both outputs' sum
    scale: float = 1.0  # of the layer's output

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's values do not depend on the other tokens of a call."""
        return self.dense.batch_invariant and self.moe.batch_invariant

    def watched(self, wrap: Callable[[Any], Any]) -> SideBySide:
        """The block with its dense block watched."""
        return replace(self, dense=self.dense.watched(wrap))

    def add(self, x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
        """(residual + multiplier * both blocks) * scale; x: residual after the dense block's norm, (T, H) each."""
        (result,) = self.add_ragged([(x, residual)], multiplier)
        return result

    def add_ragged(self, parts: Sequence[tuple[Tensor, Tensor]], multiplier: float) -> list[Tensor]:
        """`add` of each (x, residual), bit for bit; each expert is read once for all of them."""
        experts, residuals = self.moe.experts, [residual for _, residual in parts]
        chosen = experts.route(self.moe.router, *residuals)
        given = [
            (self.norm_before_experts(residual), index, weights)
            for residual, (weights, index) in zip(residuals, chosen, strict=True)
        ]
        routed = experts.forward_ragged(given)
        return [self._sum(x, residual, output, multiplier) for (x, residual), output in zip(parts, routed, strict=True)]

    def _sum(self, x: Tensor, residual: Tensor, routed: Tensor, multiplier: float) -> Tensor:
        dense = self.norm_dense(self.dense(x))
        result = add_to(residual, self.norm_sum(dense + self.norm_experts(routed)), multiplier)
        return result if self.scale == 1 else result * self.scale


def _heads_of_keys(file: GgufFile, kinds: list[str]) -> dict[str, int]:
    """Kind of layers → heads of keys. ModelError where layers of a kind differ."""
    found = kv_heads(file, kinds)
    if any(len(own) != 1 or not isinstance(own[0], int) for own in found.values()):
        said = file.of_model("attention.head_count_kv")
        raise file.refusal(f"does not say how many heads of keys layers of a kind have ({said})")
    return {kind: heads for kind, (heads,) in found.items()}


def _rope(file: GgufFile, rope: dict[str, Any], columns: int) -> dict[str, dict[str, Any]]:
    """Of layers with a window the default embedding; of others the share of a head's columns that is rotated."""
    factors = divisors(file, FREQUENCIES, columns)
    if factors is None:
        raise file.refusal(f"has no tensor {FREQUENCIES}", CONVERT)
    turned = int((factors == 1).sum())
    expected = torch.where(torch.arange(len(factors)) < turned, 1.0, torch.tensor(_UNTURNED))
    if not turned or not torch.equal(factors, expected):
        raise file.refusal(
            f"divides the frequencies of its rotary embedding by {factors.min():g} to {factors.max():g}, and Gemma 4 "
            f"the first by 1 and all others by {_UNTURNED:g}"
        )
    whole = file.count("attention.key_length_swa"), columns
    if rope["rope_type"] != "default" or any(
        file.count(key, size) != size
        for key, size in zip(("rope.dimension_count_swa", "rope.dimension_count"), whole, strict=True)
    ):
        raise ModelError(f"{file.path} scales its rotary embedding, or rotates parts of heads, and no Gemma 4 does")
    share = {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    return {
        _FULL: {**share, "rope_theta": rope["rope_theta"]},
        _SLIDING: {"rope_type": "default", "rope_theta": file.decimal("rope.freq_base_swa")},
    }
