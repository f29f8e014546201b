"""A model family: what its layers are made of, and what is stated of it because transformers' code does not say it.

A family is a class in a file of this folder, which `families/__init__.py` finds; `FAMILIES["mine"] = Mine()` adds one
from elsewhere. It states `name`, `model_type` and `layer`, which builds one layer of blocks by the names of its
weights. All else has the default that stands here and is stated by families that differ. A family without `layer` is
run by transformers' code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from tiermoe.formats.gguf_checkpoint import Parameter, Rows
from tiermoe.formats.gguf_file import GgufFile
from tiermoe.formats.gguf_header import GgufTensor
from tiermoe.kernels.gates import Gate, usual_gate
from tiermoe.model.attention.grouped import head_columns
from tiermoe.model.families.gguf import Config, Gguf
from tiermoe.model.layer import DecoderLayer
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.moe import ACTIVATIONS
from tiermoe.model.rotary import (
    Rotary,
    Temperature,
    is_rotated,
    knows_rotary,
    layer_kinds,
    parameters_of,
    rotary_of,
    unrotated,
)
from tiermoe.model.weights import NormKind, Scope

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """How a family's checkpoints have an MTP head: as one more layer, `model.layers.N` of a model of N layers, with
    `enorm`, `hnorm` and `eh_proj` before it and `shared_head.norm` after it, but for what is said here."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Beginning of a tensor's name, {} for N → what takes its place after `model.layers.N.`; the first that fits."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Config's list of the layers' kinds → the kind of the head's layer, where the config has no `mtp_` list of them.
    Of others it is the last layer's."""

    def renamed(self, tensors: Mapping[str, Entry], layer: int) -> dict[str, Entry]:
        """A checkpoint's tensors with those of its head as `model.layers.{layer}`."""
        places = {begins.format(layer): f"model.layers.{layer}.{own}" for begins, own in self.names.items()}

        def name(key: str) -> str:
            return next(
                (own + key.removeprefix(begins) for begins, own in places.items() if key.startswith(begins)), key
            )

        return {name(key): entry for key, entry in tensors.items()}


class Family:
    """A model family of transformers. A subclass is one family; its attributes are facts, its methods take the text
    part's config (`ModelConfig`)."""

    name: str  # for people
    model_type: str  # of config.json, of its text part where it has others; `FAMILIES` has the family by it

    # facts for transformers' code
    encoder_decoder: bool = False  # generates through an encoder and a decoder
    encoder_class: str = ""  # transformers' class of an encoder alone, which gives hidden states and writes no text
    adapter: str | None = None  # of `hf.adapters`, for experts outside transformers' experts interface
    forecasts: bool = True  # its routers, called on another layer's input, name the experts that layer would choose
    continues: bool = True  # transformers' code reads several tokens after others; else one by one (Jamba's scan)
    latent_kv: bool = False  # attention caches one latent a token (multi-head latent attention)
    hash_table: str | None = None  # attribute of a router whose experts follow from the token: (vocabulary, K)
    normalised: bool | None = None  # the chosen experts' weights have a fixed sum; None: config.norm_topk_prob says so
    plain_router: bool = False  # one matrix and a softmax: the routers of several layers can be one product

    # of its decoder
    norms: ClassVar[NormKind] = NormKind()
    embedding: str = "model.embed_tokens"  # path of the input embedding
    final_norm: str = "model.norm"  # path of the norm after the last layer
    wide_angles: bool = False  # angles of positions are float32
    has_unrotated: bool = False  # some layers' queries and keys have no position (`Family.unrotated`)
    scales_embedding: bool = False  # transformers' embedding multiplies by a factor of its own
    on_gpu: bool = False  # it runs on a GPU too
    in_streams: bool = False  # layers are `streams.StreamLayer`
    mtp_head: HeadFormat | None = None  # of the head that drafts, if it runs
    wide: tuple[str, ...] = ("e_score_correction_bias",)  # ends of the parameters that are kept in float32

    # of its GGUF files; `config` and `gate` are of them too
    gguf: ClassVar[Gguf | None] = None  # names; None: tiermoe reads none
    gguf_order: Callable[[GgufFile, str, int], Tensor | None] | None = None
    """Tensor, its rows → where each row of its parameter is in it; None: in order."""
    gguf_parts: Callable[[GgufFile, str, GgufTensor], dict[str, Rows]] | None = None
    """Tensor → the parameters of linear attention, of Mamba or of attention that it holds, by their names in
    `Gguf.within`; none of other tensors."""
    gguf_made: Callable[[GgufFile], dict[str, Parameter]] | None = None  # parameters of several tensors, or of entries
    gguf_unread: Callable[[GgufFile], frozenset[str]] | None = None  # tensors that the model does not have

    def layer(self, w: Scope, config: ModelConfig, index: int) -> DecoderLayer:
        """Layer `index` with the weights of `w` ('model.layers.{index}'). ModelError where weights have other shapes
        than the config asks for. A plan asks for layers of shapes alone, on the meta device."""
        raise NotImplementedError

    def config(self, file: GgufFile) -> Config:
        """The fields of transformers' config that a GGUF file describes, for families with `gguf`; a checkpoint of
        safetensors has its config.json. 'model_type' is among them where it is not the family's. ModelError for an
        entry that is missing, or that no model of the family has."""
        raise NotImplementedError

    def lacks(self, config: ModelConfig) -> str:
        """The parts of a config that no block computes, in words; empty: none. Such a model is run by transformers'
        code."""
        return ""

    def activation(self, config: ModelConfig) -> str:
        """The name of the activation between a dense block's matrices, by which `lacking` knows whether a block
        computes it."""
        return str(next(filter(None, (getattr(config, name, None) for name in _ACTIVATIONS)), None))

    def gate(self, config: ModelConfig) -> Gate | None:
        """What is between an expert's matrices of GGUF files; None: transformers' code says it."""
        return usual_gate(getattr(config, "hidden_act", None)) or usual_gate(getattr(config, "mlp_hidden_act", None))

    def embedding_scale(self, config: ModelConfig, dtype: torch.dtype) -> float:
        """What embeddings are multiplied by."""
        return 1.0

    def logits_divisor(self, config: ModelConfig) -> float:
        return 1.0

    def end(self, w: Scope, config: ModelConfig) -> Callable[[Tensor], Tensor]:
        """What the output layer takes of the last layer's output; `w` has the whole model's weights."""
        return w.norm(self.final_norm)

    def rotary_columns(self, config: ModelConfig, kind: str | None) -> int:
        """Columns of a head that are rotated, in layers of one of `layer_kinds`."""
        own = config if kind is None else config.of_layer(kind)
        share = parameters_of(config, kind).get("partial_rotary_factor", 1.0) if is_rotated(config) else 1.0
        return int(head_columns(own) * share)

    def temperature(self, config: ModelConfig) -> Temperature | None:
        """Of the layers without positions if there are such, else of all."""
        return None

    @property
    def decodes(self) -> bool:
        """Whether tiermoe has a decoder of its own for the family."""
        return type(self).layer is not Family.layer

    @property
    def encodes(self) -> bool:
        """Whether an encoder reads the prompt, which it does at once."""
        return self.encoder_decoder or bool(self.encoder_class)

    def renormalises(self, config: ModelConfig) -> bool:
        """Whether a model of this family scales the chosen experts' weights to a fixed sum."""
        if self.normalised is None:
            return bool(getattr(config, "norm_topk_prob", False))
        return self.normalised

    def unrotated(self, config: ModelConfig) -> int:
        """Which of `rotaries` is that of the layers without positions."""
        return len(layer_kinds(config))

    def rotaries(self, config: ModelConfig, dtype: torch.dtype) -> list[Rotary]:
        """The rotary embeddings of a config, in the order of `layer_kinds`, and that of the layers without
        positions."""
        dtype = torch.float32 if self.wide_angles else dtype
        found = [rotary_of(config, self.rotary_columns(config, kind), dtype, kind) for kind in layer_kinds(config)]
        rotaries = [rotary for rotary in found if rotary is not None]
        if self.has_unrotated:
            rotaries.append(unrotated(rotaries[0].columns, dtype))
        rotaries[-1].temperature = self.temperature(config)
        return rotaries


class LatentFamily(Family):
    """A family with latent attention."""

    latent_kv = True

    def rotary_columns(self, config: ModelConfig, kind: str | None) -> int:
        return int(config.qk_rope_head_dim)


_ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
"""What configs call the activation."""


def lacking(family: Family, config: ModelConfig) -> str:
    """The parts of a config of a family with a decoder that no block computes, in words; empty: none."""
    name = family.activation(config)
    if name not in ACTIVATIONS or not knows_rotary(config):
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "unknown")
        return f"{name}, rotary embedding '{kind}'"
    return family.lacks(config)
