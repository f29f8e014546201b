"""Skeleton: a model on the meta device, built by transformers' modelling code, and the outline that it gives a
checkpoint.

Importing and running that code takes seconds. A later start of a family with a decoder of our own reads the outline
instead (`formats/outline.py`)."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Container, Mapping
from typing import Any

import torch

from tiermoe.errors import ModelError, TiermoeError, reason
from tiermoe.formats.gguf_checkpoint import GgufCheckpoint
from tiermoe.formats.outline import DenseTensor, Outline
from tiermoe.formats.safetensors import Checkpoint, QuantizedTensor
from tiermoe.formats.source import TensorSource
from tiermoe.model.families.family import Family
from tiermoe.model.gguf.checkpoint import GgufExperts
from tiermoe.model.hf.configs import text_config
from tiermoe.model.hf.conversion import CheckpointExperts
from tiermoe.model.hf.experts import (
    IMPLEMENTATION,
    expert_gate,
    experts_left_out,
    register,
    routers_of,
    shells_of,
)

_SMALLEST = 4096  # elements of a linear layer; packing a smaller one saves nothing worth a kernel call
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


class Skeleton:
    """The `model` of a class and a config with shells for experts, and its `experts` in the checkpoint. ModelError
    if the checkpoint is not of such a model, or the model has no experts."""

    def __init__(
        self,
        family: Family,
        cls: Any,
        config: Any,
        dtype: torch.dtype,
        checkpoint: Checkpoint | GgufCheckpoint,
        name: str,
    ) -> None:
        self._family, self._dtype = family, dtype
        text = text_config(config)
        self._part = text is not config
        register()
        with experts_left_out(family, text), torch.device("meta"):
            try:
                self.model = cls._from_config(config, dtype=dtype, experts_implementation=IMPLEMENTATION)
            except (MemoryError, TiermoeError):
                raise
            except Exception as error:  # whatever its code does with values that no model has
                raise ModelError(
                    f"transformers' {cls.__name__} cannot be built as {checkpoint.directory} says "
                    f"({reason(error)}); download it again"
                ) from error
        self._ties: dict[str, str] = getattr(self.model, "all_tied_weights_keys", None) or {}  # path → its source
        self.experts: CheckpointExperts | GgufExperts
        if isinstance(checkpoint, GgufCheckpoint):
            self.experts = GgufExperts(self.model, shells_of(self.model), checkpoint, dtype, top_k(text, 0))
        else:
            self.experts = CheckpointExperts(self.model, checkpoint, dtype, functools.partial(top_k, text))
        if not self.experts.layers:
            raise ModelError(f"{name} ({config.model_type}) has no expert layers: it is not a Mixture-of-Experts model")

    def outline(self) -> Outline:
        """The outline of the checkpoint, by which a later start needs no modelling code."""
        checkpoint = self.experts.checkpoint
        dense_keys = [key for key in checkpoint.tensors if key not in self.experts.expert_keys]
        if isinstance(self.experts, CheckpointExperts):  # what other parts read, or other layers, is never loaded
            known = self.experts.dense_keys
            part = self._part or bool(self._family.encoder_class)
            dense_keys = [key for key in dense_keys if key in known or not (part or self._is_ignored(checkpoint, key))]
        tensors = self._tensors(checkpoint)
        tied = {path: source for path, source in self._ties.items() if path in tensors and source in tensors}
        tables = self._tables()
        joined = self._joined(tensors, {*tied, *tables})
        as_they_are = _taken_as_they_are(tensors, tied, {*tables, *joined})
        gate = self._gate()
        return Outline(
            layers=self.experts.layers,
            sources=tuple(self.experts.sources(layer) for layer in range(len(self.experts.layers))),
            tensors=tensors,
            tied=tied,
            packable=tuple(self._packable(set(dense_keys), tensors, joined)),
            table=self._table(tensors),
            tables=tables,
            joined=joined,
            dense_bytes=self._dense_bytes(tensors),
            dense_keys=tuple(dense_keys),
            gate=gate,
            whole=gate is not None and (self._family.scales_embedding or self._plain_embedding()) and as_they_are,
        )

    def _is_ignored(self, checkpoint: Checkpoint | GgufCheckpoint, key: str) -> bool:
        """Whether nobody asks for a tensor that the model does not have, like an MTP head's."""
        ignored = self.model._keys_to_ignore_on_load_unexpected or ()
        quantized = isinstance(checkpoint.tensors[key], QuantizedTensor)
        return quantized or any(re.search(pattern, key) for pattern in ignored)

    def _tensors(self, checkpoint: TensorSource) -> dict[str, DenseTensor]:
        """Path → tensor of the state dict. A floating tensor is read in the dtype that transformers' loader leaves it
        in: DeepSeek-V3 chooses by a bias in float32. A router's matrix that the checkpoint has in the model's dtype
        stays in it where a decoder of our own reads it: it computes in float32, and kernels take no wider matrix."""
        wide, routers = self._kept_wide(), self._router_matrices()
        found = {}
        for path, tensor in self.model.state_dict().items():
            key = self.experts.direct_key(path)
            stored = checkpoint.tensors.get(key) if key is not None else None
            floating = tensor.is_floating_point()
            kept = torch.float32 if floating and wide is not None and wide.search(path) else tensor.dtype
            if stored is None:
                found[path] = DenseTensor(None, tuple(tensor.shape), kept, kept)
                continue
            if path in routers and (stored.dtype == self._dtype or isinstance(checkpoint, GgufCheckpoint)):
                kept = self._dtype
            read_as = kept if floating and stored.dtype.is_floating_point else stored.dtype
            found[path] = DenseTensor(key, tuple(tensor.shape), read_as, kept)
        return found

    def _kept_wide(self) -> re.Pattern[str] | None:
        """The pattern of the parameters that transformers' loader keeps in float32; None if there are none."""
        names = set(self.model._keep_in_fp32_modules_strict or ()) if self._dtype.itemsize == 2 else set()
        if self._dtype == torch.float16:
            names |= set(self.model._keep_in_fp32_modules or ())
        return re.compile("|".join(name.replace("*", ".*") for name in sorted(names))) if names else None

    def _router_matrices(self) -> set[str]:
        """Paths of the routers' matrices that kernels take; none if transformers' code runs the family."""
        routers = [router for _, router in routers_of(self.model)] if self._family.decodes else []
        paths = {f"{path}.weight" for path, module in self.model.named_modules() if module in routers}
        return {path for path in paths if not path.endswith(self._family.wide)}

    def _packable(self, dense_keys: set[str], tensors: dict[str, DenseTensor], joined: Container[str]) -> list[str]:
        modules = list(self.model.named_modules())
        routers = {name for name, _ in routers_of(self.model) if name}  # what they are called in their blocks
        inside = [*shells_of(self.model), *(name for name, _ in modules if name.endswith(tuple(routers)))]
        found = []
        for name, module in modules:
            if type(module) is not torch.nn.Linear or module.weight.numel() < _SMALLEST:
                continue
            weight = f"{name}.weight"
            routed = any(name == prefix or name.startswith(f"{prefix}.") for prefix in inside)
            taken = weight in joined or tensors[weight].key in dense_keys
            if not taken or weight in self._ties or routed:
                continue
            parent, _, child = name.rpartition(".")
            if not takes_weight(self.model.get_submodule(parent), child):
                found.append(name)
        return found

    def _table(self, tensors: dict[str, DenseTensor]) -> str | None:
        """The input embedding, if its rows can be read one by one: a plain table that nothing else uses and that the
        checkpoint holds as it is."""
        if not self._plain_embedding() or self._family.encodes:
            return None
        module = self.model.get_input_embeddings()
        path = next(name for name, each in self.model.named_modules() if each is module) + ".weight"
        if self._is_shared(path):
            return None
        return path if tensors[path].key is not None else None

    def _tables(self) -> dict[str, tuple[str, ...]]:
        """Other embeddings whose rows can be read one by one: `Outline.tables`. ModelError if rows are missing."""
        if self._family.encodes:
            return {}
        used = self.model.get_input_embeddings()
        found = {}
        for name, module in self.model.named_modules():
            if module is used or not is_table(module):
                continue
            path, (parent, _, child) = f"{name}.weight", name.rpartition(".")
            keys = self.experts.row_keys(path)
            if keys and not self._is_shared(path) and not takes_weight(self.model.get_submodule(parent), child):
                found[path] = keys
                self._check_rows(path, keys, module.weight.shape)
        return found

    def _is_shared(self, path: str) -> bool:
        return path in self._ties or path in self._ties.values()

    def _joined(self, tensors: Mapping[str, DenseTensor], known: Container[str]) -> dict[str, tuple[str, ...]]:
        """`Outline.joined`, of tensors that are not known otherwise and whose rows fit."""
        found = {}
        for path, tensor in tensors.items():
            keys = self.experts.row_keys(path) if tensor.key is None and path not in known else ()
            shapes = [self.experts.checkpoint.tensors[key].shape for key in keys]
            if keys and (sum(shape[0] for shape in shapes), *shapes[0][1:]) == tensor.shape:
                found[path] = keys
        return found

    def _check_rows(self, path: str, keys: tuple[str, ...], shape: torch.Size) -> None:
        """ModelError if the checkpoint's tensors do not have the rows of a table of this shape."""
        parts = [self.experts.checkpoint.tensors[key].shape for key in keys]
        rows, columns = sum(part[0] for part in parts), {part[1] for part in parts}
        if rows != shape[0] or columns != {shape[1]}:
            widths = " or ".join(map(str, sorted(columns)))
            raise ModelError(
                f"{path} has {rows:,} rows of {widths} columns in {len(keys)} tensors from {keys[0]} on, the config "
                f"asks for {shape[0]:,} rows of {shape[1]}; download the model again"
            )

    def _plain_embedding(self) -> bool:
        module = self.model.get_input_embeddings()
        return type(module) is torch.nn.Embedding and module.max_norm is None

    def _dense_bytes(self, tensors: Mapping[str, DenseTensor]) -> int:
        """Bytes of the parameters and buffers that stay resident at 16 bits, or in float32 (tied ones once)."""
        seen: dict[int, int] = {}
        for path, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            kept = tensors[path].dtype if path in tensors else tensor.dtype
            seen[id(tensor)] = tensor.numel() * kept.itemsize
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        shared = sum(
            math.prod(parameters[path].shape) * parameters[path].element_size()
            for path, source in self._ties.items()
            if path in parameters and source in parameters and parameters[path] is not parameters[source]
        )
        return int(sum(seen.values()) - shared)

    def _gate(self) -> tuple[Any, ...] | None:
        """The name of what all experts have between their matrices."""
        gates = {expert_gate(module) for module in shells_of(self.model).values()}
        if len(gates) != 1:
            return None
        gate = gates.pop()
        return (gate.in_halves if isinstance(self.experts, GgufExperts) else gate).stored


def _taken_as_they_are(tensors: dict[str, DenseTensor], tied: dict[str, str], joined: Container[str]) -> bool:
    """Whether every tensor is one of the checkpoint's, or of several that have its rows (`joined`). One that is tied
    must not be there beside its source: which of both counts is transformers' to say."""
    known = all(path in joined or (tensor.key is None) == (path in tied) for path, tensor in tensors.items())
    return known and all(source not in tied for source in tied.values())


def top_k(config: Any, layer: int) -> int:
    """Experts that a token uses in decoder layer `layer`; 1 if the config has no entry for it (Switch). ModelError
    if the entry names no number."""
    named = ""
    for name in _TOP_K:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple):
            value = value[layer] if layer < len(value) else None
        if isinstance(value, int):
            return value
        named = name if hasattr(config, name) else named
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
    """A class's code; None if there is no file to read it from. Python parses the whole file for each class."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return None
