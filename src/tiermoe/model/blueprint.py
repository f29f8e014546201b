"""A model before anything is loaded: family, layers, experts, dense parameters, and where their bytes lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

from tiermoe.config import MIB
from tiermoe.errors import ModelError, reason
from tiermoe.families import Family, family_of
from tiermoe.model.counts import check_counts, check_generation, check_outline
from tiermoe.model.discovery import (
    model_class,
    text_class_is_apart,
    text_config,
    text_only,
    text_tensors,
    unread,
    writing_config,
)
from tiermoe.model.gguf.architectures import config_of
from tiermoe.model.gguf.outline import outline_of
from tiermoe.model.gguf.parameters import compute_dtype, open_checkpoint
from tiermoe.model.hub import OWN_CODE, chosen_store_root, files_with_code
from tiermoe.process import footprint
from tiermoe.process.json_files import read_json
from tiermoe.store.checkpoint import Checkpoint
from tiermoe.store.gguf.checkpoint import GgufCheckpoint
from tiermoe.store.gguf.file import SUFFIX, is_gguf, open_gguf
from tiermoe.store.layout import ExpertFormat, format_from_names
from tiermoe.store.neurons import unit_format
from tiermoe.store.outline import NAME as OUTLINE
from tiermoe.store.outline import Outline, read_outline, write_outline
from tiermoe.store.own_experts import OWN_BITS, comes_quantized, label_of, own_precision
from tiermoe.store.schemes import by_values
from tiermoe.store.store import Precision
from tiermoe.types import MoeLayer

if TYPE_CHECKING:
    from tiermoe.model.conversion import CheckpointExperts
    from tiermoe.model.gguf.experts import GgufExperts
    from tiermoe.model.skeleton import Skeleton

CONFIG = "config.json"
_LARGEST_CONFIG = 16 * MIB


@dataclass
class Blueprint:
    """What `inspect_model` found. directory: of the checkpoint, or its GGUF file. whole: the checkpoint's config,
    without parts that speak; config: that of its text part, itself where there is no other. apart: transformers has a
    class for the text part alone; the checkpoint's tensors are then that class's. known: the outline that the
    checkpoint's store has, or that follows from a GGUF file's names; None: transformers' modelling code is asked where
    an outline is needed."""

    directory: Path
    name: str
    whole: Any
    config: Any
    apart: bool
    family: Family
    dtype: torch.dtype
    checkpoint: Checkpoint | GgufCheckpoint
    known: Outline | None

    @functools.cached_property
    def outline(self) -> Outline:
        """Layers and dense tensors."""
        return self.known or self._built.outline()

    @property
    def model_class(self) -> Any:
        """transformers' class of the model. Asking for it imports transformers' modelling code."""
        footprint.before_modelling_code()
        cls = model_class(self.family, self.built)
        return cls if self.built is self.config else text_only(cls)

    @property
    def built(self) -> Any:
        """The config that `model_class` takes."""
        return self.config if self.apart else self.whole

    @property
    def unread(self) -> str:
        """What the model's other parts read and tiermoe does not: 'pictures and sound', empty for a text model."""
        return unread(self.whole)

    @functools.cached_property
    def own_code(self) -> str:
        """Which files of the checkpoint name code of its own, which never runs: 'config.json'; empty where none
        does."""
        return " and ".join(files_with_code(self.directory))

    @property
    def skeleton(self) -> Any:
        """The model on the meta device, with shells for experts. Asking for it imports transformers' modelling code."""
        return self._built.model

    @property
    def experts(self) -> CheckpointExperts | GgufExperts:
        """The experts in the checkpoint. Asking for them imports transformers' modelling code."""
        return self._built.experts

    @functools.cached_property
    def _built(self) -> Skeleton:
        footprint.before_modelling_code()
        from tiermoe.model.skeleton import Skeleton  # late: it imports transformers' modelling code

        return Skeleton(self.family, self.model_class, self.built, self.dtype, self.checkpoint, self.name)

    @functools.cached_property
    def comes_quantized(self) -> bool:
        """Whether experts keep the types that they are published in where no bits are asked for."""
        return self.in_gguf or comes_quantized(self.checkpoint, self.outline.sources)

    @functools.cached_property
    def own_experts(self) -> Precision | None:
        """The experts as a GGUF file, or a checkpoint that comes quantised, has them; None for other checkpoints, and
        where no kernel takes them so."""
        if not self.comes_quantized:
            return None
        try:
            return self.require_own_experts()
        except ModelError:  # who asks for them is told why (`engine.load.resolve_for`)
            return None

    def require_own_experts(self) -> Precision:
        """`own_experts`. ModelError where no kernel takes them so."""
        return own_precision(self.checkpoint, self.layers, self.outline.sources, self.dtype)

    def own_types(self) -> str:
        """The types that experts lie in, for people: 'Q4_K, Q6_K'; empty where none are in place."""
        layers = self.own_experts.layers if self.own_experts is not None else []
        parts = [part.name for layer in self.layers for part in layer.parts if part.is_matrix]
        names = {name for layer in layers for part, name in layer.encodings.items() if part in parts}
        plain = str(self.dtype).removeprefix("torch.")
        return ", ".join(sorted({label_of(name) for name in names})) or (plain if layers else "")

    def expert_formats(self, bits: int, unit: str, layout: str, quantizer: str) -> list[ExpertFormat]:
        """The format of each layer's experts at `bits`, for the kernels of `layout`: the file's own where it has them
        in place."""
        if bits == OWN_BITS and unit == "expert" and self.own_experts is not None:
            return [
                format_from_names(layer, bits, self.dtype, packed.encodings, packed.in_page[0])
                for layer, packed in zip(self.layers, self.own_experts.layers, strict=True)
            ]
        return [unit_format(unit, layer, bits, self.dtype, layout, quantizer) for layer in self.layers]

    @property
    def in_gguf(self) -> bool:
        """Whether the checkpoint is a GGUF file."""
        return isinstance(self.checkpoint, GgufCheckpoint)

    @property
    def layers(self) -> list[MoeLayer]:
        return self.outline.layers

    @property
    def dense_keys(self) -> list[str]:
        """Checkpoint keys that are not of experts."""
        return list(self.outline.dense_keys)

    def dense_bytes(self) -> int:
        """Bytes of the parameters and buffers that stay resident at 16 bits (tied ones once)."""
        return self.outline.dense_bytes

    def max_context(self) -> int | None:
        """Tokens the model was made for, None where its positions are relative and unbounded (Switch)."""
        value = getattr(self.config, "max_position_embeddings", None)
        return int(value) if value else None

    def generation_config(self) -> Any:
        """transformers' GenerationConfig of the checkpoint, None where it has none. ModelError where it cannot be
        read."""
        file = self.directory / "generation_config.json"
        if not file.exists():
            return None
        try:
            fields = read_json(file, _LARGEST_CONFIG)
            check_generation(fields)
            return GenerationConfig.from_pretrained(self.directory)
        except Exception as error:
            raise ModelError(f"{file} cannot be read ({reason(error)}); download it again") from error

    def generation_settings(self) -> Any:
        """The GenerationConfig that a transformers model of the checkpoint has: the checkpoint's, or what the config
        says."""
        return self.generation_config() or GenerationConfig.from_model_config(self.config)

    def require_text(self) -> None:
        """ModelError where the model writes no text."""
        if self.family.encoder_class:
            raise ModelError(
                f"{self.name} is an encoder alone and writes no text; load it with tiermoe.load and call it"
            )

    def leave_outline(self, root: Path) -> None:
        """Keeps the outline in the store at `root`, where that has none that can be used."""
        if self.known is None or not (root / OUTLINE).exists():
            write_outline(root, self.checkpoint.fingerprint(), transformers.__version__, self.outline)


def inspect_model(
    directory: Path, name: str, store: Path | None = None, checkpoint: Checkpoint | GgufCheckpoint | None = None
) -> Blueprint:
    """Reads config and headers of a checkpoint, or of a GGUF file, and the outline that its store keeps (in the folder
    `store`, by default the one in the user's cache); builds the model's skeleton where there is none. checkpoint: where
    its headers are known already. ModelError: not a MoE model, an unsupported family, missing or torn files."""
    if is_gguf(directory):
        checkpoint = open_checkpoint(open_gguf(directory))
        whole = config = gguf_config(checkpoint)
        apart = False
    else:
        fields = read_fields(directory)
        checkpoint = checkpoint or Checkpoint(directory)
        check_counts(fields, checkpoint.tensors, directory / CONFIG)
        whole, config = _read_configs(directory, fields)
        apart = text_class_is_apart(whole, config)
        settings = quantization_of(config)
        if settings is not None and isinstance(checkpoint, Checkpoint):
            checkpoint.tensors = by_values(checkpoint.tensors, settings, directory)
        if apart and isinstance(checkpoint, Checkpoint):
            checkpoint.tensors = text_tensors(checkpoint.tensors)
    fingerprint = checkpoint.fingerprint()
    known = read_outline(chosen_store_root(directory, name, fingerprint, store), fingerprint, transformers.__version__)
    family = family_of(config.model_type, getattr(whole, "architectures", None) or ())
    dtype = _dtype_of(config, checkpoint)
    if known is None and isinstance(checkpoint, GgufCheckpoint):
        known = outline_of(checkpoint, config, dtype)
    blueprint = Blueprint(directory, name, whole, config, apart, family, dtype, checkpoint, known)
    check_outline(blueprint.outline, checkpoint, directory)
    return blueprint


def quantization_of(config: Any) -> dict[str, Any] | None:
    """What a config says of how its checkpoint is quantised; None where it is not."""
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else dict(settings.to_dict())


def read_fields(directory: Path) -> dict[str, Any]:
    """What config.json of a checkpoint directory says. ModelError where there is none, or it is not a MoE family's."""
    file = directory / CONFIG
    if not file.exists():
        inside = min(directory.glob(f"*{SUFFIX}"), default=None)
        hint = f"; name the GGUF file in it, {inside}" if inside is not None else ""
        raise ModelError(f"{directory} has no config.json: it is not a Hugging Face model directory{hint}")
    try:
        fields: dict[str, Any] = read_json(file, _LARGEST_CONFIG)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from error
    model_type = fields.get("model_type") if isinstance(fields, dict) else None
    if not model_type or not isinstance(model_type, str):
        raise ModelError(f"{file} names no model_type: transformers cannot tell what model it is")
    if not _looks_like_moe(fields):
        raise ModelError(
            f"{directory} is a '{model_type}' model without experts: tiermoe runs Mixture-of-Experts models; "
            f"transformers itself or llama.cpp run a dense one"
        )
    family_of(model_type)
    if OWN_CODE in fields and model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{directory} is a '{model_type}' model, which transformers {transformers.__version__} does not know and "
            f"the checkpoint brings code for; tiermoe never runs a checkpoint's own code: choose another model"
        )
    return fields


def _read_configs(directory: Path, fields: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' config of a checkpoint directory, and that of its text part. ModelError where it is refused."""
    try:
        whole = writing_config(AutoConfig.from_pretrained(directory, trust_remote_code=False))
        text = text_config(whole)
        if text.is_encoder_decoder and not family_of(text.model_type).encodes:
            raise ValueError(f"no '{text.model_type}' model has an encoder and a decoder")
        family_of(text.model_type, getattr(whole, "architectures", None) or ())
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot read {directory / CONFIG} ({reason(error)}); download it "
            f"again, or a model that this version knows"
        ) from error
    return whole, text


def gguf_config(checkpoint: GgufCheckpoint) -> Any:
    """transformers' config of the model in a GGUF file. ModelError where the file lacks an entry, or transformers
    refuses what it says."""
    fields = config_of(checkpoint.file)
    model_type = fields.pop("model_type")
    family_of(model_type)
    check_counts(fields, checkpoint.tensors, checkpoint.directory)
    try:
        return AutoConfig.for_model(model_type, **fields, dtype=compute_dtype(checkpoint))
    except Exception as error:
        raise ModelError(
            f"transformers {transformers.__version__} refuses what {checkpoint.directory} says of its model "
            f"({reason(error)}); download it again, or another file of the model"
        ) from error


def _looks_like_moe(raw: dict[str, Any]) -> bool:
    inside = [value for value in raw.values() if isinstance(value, dict)]
    named = any("expert" in key for key in raw) or raw.get("model_type") in ("mixtral", "switch_transformers")
    return named or any(map(_looks_like_moe, inside))


def _dtype_of(config: Any, checkpoint: Checkpoint | GgufCheckpoint) -> torch.dtype:
    """The compute dtype: the config's, else that of the checkpoint's first ordinary floating tensor."""
    named = getattr(config, "dtype", None)
    if isinstance(named, torch.dtype):
        dtype = named
    else:
        usual = (torch.bfloat16, torch.float16, torch.float32)
        dtype = next((entry.dtype for entry in checkpoint.tensors.values() if entry.dtype in usual), torch.float32)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ModelError(f"{checkpoint.directory} asks for {dtype}; bfloat16, float16 and float32 are supported")
    return dtype
