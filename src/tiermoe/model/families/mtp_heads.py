"""MTP heads by family: what checkpoints call their tensors, and of which kinds their layers are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """How a family's checkpoints have a head: as one more layer, `model.layers.N` of a model of N layers, with
    `enorm`, `hnorm` and `eh_proj` before it and `shared_head.norm` behind it, but for what is said here."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Beginning of a tensor's name, {} for N → what takes its place behind `model.layers.N.`; the first that fits."""
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


_BESIDE = {
    "mtp.layers.0.": "",
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
}
_FIRST_OF_MIMO = "model.mtp.layers.0."
_LAYER = HeadFormat()
_FULL = HeadFormat(_BESIDE, {"layer_types": "full_attention"})

HEADS: dict[str, HeadFormat] = {
    "glm4_moe": _LAYER,
    "glm4_moe_lite": _LAYER,
    "glm_moe_dsa": HeadFormat(kinds={"indexer_types": "full"}),
    "deepseek_v3": _LAYER,
    "deepseek_v32": _LAYER,
    "hy_v3": HeadFormat({"model.layers.{}.final_layernorm.": "shared_head.norm."}),
    "mellum": HeadFormat(_BESIDE, {"layer_types": "sliding_attention", "mlp_layer_types": "sparse"}),
    "exaone_moe": HeadFormat(_BESIDE, {"layer_types": "sliding_attention", "mlp_layer_types": "dense"}),
    "qwen3_next": _FULL,
    "qwen3_5_moe_text": _FULL,
    # the first of three heads: the others are made for its output at every position, and it drafts on its own
    "mimo_v2_flash": HeadFormat(
        {
            f"{_FIRST_OF_MIMO}final_layernorm.": "shared_head.norm.",
            f"{_FIRST_OF_MIMO}pre_mlp_layernorm.": "post_attention_layernorm.",
            _FIRST_OF_MIMO: "",
        },
        {"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
    ),
}
"""model_type → the head of the families whose heads run. The names are those of transformers' `MtpModel` and of
llama.cpp's converter (`conversion/{exaone,hunyuan,mimo}.py`). vLLM's `exaone_moe` and SGLang's `mimo_v2_flash_nextn`
say that EXAONE's and MiMo's layers are dense and have a window; vLLM's `qwen3_next_mtp` and `qwen3_5_mtp` have the
names of Qwen's heads, whose attention is full."""
