"""Blueprint of a model with its MTP head: the layer after the last one that drafts (`model/mtp_head.py`).

A checkpoint has the head as one more layer, `model.layers.N` of a model of N layers, with norms and a projection before
it and a norm after it, or by names that its family turns into these (`HeadFormat`). So transformers' code for a model
of N + 1 layers says what its layer is made of, and the head is one more layer of the model, of its plan, and of its
expert cache if it has experts. It is packed into a folder of its own within the model's store, which stays as it is for
runs without the head. Embedding and output layer are the model's, whatever copies of them a checkpoint has."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.outline import DenseTensor, Outline, read_outline
from tiermoe.formats.safetensors import Checkpoint
from tiermoe.formats.store import MTP_FOLDER
from tiermoe.model.families import FAMILIES, decoder_family
from tiermoe.model.gguf.checkpoint import mtp_parameters
from tiermoe.model.gguf.outline import outline_of_head
from tiermoe.model.hf.blueprint import Blueprint, check_outline, chosen_store_root
from tiermoe.model.hf.configs import Configs
from tiermoe.model.model_config import lengthened, with_mtp_head
from tiermoe.types import MoeLayer, Segment

if TYPE_CHECKING:
    from tiermoe.model.gguf.checkpoint import GgufExperts
    from tiermoe.model.hf.conversion import CheckpointExperts

_INSTEAD = "--draft lookup drafts without one"


def with_mtp(blueprint: Blueprint, store: Path | None) -> Blueprint:
    """The model with its MTP head. store: as of `inspect_model`; it keeps the head's outline. ModelError if there is
    no head that tiermoe runs, or if it lacks tensors."""
    form = blueprint.family.mtp_head
    if form is None or decoder_family(blueprint.config) is None:
        raise ModelError(
            f"{blueprint.name} is of the family {blueprint.family.name}, of which tiermoe runs no MTP head; it runs "
            f"those of {', '.join(name for name, each in FAMILIES.items() if each.mtp_head is not None)}; {_INSTEAD}"
        )
    config = with_mtp_head(blueprint.config, form.kinds)
    whole = checkpoint = blueprint.checkpoint
    if isinstance(whole, GgufCheckpoint):
        own = mtp_parameters(whole.file, "dense" in form.kinds.values())
        checkpoint, whole = GgufCheckpoint(whole.file, own), GgufCheckpoint(whole.file, {**whole.parameters, **own})
    else:
        whole = checkpoint = copy.copy(whole)
        whole.tensors = form.renamed(whole.tensors, blueprint.config.num_hidden_layers)
    prefix = _prefix(config)
    if not any(key.startswith(prefix) for key in checkpoint.tensors):
        raise ModelError(
            f"the checkpoint in {blueprint.directory} has no MTP head: no tensor of it begins with {prefix}; some are "
            f"published without; {_INSTEAD}"
        )
    root = chosen_store_root(blueprint.directory, blueprint.name, blueprint.origin.fingerprint, store)
    known = read_outline(root / MTP_FOLDER, blueprint.origin)
    head = MtpBlueprint(
        blueprint.directory, blueprint.name, config, blueprint.family, blueprint.dtype,
        checkpoint, known, blueprint.origin, trunk=blueprint,
    )  # fmt: skip
    check_outline(head.outline, head.checkpoint, head.directory)
    outline = _both(blueprint.outline, head.outline, whole)
    if not outline.whole:
        raise ModelError(
            f"the checkpoint in {blueprint.directory} has weights that transformers converts, and the MTP head runs "
            f"where there are none; {_INSTEAD}"
        )
    return replace(blueprint, config=config, checkpoint=whole, known=outline, parts=(blueprint, head))


def _both(trunk: Outline, head: Outline, checkpoint: Checkpoint | GgufCheckpoint) -> Outline:
    keys = dict.fromkeys((*trunk.dense_keys, *head.dense_keys))
    return replace(
        trunk,
        layers=[*trunk.layers, *head.layers],
        sources=(*trunk.sources, *head.sources),
        tensors={**trunk.tensors, **head.tensors},
        packable=(*trunk.packable, *head.packable),
        dense_bytes=trunk.dense_bytes + head.dense_bytes,
        dense_keys=tuple(key for key in keys if key in checkpoint),  # by the names that they have with the head
        whole=trunk.whole and head.whole,
    )


class MtpBlueprint(Blueprint):
    """An MTP head alone: the last layer of `config`, which is else that of `trunk`."""

    @functools.cached_property
    def outline(self) -> Outline:
        """The head's layer, and what is before and after it. ModelError if the checkpoint lacks a tensor."""
        if self.known is not None:
            return self.known
        beside, prefix = beside_layer(self.config), _prefix(self.config)
        if isinstance(self.checkpoint, GgufCheckpoint):
            return outline_of_head(self.checkpoint, self.config, self.dtype, beside)
        assert self.trunk is not None
        whole, trunk = self._built.outline(), len(self.trunk.layers)
        tensors = {path: tensor for path, tensor in whole.tensors.items() if path.startswith(prefix)}
        tensors |= {
            path: DenseTensor(path if path in self.checkpoint else None, shape, self.dtype, self.dtype)
            for path, shape in beside.items()
        }
        missing = [path for path, tensor in tensors.items() if tensor.key is None]
        if missing:
            raise ModelError(
                f"the checkpoint in {self.directory} lacks {len(missing)} tensors of its MTP head, the first is "
                f"{missing[0]}; download it again; {_INSTEAD}"
            )
        keys = {str(tensor.key) for tensor in tensors.values()}
        packable = (
            *whole.packable,
            *(path.removesuffix(".weight") for path, shape in beside.items() if len(shape) == 2),
        )
        return replace(
            whole,
            layers=whole.layers[trunk:],
            sources=whole.sources[trunk:],
            tensors=tensors,
            tied={},
            packable=tuple(path for path in packable if path.startswith(prefix)),
            table=None,
            tables={},
            joined={},
            dense_bytes=sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values()),
            dense_keys=tuple(key for key in self.checkpoint.tensors if key in keys),
            whole=whole.gate is not None,
        )

    @functools.cached_property
    def configs(self) -> Configs:
        assert self.trunk is not None
        config = copy.deepcopy(self.trunk.configs.built)
        assert self.family.mtp_head is not None
        kinds = self.family.mtp_head.kinds
        for name, value in lengthened(config.to_dict(), kinds).items():
            setattr(config, name, value)
        return Configs(config, config, False)

    @property
    def experts(self) -> Any:
        assert self.trunk is not None
        return LaterLayers(super().experts, len(self.trunk.layers))

    def _of_layers(self) -> Checkpoint | GgufCheckpoint:
        trunk = None if self.trunk is None else self.trunk.checkpoint
        if not isinstance(self.checkpoint, GgufCheckpoint) or not isinstance(trunk, GgufCheckpoint):
            return self.checkpoint
        beside = beside_layer(self.config)
        layer = {path: each for path, each in self.checkpoint.parameters.items() if path not in beside}
        return GgufCheckpoint(self.checkpoint.file, {**trunk.parameters, **layer})


class LaterLayers:
    """The layers of a source of experts (`formats.source.ExpertSource`) from one on."""

    def __init__(self, source: CheckpointExperts | GgufExperts, first: int) -> None:
        self.layers: list[MoeLayer] = source.layers[first:]
        self._source, self._at = source, first

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        return self._source.read(self._at + layer, expert)

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        return self._source.in_place(self._at + layer, expert)

    def reading_bytes(self) -> int:
        """Largest memory of `read` beside the result, in bytes."""
        return self._source.reading_bytes()


def _prefix(config: Any) -> str:
    return f"model.layers.{config.num_hidden_layers - 1}."


def beside_layer(config: Any) -> dict[str, tuple[int, ...]]:
    """Path → shape of a head's tensors beside its layer's."""
    prefix, hidden = _prefix(config), config.hidden_size
    norms = {f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return {**norms, f"{prefix}eh_proj.weight": (hidden, 2 * hidden)}
