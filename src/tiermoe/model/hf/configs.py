"""Config of a model: read from its directory or GGUF file, checked against the tensors that are there, and its text
part if the model reads more than text."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiermoe.errors import ModelError, reason
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.outline import Origin
from tiermoe.formats.safetensors import Entries
from tiermoe.model.families import family_of, has_decoder
from tiermoe.model.families.family import Family
from tiermoe.model.gguf.checkpoint import compute_dtype, config_of, family_in
from tiermoe.model.hf.local_models import CONFIG, read_moe_fields
from tiermoe.model.model_config import ModelConfig
from tiermoe.model.rotary import UNSUPPORTED, layer_kinds
from tiermoe.platform import process_memory
from tiermoe.platform.json_files import read_json
from tiermoe.version import VERSION

TOKENIZER_CONFIG = "tokenizer_config.json"
OWN_CODE = "auto_map"
"""The entry by which a checkpoint's files name Python code of its own."""
_LAYERS = re.compile(r"layers?$")
_EXPERTS = re.compile(r"experts")
_SIZES = re.compile(r"(size|dim|heads|rank|vocab|columns|model|ff|state|groups?)$")
_FEW = 1024
"""Layers and experts that any config may name: parts that are never built have theirs too."""
_SMALL = 1 << 20
"""Rows and columns that any config may name: a few MiB are made of them at the most."""
_GENERATION: dict[Any, tuple[str, ...]] = {
    (int, float): ("temperature", "top_p", "repetition_penalty"),
    int: ("top_k", "eos_token_id", "bos_token_id", "pad_token_id", "do_sample"),
}
"""Kinds of values → fields of generation_config.json."""
_NUMBERED = re.compile(r"\.(\d{1,9})\.")
_COMPUTED = ("num_hidden_layers", "layer_types")
"""What some families' configs compute of other fields, and do not write."""
_TEXT_KEYS = (
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
)
"""Prefixes of a text part's tensors inside of a larger model, its MTP head's among them, and on their own."""


# reading


def read_fields(directory: Path) -> dict[str, Any]:
    """`read_moe_fields` of a family that tiermoe runs: else ModelError."""
    fields = read_moe_fields(directory)
    family_of(fields["model_type"])
    return fields


class Configs(NamedTuple):
    """transformers' configs of a checkpoint."""

    whole: Any  # without parts that speak
    text: Any  # of the text part; `whole` if there is no other part
    has_text_class: bool  # transformers has a class for the text part alone, whose tensors the checkpoint's then are

    @property
    def built(self) -> Any:
        """The config that transformers' class of the model takes."""
        return self.text if self.has_text_class else self.whole

    def plain(self) -> ModelConfig:
        """The text part's config, without transformers."""
        text = self.text
        fields = text.to_dict()
        fields |= {name: fields[own] for name, own in text.attribute_map.items() if own in fields}
        fields |= {name: getattr(text, name) for name in _COMPUTED if hasattr(text, name)}
        return ModelConfig(fields, rope_frequencies(text), self.has_text_class, unread(self.whole))


def rope_frequencies(config: Any) -> dict[str, tuple[list[float], float]]:
    """`ModelConfig.rope_frequencies` of transformers' config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not has_decoder(config.model_type):
        return {}
    found = {}
    for layers in layer_kinds(config):
        named: Any = getattr(config, "rope_parameters", None)
        kind = ((named if layers is None else named[layers]) or {}).get("rope_type")
        if kind in ROPE_INIT_FUNCTIONS and kind not in UNSUPPORTED:
            of = config.per_layer_config[layers] if layers in (getattr(config, "layer_types", None) or ()) else config
            frequencies, factor = ROPE_INIT_FUNCTIONS[kind](of, **({} if layers is None else {"layer_type": layers}))
            found[layers or ""] = (frequencies.float().tolist(), float(factor))
    return found


def transformers_version() -> str:
    """transformers' version, without importing it."""
    return importlib.metadata.version("transformers")


def origin_of(fingerprint: str) -> Origin:
    """The origin of what these versions of transformers and tiermoe make of files with a fingerprint."""
    return Origin(fingerprint, f"transformers {transformers_version()}, tiermoe {VERSION}")


def read_configs(directory: Path, fields: dict[str, Any]) -> Configs:
    """transformers' configs of a checkpoint directory with these `fields` in its config.json. ModelError if they are
    refused."""
    auto_config = _auto_config()
    from transformers import CONFIG_MAPPING

    if OWN_CODE in fields and fields["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"{directory} is a '{fields['model_type']}' model, which transformers {transformers_version()} does not "
            f"know and the checkpoint brings code for; tiermoe never runs a checkpoint's own code: choose another model"
        )
    try:
        whole = writing_config(auto_config.from_pretrained(directory, trust_remote_code=False))
        text = text_config(whole)
        if text.is_encoder_decoder and not family_of(text.model_type).encodes:
            raise ValueError(f"no '{text.model_type}' model has an encoder and a decoder")
        family_of(text.model_type, getattr(whole, "architectures", None) or ())
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers {transformers_version()} cannot read {directory / CONFIG} ({reason(error)}); download it "
            f"again, or a model that this version knows"
        ) from error
    return Configs(whole, text, text_class_is_apart(whole, text))


def gguf_configs(checkpoint: GgufCheckpoint) -> Configs:
    """transformers' configs of the model in a GGUF file. ModelError if the file lacks an entry, or transformers
    refuses what it says."""
    auto_config = _auto_config()
    fields, whole = config_of(checkpoint.file), family_in(checkpoint.file)[1].part_of
    model_type = fields.pop("model_type")
    family_of(model_type)
    check_counts(fields, checkpoint.tensors, checkpoint.directory)
    if whole:
        model_type, fields = whole, {"text_config": fields}
    try:
        config = auto_config.for_model(model_type, **fields, dtype=compute_dtype(checkpoint))
    except Exception as error:
        raise ModelError(
            f"transformers {transformers_version()} refuses what {checkpoint.directory} says of its model "
            f"({reason(error)}); download it again, or another file of the model"
        ) from error
    return Configs(config, text_config(config), False)


def _auto_config() -> Any:
    """transformers' AutoConfig, with the config classes of ours. Imports transformers."""
    process_memory.import_transformers()
    from tiermoe.model.hf.configuration_deepseek import register

    return register()


def quantization_of(config: Any) -> dict[str, Any] | None:
    """A config's settings of its checkpoint's quantisation; None if the checkpoint is not quantised."""
    settings = getattr(config, "quantization_config", None)
    return settings if settings is None or isinstance(settings, dict) else dict(settings.to_dict())


def files_with_code(directory: Path) -> list[str]:
    """The files of a checkpoint's folder that name Python code in it, for config, model or tokenizer. It never runs."""
    return [name for name in (CONFIG, TOKENIZER_CONFIG) if OWN_CODE in _fields(directory / name)]


def _fields(file: Path) -> dict[str, Any]:
    """The fields of a JSON file; empty if there is none that can be read."""
    try:
        document = read_json(file)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


# counts of a config, checked against the tensors before anything is built by them


def check_counts(fields: Mapping[str, Any], tensors: Mapping[str, Any], file: Path) -> None:
    """ModelError if a config names more layers than the tensors' names have, or more experts, heads, rows or columns
    than the longest dimension of a tensor. fields: of the config, parts inside of it included."""
    for name, value in _numbers(fields):
        if _LAYERS.search(name):
            fits = value <= _FEW or value <= _layers(tensors)
        elif _EXPERTS.search(name) or _SIZES.search(name):
            fits = value <= (_FEW if _EXPERTS.search(name) else _SMALL) or value <= _longest(tensors)
        else:
            continue
        if not fits:
            raise ModelError(
                f"{file} says {name} {value:,}, which its {len(tensors):,} tensors of {_layers(tensors):,} layers and "
                f"up to {_longest(tensors):,} rows do not have; config and weights do not belong together"
            )


def _layers(tensors: Mapping[str, Any]) -> int:
    """By the first number in each tensor's name."""
    return 1 + max((int(found[1]) for name in tensors if (found := _NUMBERED.search(name))), default=-1)


def _longest(tensors: Mapping[str, Any]) -> int:
    return max((size for entry in tensors.values() for size in entry.shape), default=0)


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        else:
            several = value if isinstance(value, list) else [value]
            yield from ((name, each) for each in several if isinstance(each, int | float))


def check_generation(fields: Any) -> None:
    """ValueError if generation_config.json is no object, or a value that is read of it has another kind."""
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    for kinds, names in _GENERATION.items():
        for name in names:
            value = fields.get(name)
            several = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if any(each is not None and not isinstance(each, kinds) for each in several):
                raise ValueError(f"{name} is {value!r}")


# the text part of a larger model


def writing_config(config: Any) -> Any:
    """The config of the part that reads and writes where another part speaks (the thinker of Qwen3-Omni); transformers
    has a class that takes its weights out of the whole checkpoint. `config` itself elsewhere."""
    thinker = getattr(config, "thinker_config", None)
    return config if thinker is None else _part(config, thinker)


def text_config(config: Any) -> Any:
    """The config of a model's text part, with the quantisation that its whole checkpoint has; `config` itself if it
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


def unread(config: Any) -> str:
    """What a model's parts beside the text part read ('pictures and sound'); empty if there are none."""
    parts = " ".join(getattr(config, "sub_configs", {}))
    return " and ".join(what for part, what in (("vision", "pictures"), ("audio", "sound")) if part in parts)


def model_class(family: Family, config: Any) -> Any:
    """transformers' class of models with this config, or ours where it has none of the family. ModelError if there
    is none that continues a text, and the family is no encoder alone."""
    import transformers

    if config.model_type == "deepseek":
        from tiermoe.model.hf.modeling_deepseek import register

        register()

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


@functools.cache
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


# what transformers calls the cache: `cache` from 5.24 on, `past_key_values` before

CACHE_NAMES = ("cache", "past_key_values")
"""In the arguments of `forward` and of `generate()`, and in what is returned, the newest first: later
versions take the older one too, with a warning."""


def cache_name(names: Container[str]) -> str:
    """The name among those of a function's parameters, or of an output's fields; the newest if none is there, as of
    an encoder."""
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among named arguments, or in an output object; None if there is none."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
