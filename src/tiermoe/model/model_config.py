"""Config of a model's text part as the blocks read it: the values that transformers' config has, its defaults
included, and what transformers computes from them, without transformers. A store keeps it (`model-config.json` beside
the outline), so that a later start imports no transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiermoe.formats.outline import Origin, read_kept, write_kept

NAME = "model-config.json"


class ModelConfig:
    """A model's config, by attribute: `config.hidden_size`. AttributeError if transformers' config has none of the
    name.

    fields: JSON values by name, `per_layer_config` among them if layers differ (layer → the values of its own).
    rope_frequencies: kind of layers, '' where all are alike → (frequencies of a rotary embedding that is not the
    default one, factor of its cos and sin). has_text_class: transformers has a class for the text part alone, whose
    tensors the checkpoint's then are. unread: what the model's other parts read ('pictures and sound'); empty for a
    text model."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        rope_frequencies: Mapping[str, tuple[list[float], float]],
        has_text_class: bool = False,
        unread: str = "",
    ) -> None:
        self.__dict__.update({name: value for name, value in fields.items() if name != "per_layer_config"})
        self.fields = fields
        self.rope_frequencies = rope_frequencies
        self.has_text_class = has_text_class
        self.unread = unread

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a {self.__dict__.get('model_type')} config has no {name}")

    def of_layer(self, at: int | str) -> ModelConfig:
        """The config of a layer, or of all layers of a kind."""
        index = self.layer_types.index(at) if isinstance(at, str) else at
        own = (self.fields.get("per_layer_config") or {}).get(str(index))
        if own is None:
            return self
        config = copy.copy(self)
        config.__dict__.update(own)
        return config


_BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
"""A config's lists with an entry for each layer."""


def lengthened(fields: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a config that change where a model has an MTP head's layer after its last one: of the kinds that
    the config says (`mtp_layer_types`), else `kinds` (`families.mtp_heads`), else like the last one."""
    lists = {name: fields[name] for name in _BY_LAYER if isinstance(fields.get(name), list)}
    own = {name: [*(fields.get(f"mtp_{name}") or ()), kinds.get(name, each[-1])][0] for name, each in lists.items()}
    longer = {name: [*each, own[name]] for name, each in lists.items()}
    return {"num_hidden_layers": fields["num_hidden_layers"] + 1, **longer}


def with_mtp_head(config: ModelConfig, kinds: Mapping[str, str]) -> ModelConfig:
    """The config of a model whose last layer is an MTP head's. kinds: as of `lengthened`."""
    fields = {**config.fields, **lengthened(config.fields, kinds), _MTP: True}
    return ModelConfig(fields, config.rope_frequencies, config.has_text_class, config.unread)


def reads_mtp_head(config: Any) -> bool:
    """Whether the last layer is an MTP head's."""
    return bool(getattr(config, _MTP, False))


_MTP = "last_layer_is_mtp_head"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What is read of generation_config.json, or of a config that says it; None: it does not say."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> GenerationConfig:
        return cls(**{name: fields.get(name) for name in cls.__slots__})


def read_config(root: Path, origin: Origin) -> ModelConfig | None:
    """The config that the store at `root` keeps; None if there is none that can be used."""
    kept = read_kept(root / NAME, origin)
    try:
        return None if kept is None else ModelConfig(**kept)
    except TypeError:
        return None


def write_config(root: Path, origin: Origin, config: ModelConfig) -> None:
    """Replaces the config: a reader sees the old or the new one. Where it cannot be written nothing happens."""
    document = {name: getattr(config, name) for name in ("fields", "rope_frequencies", "has_text_class", "unread")}
    write_kept(root / NAME, origin, document)
