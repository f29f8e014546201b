"""Model families, a file each. `FAMILIES` finds them: a class in a file here needs no entry anywhere."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from importlib import import_module

from tiermoe.errors import ModelError
from tiermoe.model.families.family import Family, lacking
from tiermoe.model.model_config import ModelConfig


def _found() -> Iterator[Family]:
    """A family of each class in the files of this folder that has a `model_type`."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for each in vars(import_module(module.name)).values():
            own = isinstance(each, type) and issubclass(each, Family) and each.__module__ == module.name
            if own and hasattr(each, "model_type"):
                yield each()


_FOUND = list(_found())
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FOUND if not family.encoder_class}
"""model_type → family. `FAMILIES["mine"] = Mine()` adds one from elsewhere."""
ENCODERS = {family.encoder_class: family for family in _FOUND if family.encoder_class}
"""A class that config.json's `architectures` names → its family, of an encoder alone."""

REFUSED = {
    "dbrx": "its experts are rows of one matrix, outside of transformers' interface of experts",
    "diffusion_gemma": "it fills in blocks of tokens rather than continue a text",
    "doge": "its experts are single rows of an embedding, of which a token adds up thousands: there are no matrices to "
    "load one by one",
    "ernie4_5_vl_moe": "its checkpoint has the experts for text and for pictures in one list, which tiermoe does not "
    "take apart",
    "jetmoe": "its attention has experts too, outside of transformers' interface of experts",
    "longcat_flash": "its experts are outside of transformers' interface of experts",
    "minimax": "transformers computes something else for a token that follows others than for the same token inside of "
    "a prompt",
    "muse_spark": "it normalises what each expert gives before that is weighted, which no kernel of tiermoe does",
    "nllb-moe": "transformers computes only its first two experts",
    "step3p5": "its experts are outside of transformers' interface of experts",
    "unlimited_ocr": "which tokens it attends to depends on which were given and which it wrote, and tiermoe's "
    "sequences do not keep them apart",
}
"""model_type → why no model of this family runs."""


def family_of(model_type: str, architectures: Sequence[str] = ()) -> Family:
    """The family of a config's `model_type`: one of `FAMILIES`, or a family of which nothing is stated. architectures:
    the classes that the config names, of which one may be an encoder alone. ModelError with the reason for a family
    that is refused."""
    if model_type in REFUSED:
        raise ModelError(f"models of the family '{model_type}' are refused: {REFUSED[model_type]}")
    for encoder in architectures:
        if encoder in ENCODERS:
            return ENCODERS[encoder]
    name = model_type.removesuffix("_text")
    return FAMILIES.get(model_type) or FAMILIES.get(f"{model_type}_text") or _unstated(name, model_type)


def _unstated(name: str, model_type: str) -> Family:
    family = Family()
    family.name, family.model_type = name, model_type
    return family


def decoder_family(config: ModelConfig, device: str = "cpu") -> Family | None:
    """The family of a config that tiermoe has a decoder of its own for on a device ('cpu', 'cuda', 'cuda:1'); None
    where transformers' code runs it."""
    family = FAMILIES.get(config.model_type)
    runs = family is not None and family.decodes and (device == "cpu" or family.on_gpu)
    return family if family is not None and runs and not lacking(family, config) else None


def not_computed(config: ModelConfig) -> str:
    """The parts of a config of a family with a decoder that no block computes, in words; empty: none."""
    return lacking(FAMILIES[config.model_type], config)


def has_decoder(model_type: str) -> bool:
    """Whether tiermoe has a decoder of its own for models of a family."""
    family = FAMILIES.get(model_type)
    return family is not None and family.decodes
