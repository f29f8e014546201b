"""What a config and transformers' modelling code say of a family: its text part, the class that computes it, which
classes are its experts, and the routers beside them. Nothing is loaded, and nothing but sizes is looked at."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
from types import ModuleType
from typing import Any

import torch
import transformers

from tiermoe.errors import ModelError
from tiermoe.families import Family
from tiermoe.store.quantized_tensors import Entries

_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
_TEXT_KEYS = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
"""What the tensors of a text part are called inside of a larger model, and on their own."""


def writing_config(config: Any) -> Any:
    """The config of the part that reads and writes, where another one speaks (the thinker of Qwen3-Omni), for which
    transformers has a class that takes its weights out of the whole checkpoint; `config` itself elsewhere."""
    thinker = getattr(config, "thinker_config", None)
    return config if thinker is None else _part(config, thinker)


def text_config(config: Any) -> Any:
    """The config of a model's text part, with the quantisation that its whole checkpoint has; `config` itself where it
    has no other parts."""
    text = config if config.is_encoder_decoder else config.get_text_config()
    return config if text is config else _part(config, text)


def _part(whole: Any, part: Any) -> Any:
    """The config of a part, with the quantisation and the dtype of the whole checkpoint."""
    part = copy.deepcopy(part)
    quantization = getattr(whole, "quantization_config", None)
    if quantization is not None:
        part.quantization_config = quantization
    if getattr(part, "dtype", None) is None:
        part.dtype = getattr(whole, "dtype", None)
    return part


def text_class_is_apart(config: Any, text: Any) -> bool:
    """Whether transformers computes the text part of a larger model by a causal class of its own."""
    if text is config:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return config.model_type in NAMES and NAMES[config.model_type] == NAMES.get(text.model_type)


def text_tensors(tensors: Entries) -> Entries:
    """The tensors of a larger checkpoint's text part, by the names that they have in a checkpoint of their own. All of
    them where none lies inside of another part: the text part has its own names there (dots3_note)."""
    if not any("language_model." in key for key in tensors):
        return tensors
    found: Entries = {}
    for key, entry in tensors.items():
        name = next((own + key.removeprefix(inside) for inside, own in _TEXT_KEYS if key.startswith(inside)), None)
        if name is not None:
            found[name] = entry
    return found


def model_class(family: Family, config: Any) -> Any:
    """transformers' class of models with this config. ModelError where it has none that continues a text, and the
    family is no encoder alone."""
    if family.encoder_class:
        return getattr(transformers, family.encoder_class)
    if family.encoder_decoder:
        return transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)]
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ModelError(
        f"transformers {transformers.__version__} has no class that continues a text for the model type "
        f"'{config.model_type}'"
    )


def text_only(cls: type[Any]) -> type[Any]:
    """A subclass of a larger model's class without the parts that read anything but text."""

    def __init__(self: Any, config: Any, *args: Any, **named: Any) -> None:
        cls.__init__(self, config, *args, **named)
        kept = {self.get_input_embeddings(), self.get_output_embeddings()}
        for parent in (self, getattr(self, self.base_model_prefix, self)):
            for name, child in list(parent.named_children()):
                if child.state_dict() and kept.isdisjoint(child.modules()):
                    delattr(parent, name)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def unread(config: Any) -> str:
    """What a model's parts beside the text part read: 'pictures and sound'; empty where there are none."""
    parts = " ".join(getattr(config, "sub_configs", {}))
    return " and ".join(what for part, what in (("vision", "pictures"), ("audio", "sound")) if part in parts)


def modelling_module(config: Any) -> ModuleType:
    """The module in which the classes of a (text) config's family are defined."""
    return importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))


def classes_of(module: ModuleType) -> dict[str, type[torch.nn.Module]]:
    """The modules that `module` itself defines, by name."""
    own = vars(module).values()
    return {
        each.__name__: each
        for each in own
        if isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == module.__name__
    }


def is_experts_class(cls: type[torch.nn.Module]) -> bool:
    """Whether transformers' experts interface computes this class (`use_experts_implementation`)."""
    return hasattr(cls, "_apply_gate") and hasattr(cls.forward, "__wrapped__")


def top_k(config: Any, layer: int) -> int:
    """Experts that a token uses in decoder layer `layer`; 1 where the config has no entry for it (Switch). ModelError
    where the entry names no number."""
    named = ""
    for part in (config, getattr(config, "ffn_config", None)):
        for name in _TOP_K:
            value = getattr(part, name, None)
            if isinstance(value, list | tuple):
                value = value[layer] if layer < len(value) else None
            if isinstance(value, int):
                return value
            named = name if hasattr(part, name) else named
    if named:
        raise ModelError(f"the config names no number of experts that a token uses ({named} of layer {layer})")
    return 1


def is_table(module: torch.nn.Module) -> bool:
    """Whether a module of transformers does nothing but look up rows, and multiply them by its `embed_scale`."""
    if not isinstance(module, torch.nn.Embedding) or module.max_norm is not None:
        return False
    return type(module) is torch.nn.Embedding or type(module).__name__.endswith("ScaledWordEmbedding")


def takes_weight(owner: torch.nn.Module, child: str) -> bool:
    """Whether a module's code computes with the weight of its linear layer `child` itself, so that the layer must stay
    as it is. Questions about shape and dtype a packed one answers too, and a fused product of training never runs."""
    cls: Any = type(owner)
    code = _source(cls)
    if code is None:
        return True
    used = r"(?<!isinstance\(self\.)(?<!outproj_weight=self\.)(?<=\.)"  # a name in a string says what is tied
    return re.search(rf"{used}{re.escape(child)}\.weight\b(?!\.(dtype|device|shape))", code) is not None


@functools.cache
def _source(cls: type) -> str | None:
    """A class's code; None where there is no file to read it from. Python parses the whole file for each class."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return None
