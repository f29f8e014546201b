"""How a family's layers are built: the fields of its table entry, and weights by the names that the family has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tiermoe.model.linear import Linear
from tiermoe.model.norms import LayerNorm, Norm, RootMeanSquare
from tiermoe.model.rotary import Temperature
from tiermoe.model.routers import RouterRule
from tiermoe.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Architecture:
    """The blocks of one family's layers, and the names of its config and weights where they differ from the usual.
    Sizes come from the config. Layers that config.layer_types calls 'linear_attention' have `GatedDelta` by the sizes
    of `linear_attention`, or of `kimi_delta`, or `Mamba` or `Mamba1` where its sizes are named; layers that it calls
    'conv' have `ShortConvolution`, layers that it calls 'indexed_attention' a `BlockIndexer`, layers that it calls
    'minimax_m3_sparse' a `GroupIndexer`. Where config.index_kpool is a size, indexers are `PoolIndexer`."""

    router: Callable[[Any], RouterRule]  # config → rule of the routers
    block: str = "mlp"  # name of a layer's feed-forward part
    gate: str = "gate"  # of the router in it
    shared: str | None = None  # of its shared expert
    shared_gate: str | None = None  # of the gate of the shared expert
    shared_beside: str | None = None  # of a shared expert beside the block, its gate and up one matrix (Granite)
    fused_gate_up: bool = False  # gate and up of dense blocks and of shared experts are one matrix (MiniMax-M3)
    gateless: bool = False  # experts and dense blocks are down(activation(up x)) (Nemotron-H)
    correction: str | None = None  # of the bias by which the router chooses, relative to the block
    table: str | None = None  # of the table of tokens' experts, relative to the block, of layers that have one
    weighs_input: bool = False  # experts take what the router's weight has multiplied (`MoeBlock`)
    latent_experts: tuple[str, str] | None = None  # of the projections before and behind the experts, in the block
    window: str = "none"  # 'all' layers have a sliding window, each 'layer' as config.layer_types says, or 'chunk'
    sinks: str = "none"  # attention has `GroupedAttention.sinks` in 'all' layers, or in those with a 'window'
    latent: bool = False  # attention is `LatentAttention`
    kimi_delta: bool = False  # linear attention is Kimi's
    compressed: bool = False  # attention is `CompressedAttention`
    rope: str = "halves"  # of `rotary.ROPES`
    unrotated: Callable[[Any, int], bool] | None = None  # config, layer → its queries and keys have no position
    temperature: Callable[[Any], Temperature | None] | None = None  # of the unrotated layers where there are such
    layer_norm: bool = False  # norms are `LayerNorm`
    late_norm: bool = False  # of `RootMeanSquare`, as the next three
    centred_norm: bool = False
    norm_by_kernel: bool = True
    gated: bool = False  # of `GroupedAttention`, as the next four
    gate_apart: bool = False
    norm_all_heads: bool = False
    mamba: tuple[str, ...] = ()  # the config's names of the fields of `MambaSizes`, or
    mamba_1: bool = False  # of `Mamba1Sizes` (Jamba)
    mamba_least_step: str | None = None  # the config's name of the least time step in prompts (`Mamba`)
    norms_rotated: bool = False
    narrow_values: bool = False  # a head's values have config.v_head_dim columns (MiMo), as the next
    value_scale: str | None = None  # the config's name of what values are multiplied by
    kv_heads: Callable[[Any, int], int] | None = None  # config, layer → its heads of keys, where layers differ
    plain_norms: bool = False  # in layers with a window, where config.use_qk_norm (Llama 4)
    latent_gate: str | None = None  # of the matrix by whose sigmoid latent attention's output is multiplied
    narrow_epsilon: float | None = 1e-6  # of the norms inside of latent attention; None: the config's
    latent_sinks: bool = False  # logits join each softmax of latent attention and have no value
    index_rope: str | None = None  # of the `Indexer` of latent attention; None: there is no indexer
    index_rotates_last: bool = False  # of its queries and keys the last columns are rotated, not the first
    index_epsilon: float | None = 1e-6  # of the norm of its keys; None: the config's
    without_first_norms: bool = False  # nothing norms what attention and the feed-forward part take (FlexOlmo)
    norm_attended: str | None = None  # of the norm of attention's output before it is added
    norm_fed: str | None = None  # of the norm of the feed-forward part's output, relative to the layer
    names: Mapping[str, str] = field(default_factory=dict)  # usual name of a weight → the family's
    epsilon: str = "rms_norm_eps"  # the config's name of the norms' epsilon
    activation: str | None = None  # between a dense block's matrices, where the config has none
    attention_scale: float | None = None  # where it does not follow from a head's columns
    scaled_embedding: bool = False  # by the root of the hidden size
    embedding_scale: Callable[[Any], float] | None = None  # config → what embeddings are multiplied by
    one_part: bool = False  # layers are `AttentionLayer` or `FeedForwardLayer` (Nemotron-H)
    streams: str = ""  # layers are `StreamLayer`, with connections of this name in `hyper_connections.CONNECTIONS`
    side_by_side: bool = False  # dense blocks beside experts (`gemma4.SideBySide`)
    lacks: Callable[[Any], str] | None = None  # config → what no block computes, in words; empty: nothing
    dense_gate: Callable[[Any], Callable[..., Tensor]] | None = None
    """config → what is between the matrices of dense blocks (`DenseBlock.activation`); None: the usual gate."""
    scales: tuple[str, ...] = ()  # the config's names of the multipliers that are in use (Granite)

    def attends(self, config: Any, layer: int) -> bool:
        """Whether a layer has attention, or what stands in its place; else it is a feed-forward part alone."""
        return not self.one_part or config.layer_types[layer] not in ("moe", "mlp")

    @property
    def experts(self) -> str:
        """The path of a layer's experts in it."""
        return "experts" if self.side_by_side else f"{self.block}.experts"

    @property
    def first_matrices(self) -> tuple[str, ...]:
        """The usual names of a dense block's matrices before the last one."""
        if self.fused_gate_up:
            return ("gate_up_proj",)
        return ("up_proj",) if self.gateless else ("gate_proj", "up_proj")

    def named(self, name: str) -> str:
        """The family's name of a module that is usually called `name`."""
        return self.names.get(name, name)


class FamilyWeights:
    """Weights and config of a model, by the names of its family. dtype: of the model."""

    def __init__(self, architecture: Architecture, config: Any, weights: Weights, dtype: torch.dtype) -> None:
        self.architecture, self.config, self.dtype = architecture, config, dtype
        self.has, self.tensor, self.linear, self.embedding = (
            weights.has, weights.tensor, weights.linear, weights.embedding,
        )  # fmt: skip

    def scale(self, name: str) -> float:
        """A multiplier of the config; 1 where the family does not use it."""
        return float(getattr(self.config, name)) if name in self.architecture.scales else 1.0

    def optional_tensor(self, path: str) -> Tensor | None:
        """A parameter, None where there is none."""
        return self.tensor(path) if self.has(path) else None

    def optional_linear(self, path: str) -> Linear | None:
        """A linear layer, None where there is none."""
        return self.linear(path) if self.has(path) else None

    def norm(self, path: str, epsilon: float | None = None, groups: int | None = None) -> Norm:
        """The norm at `path`. epsilon: None: the config's. groups: of so many groups of columns, each by itself:
        (..., groups, columns)."""
        of, weight = self.architecture, self.tensor(f"{path}.weight")
        weight = weight if groups is None else weight.view(groups, -1)
        epsilon = self.epsilon if epsilon is None else epsilon
        if of.layer_norm:
            return LayerNorm(weight, self.tensor(f"{path}.bias"), epsilon)
        return RootMeanSquare(weight, epsilon, of.late_norm, of.centred_norm, of.norm_by_kernel)

    def norm_without_weight(self, columns: int) -> Norm:
        """A norm of so many columns whose weight is 1."""
        return RootMeanSquare(torch.ones(columns, dtype=self.dtype), self.epsilon, late=True)

    @property
    def epsilon(self) -> float:
        """The norms'."""
        return float(getattr(self.config, self.architecture.epsilon))
