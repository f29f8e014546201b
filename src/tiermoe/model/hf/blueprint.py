"""A model before anything is loaded: family, layers, experts, dense parameters, and where their bytes lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiermoe.errors import ModelError, reason
from tiermoe.formats.expert_format import ExpertFormat, format_from_names
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.gguf_file import SUFFIX, is_gguf, open_gguf
from tiermoe.formats.in_place import OWN_BITS, comes_quantized, in_place_precision
from tiermoe.formats.neurons import unit_format
from tiermoe.formats.outline import NAME as OUTLINE
from tiermoe.formats.outline import Origin, Outline, read_outline, write_outline
from tiermoe.formats.quant_schemes import pair_codes_with_scales
from tiermoe.formats.safetensors import Checkpoint
from tiermoe.formats.source import TensorSource, label_of
from tiermoe.formats.store import Precision
from tiermoe.formats.store_files import cache_folder
from tiermoe.model.decoder import plan_layers
from tiermoe.model.families import family_of
from tiermoe.model.families.family import Family
from tiermoe.model.gguf.checkpoint import open_checkpoint
from tiermoe.model.gguf.outline import outline_of
from tiermoe.model.hf.configs import (
    Configs,
    check_counts,
    check_generation,
    files_with_code,
    gguf_configs,
    model_class,
    origin_of,
    quantization_of,
    read_configs,
    read_fields,
    text_only,
    text_tensors,
)
from tiermoe.model.hf.local_models import CONFIG, LARGEST_CONFIG
from tiermoe.model.layer import DecoderLayer
from tiermoe.model.model_config import NAME as MODEL_CONFIG
from tiermoe.model.model_config import GenerationConfig, ModelConfig, read_config, write_config
from tiermoe.platform import process_memory
from tiermoe.platform.json_files import read_json
from tiermoe.types import MoeLayer

if TYPE_CHECKING:
    from tiermoe.model.gguf.checkpoint import GgufExperts
    from tiermoe.model.hf.conversion import CheckpointExperts
    from tiermoe.model.hf.skeleton import Skeleton


@dataclass
class Blueprint:
    """A model as `inspect_model` found it."""

    directory: Path  # of the checkpoint, or its GGUF file
    name: str  # as the user named the model
    config: ModelConfig  # of the text part
    family: Family
    dtype: torch.dtype  # of the computation
    checkpoint: Checkpoint | GgufCheckpoint
    known: Outline | None
    """The outline in the checkpoint's store, or of a GGUF file's names; None: transformers' modelling code is asked
    where an outline is needed."""
    origin: Origin  # of what the store keeps of the model
    parts: tuple[Blueprint, ...] = ()
    """The model without its MTP head, and the head (`mtp_blueprint`), each with a store of its own; empty: this is
    one part."""
    trunk: Blueprint | None = None  # of an MTP head: the model without it

    @functools.cached_property
    def configs(self) -> Configs:
        """transformers' configs. Reading them imports transformers."""
        return _configs_of(self.directory, self.checkpoint)

    @functools.cached_property
    def outline(self) -> Outline:
        """Layers and dense tensors."""
        return self.known or self._built.outline()

    @functools.cached_property
    def planned_layers(self) -> list[DecoderLayer] | None:
        """Layers of the decoder that the model gets, of weights without values: what a plan counts. None if it gets
        none of ours."""
        shapes = {path: tensor.shape for path, tensor in self.outline.tensors.items()}
        return plan_layers(self.config, shapes, self.dtype)

    @property
    def model_class(self) -> Any:
        """transformers' class of the model. Reading it imports transformers' modelling code."""
        process_memory.import_modelling_code()
        built = self.configs.built
        cls = model_class(self.family, built)
        return cls if built is self.configs.text else text_only(cls)

    @functools.cached_property
    def own_code(self) -> str:
        """The files of the checkpoint that name code of its own, which never runs ('config.json'); empty for none."""
        return " and ".join(files_with_code(self.directory))

    @property
    def skeleton(self) -> Any:
        """The model on the meta device, with shells for experts. Reading it imports transformers' modelling code."""
        return self._built.model

    @property
    def experts(self) -> CheckpointExperts | GgufExperts:
        """The experts in the checkpoint. Reading them imports transformers' modelling code."""
        return self._built.experts

    @functools.cached_property
    def _built(self) -> Skeleton:
        if self.parts:
            return self.parts[0]._built
        process_memory.import_modelling_code()
        from tiermoe.model.hf.skeleton import Skeleton  # late: it imports transformers' modelling code

        return Skeleton(self.family, self.model_class, self.configs.built, self.dtype, self._of_layers(), self.name)

    def _of_layers(self) -> Checkpoint | GgufCheckpoint:
        """The checkpoint, with tensors that transformers' model has."""
        return self.checkpoint

    @functools.cached_property
    def comes_quantized(self) -> bool:
        """Whether experts keep the types that they are published in if no bits are asked for."""
        return self.in_gguf or comes_quantized(self.checkpoint, self.outline.sources)

    @functools.cached_property
    def own_experts(self) -> Precision | None:
        """The experts as a GGUF file, or a checkpoint that comes quantised, has them; None for other checkpoints, and
        where no kernel takes them so."""
        if not self.comes_quantized:
            return None
        try:
            return self.require_own_experts()
        except ModelError:  # `require_own_experts` says why
            return None

    def require_own_experts(self) -> Precision:
        """`own_experts`. ModelError if no kernel takes them so."""
        return in_place_precision(self.checkpoint, self.layers, self.outline.sources, self.dtype)

    def own_types(self) -> str:
        """The types that experts lie in, for people: 'Q4_K, Q6_K'; empty if none are in place."""
        layers = self.own_experts.layers if self.own_experts is not None else []
        parts = [part.name for layer in self.layers for part in layer.parts if part.is_matrix]
        names = {name for layer in layers for part, name in layer.encodings.items() if part in parts}
        plain = str(self.dtype).removeprefix("torch.")
        return ", ".join(sorted({label_of(name) for name in names})) or (plain if layers else "")

    def expert_formats(self, bits: int, unit: str, quantizer: str) -> list[ExpertFormat]:
        """The format of each layer's experts at `bits`: the file's own where it has them in place."""
        if bits == OWN_BITS and unit == "expert" and self.own_experts is not None:
            return [
                format_from_names(layer, bits, self.dtype, packed.encodings, packed.in_page[0])
                for layer, packed in zip(self.layers, self.own_experts.layers, strict=True)
            ]
        return [unit_format(unit, layer, bits, self.dtype, quantizer) for layer in self.layers]

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
        """Tokens the model was made for, None if its positions are relative and unbounded (Switch)."""
        value = getattr(self.config, "max_position_embeddings", None)
        return int(value) if value else None

    def generation_config(self) -> GenerationConfig | None:
        """The checkpoint's generation_config.json, None if it has none. ModelError if it cannot be read."""
        file = self.directory / "generation_config.json"
        if not file.exists():
            return None
        try:
            fields = read_json(file, LARGEST_CONFIG)
            check_generation(fields)
            return GenerationConfig.of(fields)
        except Exception as error:
            raise ModelError(f"{file} cannot be read ({reason(error)}); download it again") from error

    def generation_settings(self) -> GenerationConfig:
        """The checkpoint's generation_config.json, or what the config says of generation."""
        return self.generation_config() or GenerationConfig.of(self.config.fields)

    def require_text(self) -> None:
        """ModelError if the model writes no text."""
        if self.family.encoder_class:
            raise ModelError(
                f"{self.name} is an encoder alone and writes no text; load it with tiermoe.load and call it"
            )

    def leave_outline(self, root: Path) -> None:
        """Keeps outline and config in the store at `root`, if that has none that can be used."""
        if self.known is None or not (root / OUTLINE).exists():
            write_outline(root, self.origin, self.outline)
        if not (root / MODEL_CONFIG).exists() or read_config(root, self.origin) is None:
            write_config(root, self.origin, self.config)


def inspect_model(
    directory: Path, name: str, store: Path | None = None, checkpoint: Checkpoint | GgufCheckpoint | None = None
) -> Blueprint:
    """Reads config and headers of a checkpoint, or of a GGUF file, and the outline that its store keeps (in the folder
    `store`, by default the one in the user's cache); builds the model's skeleton if there is none. checkpoint: where
    its headers are known already. ModelError: not a MoE model, an unsupported family, missing or torn files."""
    fields: dict[str, Any] = {}
    if is_gguf(directory):
        checkpoint = checkpoint or open_checkpoint(open_gguf(directory))
    else:
        fields = read_fields(directory)
        checkpoint = checkpoint or Checkpoint(directory)
        check_counts(fields, checkpoint.tensors, directory / CONFIG)
    origin = origin_of(checkpoint.fingerprint())
    root = chosen_store_root(directory, name, origin.fingerprint, store)
    config, known, configs = read_config(root, origin), read_outline(root, origin), None
    if config is None:
        configs = _configs_of(directory, checkpoint)
        config = configs.plain()
    if isinstance(checkpoint, Checkpoint):
        settings = quantization_of(config)
        if settings is not None:
            checkpoint.tensors = pair_codes_with_scales(checkpoint.tensors, settings, directory)
        if config.has_text_class:
            checkpoint.tensors = text_tensors(checkpoint.tensors)
    family = family_of(config.model_type, fields.get("architectures") or ())
    dtype = _dtype_of(config, checkpoint)
    if known is None and isinstance(checkpoint, GgufCheckpoint):
        known = outline_of(checkpoint, config, dtype)
    blueprint = Blueprint(directory, name, config, family, dtype, checkpoint, known, origin)
    if configs is not None:
        blueprint.configs = configs  # read once
    check_outline(blueprint.outline, checkpoint, directory)
    return blueprint


def _configs_of(directory: Path, checkpoint: Checkpoint | GgufCheckpoint) -> Configs:
    if isinstance(checkpoint, GgufCheckpoint):
        return gguf_configs(checkpoint)
    return read_configs(directory, read_fields(directory))


def _dtype_of(config: Any, checkpoint: Checkpoint | GgufCheckpoint) -> torch.dtype:
    """The compute dtype: the config's, else that of the checkpoint's first ordinary floating tensor."""
    named = getattr(torch, str(getattr(config, "dtype", None)), None)
    if isinstance(named, torch.dtype):
        dtype = named
    else:
        usual = (torch.bfloat16, torch.float16, torch.float32)
        dtype = next((entry.dtype for entry in checkpoint.tensors.values() if entry.dtype in usual), torch.float32)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ModelError(f"{checkpoint.directory} asks for {dtype}; bfloat16, float16 and float32 are supported")
    return dtype


def check_outline(outline: Outline, checkpoint: TensorSource, directory: Path) -> None:
    """ModelError if a tensor has another shape than the config asks for, or a token uses no expert, or more than
    there are."""
    for path, tensor in outline.tensors.items():
        found = tensor.shape if tensor.key is None else tuple(checkpoint.tensors[tensor.key].shape)
        if found != tensor.shape:
            raise ModelError(
                f"{path} has shape {found} in {directory}, the config asks for {tensor.shape}; config and weights do "
                f"not belong together"
            )
    for layer in outline.layers:
        if not layer.expert_elements:
            raise ModelError(f"{directory} says that the experts of {layer.name} have no weights; download it again")
        if not 1 <= layer.top_k <= layer.experts:
            raise ModelError(
                f"{directory} says that a token uses {layer.top_k} of the {layer.experts} experts of {layer.name}; "
                f"download it again"
            )


# the folder of a checkpoint's store


def chosen_store_root(directory: Path, name: str, fingerprint: str, chosen: Path | None) -> Path:
    """The folder of a checkpoint's store: the chosen one, or one in the user's cache folder that is named for the model
    and the checkpoint's fingerprint."""
    return (chosen or cache_folder() / f"{_label(directory, name)}-{fingerprint}").expanduser().absolute()


def _label(directory: Path, name: str) -> str:
    text = name if "/" in name and not Path(name).exists() else directory.name.removesuffix(SUFFIX)
    if directory.parent.name == "snapshots":  # a hub cache folder: models--org--name/snapshots/revision
        text = directory.parent.parent.name.removeprefix("models--")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text).strip("-.") or "model"
