"""One expert at a time through transformers' own checkpoint conversion, and byte ranges where none is needed.

transformers' conversion mapping says how a family's checkpoint becomes its parameters: renames, merges of separate
gate and up projections, transposes. Fed with the tensors of a single expert it yields that expert, so no naming or
layout is known here. Tensors that come quantised are read by what they stand for (`formats.safetensors`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tiermoe.errors import ModelError
from tiermoe.formats.expert_format import expert_format
from tiermoe.formats.safetensors import Checkpoint, QuantizedTensor, TensorEntry
from tiermoe.formats.source import EACH
from tiermoe.model.hf.experts import shells_of
from tiermoe.types import MoeLayer, Part, Segment

_CONVERTED = 8  # bytes a weight: as stored, at most float32, merged, and in the compute dtype
_DEQUANTIZED = 12  # the same where codes become float32 first

Sources = dict[str | None, list[str]]
"""Pattern of the converter that takes them (None: taken as they are) → checkpoint keys, in expert order."""


class CheckpointExperts:
    """The experts of a checkpoint (`formats.source.ExpertSource`).

    `model` is built on the meta device with shells; top_k: index of a decoder layer → experts that a token uses in it.
    ModelError if the checkpoint lacks an expert's tensors.
    """

    def __init__(self, model: Any, checkpoint: Checkpoint, dtype: torch.dtype, top_k: Callable[[int], int]) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._model = model
        shells = shells_of(model)
        self.layers = [_layer_of(name, shell, top_k(_decoder_layer(name))) for name, shell in shells.items()]
        self._stacked = [not hasattr(shell, "expert_template") for shell in shells.values()]
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        self._sources: dict[str, Sources] = {}
        self.expert_keys: set[str] = set()
        self.dense_keys: set[str] = set()
        self._direct: dict[str, str] = {}
        self._in_parts: dict[str, list[tuple[int, str]]] = {}
        self._resolve()

    def read(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        return {part.name: self._read_part(layer, expert, part).to(self.dtype) for part in self.layers[layer].parts}

    def reading_bytes(self) -> int:
        """Largest memory of `read` beside the result, in bytes: a part as it is stored and as it is converted, and what
        widening a quantised one takes."""
        largest = max(math.prod(part.shape) for layer in self.layers for part in layer.parts)
        quantized = any(isinstance(self.checkpoint.tensors[key], QuantizedTensor) for key in self.expert_keys)
        return largest * (_DEQUANTIZED if quantized else _CONVERTED)

    def direct_key(self, parameter: str) -> str | None:
        """The checkpoint key that becomes a dense parameter unchanged, None if several are converted into it."""
        return self._direct.get(parameter)

    def row_keys(self, parameter: str) -> tuple[str, ...]:
        """The checkpoint keys that hold a dense parameter's rows, one after another; none if they are converted
        otherwise."""
        direct = self.direct_key(parameter)
        if direct is not None:
            return (direct,)
        in_order = sorted(self._in_parts.get(parameter, ()), key=operator.itemgetter(0))
        return tuple(key for _, key in in_order)

    def sources(self, layer: int) -> dict[str, tuple[str, ...]]:
        """Part name → the keys that its rows are made of, one after the other (`formats.source`); without parts that
        are converted otherwise."""
        found = {part.name: self._sources_of(layer, part) for part in self.layers[layer].parts}
        return {part: sources for part, sources in found.items() if sources}

    def in_place(self, layer: int, expert: int) -> list[Segment] | None:
        form = expert_format(self.layers[layer], 16, self.dtype, "")
        offsets = {placed.part: placed.offset for placed in form.stored.fields}
        segments: list[Segment] = []
        for part in self.layers[layer].parts:
            found = self._part_in_place(layer, expert, part, offsets[part.name])
            if found is None:
                return None
            segments += found
        return segments

    def _resolve(self) -> None:
        targets = {
            self._target(i, e, part.name)
            for i, layer in enumerate(self.layers)
            for e in self._rows(i)
            for part in layer.parts
        }
        known = dict.fromkeys([*self._model.state_dict(), *targets], 1)
        # the converters' order: the position of a key among its pattern's keys is its expert
        for key in sorted(self.checkpoint.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, self._renamings, self._converters, self._model.base_model_prefix, known
            )
            if name not in known and key in known:  # as transformers' loader has it: some renamings take too much
                name = key
            if name in targets:
                self._sources.setdefault(name, {}).setdefault(pattern, []).append(key)
                self.expert_keys.add(key)
                continue
            if name in known:
                self.dense_keys.add(key)
            if pattern is None:
                self._direct[name] = key
            elif _joins_rows(converter := self._by_pattern[pattern]):
                self._in_parts.setdefault(name, []).append((converter.source_patterns.index(pattern), key))
        missing = sorted(targets - set(self._sources))
        if missing:
            raise ModelError(
                f"the checkpoint in {self.checkpoint.directory} lacks the weights of {len(missing)} expert "
                f"parameters, the first is {missing[0]}; download it again"
            )
        for index, layer in enumerate(self.layers):
            for part in layer.parts:
                self._check_part(index, part)

    def _check_part(self, index: int, part: Part) -> None:
        """ModelError for a part of fewer experts than the config asks for, or of another shape. A converted part is
        checked when it is read."""
        layer, tensors = self.layers[index], self.checkpoint.tensors
        if not self._stacked[index]:
            return
        target = self._target(index, 0, part.name)
        for pattern, keys in self._sources[target].items():
            shape = tensors[keys[0]].shape
            found = len(keys) if len(keys) > 1 else sum(shape[:1])
            if found < layer.experts:
                raise ModelError(
                    f"the checkpoint in {self.checkpoint.directory} has {target} of {found} experts, the config asks "
                    f"for {layer.experts}; config.json and weights do not belong together"
                )
            if pattern is None:
                _require_shape(f"{target} of an expert", shape[1:], part.shape)
        if None not in self._sources[target]:
            self._stacked_keys(index, 0, part)

    def _rows(self, layer: int) -> range:
        return range(1) if self._stacked[layer] else range(self.layers[layer].experts)

    def _target(self, layer: int, expert: int, name: str) -> str:
        prefix = self.layers[layer].name
        return f"{prefix}.{name}" if self._stacked[layer] else f"{prefix}.expert_{expert}.{name}"

    def _read_part(self, layer: int, expert: int, part: Part) -> torch.Tensor:
        target = self._target(layer, expert, part.name)
        sources = self._sources[target]
        if None in sources:
            key = sources[None][0]
            return self.checkpoint.read(key, expert)[0] if self._stacked[layer] else self.checkpoint.read(key)
        template = self._by_pattern[next(iter(sources))]
        converter = template.copy(
            list(template._original_source_patterns),
            list(template._original_target_patterns),
            operations=template.operations,
        )
        for pattern, keys in sources.items():
            merged = len(keys) == 1  # one tensor with all experts along its first dimension
            tensor = self.checkpoint.read(keys[0], expert) if merged else self.checkpoint.read(keys[expert])
            converter.add_tensor(target, keys[0 if merged else expert], pattern, tensor)
        model = OneExpert(self._model, part.shape)
        converted = converter.convert(target, model=model, config=self._model.config)
        value = next(iter(converted.values()))
        value = value[0] if isinstance(value, list) else value
        result: torch.Tensor = value[0]
        _require_shape(f"{target} of expert {expert}", tuple(result.shape), part.shape)
        return result

    def _sources_of(self, layer: int, part: Part) -> tuple[str, ...]:
        """The keys of a part's rows; empty if the part is more than rows of tensors."""
        experts = range(self.layers[layer].experts)
        sources = self._sources[self._target(layer, 0, part.name)]
        if None in sources:
            if self._stacked[layer]:
                return (sources[None][0],)
            keys = [self._sources[self._target(layer, expert, part.name)][None][0] for expert in experts]
            return _each_of([keys])
        converter = self._by_pattern[next(iter(sources))]
        if not _only_stacks_rows(converter, len(sources)):
            return ()
        return _each_of([sources[pattern] for pattern in converter.source_patterns if pattern in sources])

    def _part_in_place(self, layer: int, expert: int, part: Part, at: int) -> list[Segment] | None:
        target = self._target(layer, expert, part.name)
        sources = self._sources[target]
        if None in sources:
            key = sources[None][0]
            if not self._is_plain(key):
                return None
            _require_shape(
                f"{target} of expert {expert}",
                self.checkpoint.tensors[key].shape[int(self._stacked[layer]) :],
                part.shape,
            )
            return [self.checkpoint.segment(key, expert if self._stacked[layer] else None, at)]
        keys = self._stacked_keys(layer, expert, part)
        if keys is None or not all(map(self._is_plain, keys)):
            return None
        segments = []
        for key in keys:
            segments.append(self.checkpoint.segment(key, None, at))
            at += segments[-1].nbytes
        return segments

    def _stacked_keys(self, layer: int, expert: int, part: Part) -> list[str] | None:
        """The keys of the tensors that one expert's part is stacked of; None if it is converted otherwise."""
        target = self._target(layer, expert, part.name)
        sources = self._sources[target]
        converter = self._by_pattern[next(pattern for pattern in sources if pattern is not None)]
        if not _only_stacks_rows(converter, len(sources)):
            return None
        keys = [sources[pattern][expert] for pattern in converter.source_patterns]
        shapes = [self.checkpoint.tensors[key].shape for key in keys]
        _require_shape(
            f"{target} of expert {expert}", (sum(sum(shape[:1]) for shape in shapes), *shapes[0][1:]), part.shape
        )
        return keys

    def _is_plain(self, key: str) -> bool:
        """Whether a tensor lies in the compute dtype."""
        entry = self.checkpoint.tensors[key]
        return isinstance(entry, TensorEntry) and entry.dtype == self.dtype


class OneExpert:
    """Stand-in for the model in the conversion of one expert's part: its parameters are that expert's alone."""

    def __init__(self, model: Any, shape: tuple[int, ...]) -> None:
        self._model = model
        self._shape = (1, *shape)

    def get_parameter(self, _: str) -> torch.Tensor:
        """Of the part's shape, without values."""
        return torch.empty(self._shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _require_shape(what: str, found: tuple[int, ...], asked: tuple[int, ...]) -> None:
    if found != asked:
        raise ModelError(
            f"{what} has shape {found} in the checkpoint, the config asks for {asked}; config.json and weights do not "
            f"belong together"
        )


def _only_stacks_rows(converter: WeightConverter, patterns: int) -> bool:
    """True if the conversion of one expert is the concatenation of the rows of its tensors."""
    operations = converter.operations
    stacks = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    if patterns == 1:
        return stacks and len(operations) == 1
    return stacks and len(operations) == 2 and isinstance(operations[1], Concatenate) and operations[1].dim == 1


def _joins_rows(converter: WeightConverter) -> bool:
    """True if tensors are the rows of one, in the order of the patterns and of their names."""
    operations = converter.operations
    return len(operations) == 1 and isinstance(operations[0], Concatenate) and operations[0].dim == 0


def _each_of(sources: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The keys of each part as one key with `EACH` in the place of the expert's number; empty if no such key names
    them."""
    found = []
    for keys in sources:
        names = [key.split(".") for key in keys[:2]]
        differ = [at for at, (one, other) in enumerate(zip(names[0], names[-1], strict=False)) if one != other]
        if len(differ) != 1:
            return ()
        each = ".".join((*names[0][: differ[0]], EACH, *names[0][differ[0] + 1 :]))
        if [each.replace(EACH, str(expert)) for expert in range(len(keys))] != list(keys):
            return ()
        found.append(each)
    return tuple(found)


def _layer_of(name: str, shell: Any, top_k: int) -> MoeLayer:
    parts = tuple(
        Part(part, shape, bool(shell.is_transposed) and len(shape) == 2) for part, shape in shell.expert_shapes.items()
    )
    return MoeLayer(name, shell.num_experts, top_k, parts)


def _decoder_layer(name: str) -> int:
    """The index of the decoder layer that a module at path `name` belongs to."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)
