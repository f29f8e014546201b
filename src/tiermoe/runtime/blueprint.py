"""A model before anything is loaded: family, layers, experts, dense parameters, and where their bytes lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig
from transformers.quantizers import AutoHfQuantizer

from tiermoe.errors import ModelError
from tiermoe.families import Family, family_of
from tiermoe.runtime.conversion import CheckpointExperts
from tiermoe.runtime.footprint import without_meta_references
from tiermoe.runtime.shells import experts_left_out
from tiermoe.store.checkpoint import Checkpoint
from tiermoe.types import MoeLayer


@dataclass(slots=True)
class Blueprint:
    """What `inspect_model` found. `skeleton` is the model on the meta device, with shells for experts."""

    directory: Path
    name: str
    config: Any
    family: Family
    dtype: torch.dtype
    skeleton: Any
    checkpoint: Checkpoint
    experts: CheckpointExperts
    quantized: bool

    @property
    def layers(self) -> list[MoeLayer]:
        return self.experts.layers

    @property
    def dense_keys(self) -> list[str]:
        """Checkpoint keys that are not of experts."""
        return [key for key in self.checkpoint.tensors if key not in self.experts.expert_keys]

    def dense_bytes(self) -> int:
        """Bytes of the parameters and buffers that stay resident at 16 bits (tied ones once)."""
        seen: dict[int, int] = {}
        for tensor in [*self.skeleton.parameters(), *self.skeleton.buffers()]:
            seen[id(tensor)] = tensor.numel() * tensor.element_size()
        return sum(seen.values()) - self._tied_bytes()

    def _tied_bytes(self) -> int:
        tied = getattr(self.skeleton, "all_tied_weights_keys", None) or {}
        parameters = dict(self.skeleton.named_parameters(remove_duplicate=False))
        return sum(
            parameters[key].numel() * parameters[key].element_size()
            for key, source in tied.items()
            if key in parameters and source in parameters and parameters[key] is not parameters[source]
        )

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
            return GenerationConfig.from_pretrained(self.directory)
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read ({error}); download it again") from error


def inspect_model(directory: Path, name: str) -> Blueprint:
    """Reads config and headers of a checkpoint and builds its skeleton. ModelError: not a MoE model, an unsupported
    family, missing or torn files."""
    config = read_config(directory)
    family = family_of(config.model_type)
    checkpoint = Checkpoint(directory)
    quantized = getattr(config, "quantization_config", None) is not None
    quantizer = _dequantizer(config) if quantized else None
    dtype = _dtype_of(config, checkpoint)
    skeleton = _skeleton(family, config, dtype)
    top_k = 1 if family.top_k is None else int(getattr(config, family.top_k))
    experts = CheckpointExperts(skeleton, checkpoint, dtype, top_k, quantizer)
    if not experts.layers:
        raise ModelError(f"{name} ({config.model_type}) has no expert layers: it is not a Mixture-of-Experts model")
    return Blueprint(directory, name, config, family, dtype, skeleton, checkpoint, experts, quantized)


def read_config(directory: Path) -> Any:
    """transformers' config of a checkpoint directory. ModelError where there is none, or it is not a MoE family's."""
    file = directory / "config.json"
    if not file.exists():
        raise ModelError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    try:
        raw = json.loads(file.read_text())
        model_type = raw.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from error
    if not model_type:
        raise ModelError(f"{file} names no model_type: transformers cannot tell what model it is")
    if not _looks_like_moe(raw):
        raise ModelError(
            f"{directory} is a '{model_type}' model without experts: tiermoe runs Mixture-of-Experts models; "
            f"transformers itself or llama.cpp run a dense one"
        )
    family_of(model_type)
    try:
        return AutoConfig.from_pretrained(directory)
    except Exception as error:
        cause = str(error) or type(error).__name__
        raise ModelError(
            f"transformers {transformers.__version__} cannot read {file} ({cause}); download it again, or a model that "
            f"this version knows"
        ) from error


def auto_class(family: Family) -> Any:
    """The transformers class that loads this family's models."""
    return AutoModelForSeq2SeqLM if family.encoder_decoder else AutoModelForCausalLM


def _looks_like_moe(raw: dict[str, Any]) -> bool:
    return any("expert" in key for key in raw) or raw.get("model_type") in ("mixtral", "switch_transformers")


def _skeleton(family: Family, config: Any, dtype: torch.dtype) -> Any:
    with experts_left_out(family, config), without_meta_references(), torch.device("meta"):
        return auto_class(family).from_config(config, dtype=dtype, experts_implementation="eager")


def _dequantizer(config: Any) -> Any:
    settings = config.quantization_config
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    return AutoHfQuantizer.from_config({**settings, "dequantize": True}, pre_quantized=True)


def _dtype_of(config: Any, checkpoint: Checkpoint) -> torch.dtype:
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
