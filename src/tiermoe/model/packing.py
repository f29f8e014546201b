"""Dense linear layers that are not at 16 bits: packed into the store, or in the types that they were published in.

At 8 and 4 dense bits each linear layer is packed like a one-matrix expert, into one file of the store. Routers,
embeddings and an output layer tied to the embedding stay as they are: a changed router would choose other experts. At 4
bits the layers that lose most keep 6. At 16 bits the linear layers of a checkpoint that comes quantised keep their
types: nothing of them is decoded or quantised anew. They do so where nobody asks for dense bits, whatever bits the
experts are packed at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import IO, Any

import torch

from tiermoe.config import Settings
from tiermoe.errors import LoadError
from tiermoe.formats.encoding import Matrix, WriteField, encode_matrices, scratch, workspace_bytes
from tiermoe.formats.expert_format import PAGE, ExpertFormat, ExtentWriter, align, relative_error
from tiermoe.formats.in_place import OWN_BITS
from tiermoe.formats.quantizers import QUANTIZERS
from tiermoe.formats.registry import encoding_for, encoding_named
from tiermoe.formats.source import label_of
from tiermoe.formats.store import Store, adding_to, dense_file_name, dense_key, one_matrix, order_of
from tiermoe.formats.store_files import Progress, Waiting, forget_cached, whole_or_nothing
from tiermoe.kernels.attention import PackedMatrix
from tiermoe.kernels.linear import linear_for
from tiermoe.model.hf.blueprint import Blueprint
from tiermoe.model.parts import PackedLinear
from tiermoe.offload.disk import Reader
from tiermoe.offload.mapped import MappedFiles, MappedReader
from tiermoe.offload.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey

_KEPT_AT_6 = ("lm_head",)
"""Kinds of layers that 4 bits leave at 6, or at 8 where 6 bits do not take the shape. Of what packing all dense layers
to 4 bits costs, the output layer is 60 %; at 6 bits it loses a hundredth of that."""


def packable(blueprint: Blueprint) -> dict[str, tuple[str, ...]]:
    """Linear layers that `--dense-bits` packs: module path → checkpoint keys of its weight (`keys_of`)."""
    outline = blueprint.outline
    return {name: outline.keys_of(f"{name}.weight") for name in outline.packable}


def kind_of(name: str) -> str:
    """The name of the linear layer at path `name` in its layer: 'q_proj', 'lm_head'."""
    return name.rpartition(".")[2]


def bits_of(blueprint: Blueprint, name: str, bits: int) -> int:
    """The precision of the linear layer at path `name` if `bits` are asked for."""
    if kind_of(name) not in _KEPT_AT_6:
        return bits
    out, in_ = blueprint.outline.tensors[f"{name}.weight"].shape
    return max(bits, encoding_for(6, out, in_, blueprint.dtype).bits)


def recipe(blueprint: Blueprint, bits: int) -> dict[str, int]:
    """Kind → bits of the dense layers that have other bits where `bits` are asked for; an MTP head is packed as its
    model is."""
    blueprint = blueprint.trunk or blueprint
    found = {kind_of(name): bits_of(blueprint, name, bits) for name in packable(blueprint)}
    return {kind: own for kind, own in found.items() if own != bits}


def recipe_key(blueprint: Blueprint, bits: int) -> str:
    """The name in a store of the dense layers packed at `bits`."""
    return dense_key(bits, [f"{kind}{more}" for kind, more in sorted(recipe(blueprint, bits).items())])


def dense_format(blueprint: Blueprint, name: str, bits: int) -> ExpertFormat:
    """How the linear layer at path `name` is packed if `bits` are asked for."""
    bits = bits_of(blueprint, name, bits)
    out, in_ = blueprint.outline.tensors[f"{name}.weight"].shape
    layer = one_matrix(name, out, in_)
    encoding = encoding_for(bits, *layer.parts[0].out_in, blueprint.dtype, "hqq")
    return ExpertFormat(layer, bits, blueprint.dtype, {"weight": encoding})


def dense_bytes(blueprint: Blueprint, bits: int, device: str) -> int:
    """Bytes of everything but the experts on a device, with the layers that `bits` packs."""
    plain, packed = own_bytes(blueprint, device) if bits == 16 else packed_bytes(blueprint, bits)
    return blueprint.dense_bytes() - plain + packed


def packed_bytes(blueprint: Blueprint, bits: int) -> tuple[int, int]:
    """(bytes at 16 bits, or in float32, bytes packed) of the layers that are packed at `bits`."""
    plain = packed = 0
    for name in packable(blueprint):
        weight = blueprint.outline.tensors[f"{name}.weight"]
        plain += math.prod(weight.shape) * weight.dtype.itemsize
        packed += dense_format(blueprint, name, bits).slot.nbytes
    return plain, packed


def pack_dense(
    store: Store,
    blueprint: Blueprint,
    bits: int,
    progress: Progress | None = None,
    workers: int = 1,
    waiting: Waiting | None = None,
) -> None:
    """Adds the packed dense layers at `bits` to the store, some rows at a time, each of the `workers` its own
    (`packing_bytes` each); written whole or not at all. progress: called with (blocks of rows done, in all). waiting:
    called with the progress of another process that packs into the folder, which is waited for."""
    key = recipe_key(blueprint, bits)
    path = store.root / dense_file_name(key)
    with adding_to(store, waiting, progress) as report:
        if key in store.dense:
            return
        try:
            with whole_or_nothing(path) as handle:
                table = _pack_layers(handle, blueprint, bits, report, workers)
                forget_cached(handle)
        finally:
            scratch.clear()  # what one worker alone, in this thread, has used
        store.dense[key] = {"file": path.name, "machine": order_of(bits), "layers": table}
        store.save()


def _pack_layers(
    handle: IO[bytes],
    blueprint: Blueprint,
    bits: int,
    progress: Progress,
    workers: int,
) -> dict[str, Any]:
    """The dense layers' entries in the store's table, once they are written."""
    formats = {name: dense_format(blueprint, name, bits) for name in packable(blueprint)}
    extents = [ExtentWriter(handle, form.stored) for form in formats.values()]
    matrices = [
        _matrix(blueprint, sources, form, extent.write)
        for sources, form, extent in zip(packable(blueprint).values(), formats.values(), extents, strict=True)
    ]
    total = sum(len(matrix.blocks()) for matrix in matrices)

    def report(blocks: int) -> None:
        progress(blocks, total)

    table = {}
    found = zip(formats.items(), extents, encode_matrices(matrices, report, workers), strict=True)
    for (name, form), extent, squares in found:
        table[name] = {
            "encoding": form.encodings["weight"].name,
            "shape": list(form.layer.parts[0].out_in),
            "offset": extent.offset,
            "checksum": extent.checksum(),
            "error": round(relative_error(*squares), 6),
        }
    return table


def _matrix(blueprint: Blueprint, sources: Sequence[str], form: ExpertFormat, write: WriteField) -> Matrix:
    checkpoint = blueprint.checkpoint
    ends = list(accumulate(checkpoint.tensors[source].shape[0] for source in sources))

    def read(first: int, last: int) -> torch.Tensor:
        parts = [
            checkpoint.read_rows(source, max(first - begin, 0), min(last, end) - begin).to(blueprint.dtype)
            for source, begin, end in zip(sources, [0, *ends], ends, strict=False)
            if begin < last and first < end
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    encoding = form.encodings["weight"]
    return Matrix(encoding, QUANTIZERS["hqq"], form.layer.parts[0].out_in, form.dtype, read, write)


def packing_bytes(blueprint: Blueprint, bits: int) -> int:
    """Largest memory of each worker of `pack_dense`, in bytes; 0 if it packs nothing."""
    quantizer, most = QUANTIZERS["hqq"], 0
    for name, sources in packable(blueprint).items():
        form = dense_format(blueprint, name, bits)
        stored = blueprint.checkpoint.tensors[sources[0]].dtype
        converted = stored.itemsize if stored != blueprint.dtype else 0
        encoding, shape = form.encodings["weight"], form.layer.parts[0].out_in
        most = max(most, workspace_bytes(encoding, quantizer, *shape, blueprint.dtype, converted))
    return most


def attach_dense(
    model: Any, store: Store, key: str, reader: ExtentReader, device: str, files: MappedFiles | None
) -> None:
    """Replaces linear layers of a loaded transformers model by its `packed_linears`."""
    _attach(model, packed_linears(store, key, reader, device, files, lambda path: model.get_submodule(path).bias))


def attach_own(model: Any, blueprint: Blueprint, device: str) -> None:
    """Replaces linear layers of a loaded transformers model by its `own_linears`."""
    _attach(model, read_own(blueprint, device, lambda path: model.get_submodule(path).bias))


def _attach(model: Any, layers: Iterable[tuple[str, PackedLinear]]) -> None:
    for path, layer in layers:
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def packed_linears(
    store: Store,
    key: str,
    reader: ExtentReader,
    device: str,
    files: MappedFiles | None,
    bias_of: Callable[[str], torch.Tensor | None],
) -> Iterator[tuple[str, PackedLinear]]:
    """The packed linear layers that the store holds under `key`, each with its path, on `device` and given the bias
    that `bias_of` has for its path. files: the store's, where the layers are used as they are mapped; None: they are
    read by `reader`."""
    layers = store.dense[key]["layers"]
    places = _mapped_places(store, key, files) if files else _memory_in_one_piece(store, key)
    source: Reader = MappedReader() if files else reader
    for index, (name, packed) in enumerate(layers.items()):
        form = store.dense_format(key, name)
        try:
            memory = next(places)
            source.read(store.dense_extent(key, name), memory, ExpertKey(index, 0, form.bits))
        except LoadError as error:
            raise LoadError(
                f"dense layer {name} ({form.bits} bits) in {store.root} is damaged or cannot be read; "
                f"'tiermoe pack MODEL --dense-bits {key.partition('-')[0]} --force' packs anew"
            ) from error
        stored = torch.frombuffer(memory, dtype=torch.uint8)[: form.stored.nbytes]
        fields = form.slot.views(stored.to(device))["weight"]
        kernel = linear_for(packed["encoding"], torch.device(device).type, store.dtype)
        out, in_ = packed["shape"]
        matrix = PackedMatrix(form.encodings["weight"], fields, out, in_, bias_of(name))
        yield name, PackedLinear(kernel, matrix, store.dtype)


def _mapped_places(store: Store, key: str, files: MappedFiles) -> Iterator[memoryview]:
    """The memory of each dense layer in a mapped file."""
    for name in store.dense[key]["layers"]:
        yield files.view(store.dense_extent(key, name)).numpy().data


def _memory_in_one_piece(store: Store, key: str) -> Iterator[memoryview]:
    """Memory for each dense layer, all in one piece, so that huge pages hold all but its ends."""
    rooms = [align(store.dense_format(key, name).stored.nbytes, PAGE) for name in store.dense[key]["layers"]]
    whole, begin = aligned_memory(sum(rooms)), 0
    for room in rooms:
        yield whole[begin : begin + room]
        begin += room


# layers in the types that they were published in


def own_linears(blueprint: Blueprint, device: str) -> dict[str, str]:
    """Paths of the linear layers that stay in the checkpoint's type on a device → the key of their weight, which an
    output layer may share with the embedding. Empty for a checkpoint that does not come quantised, and for a GPU, which
    has no kernels for these types."""
    if device != "cpu":
        return {}
    outline = blueprint.outline
    paths = [*outline.packable, *(path.removesuffix(".weight") for path in outline.tied)]
    weights = {path: outline.tensor(f"{path}.weight").key for path in paths}
    return {
        path: key
        for path, key in weights.items()
        if key is not None and blueprint.checkpoint.own_encoding(key) is not None
    }


def with_own_dense(settings: Settings, blueprint: Blueprint, device: str) -> Settings:
    """The settings, with 16 dense bits where they name none and the checkpoint has linear layers that stay in its type
    on the device."""
    if settings.dense_bits is None and own_linears(blueprint, device):
        return replace(settings, dense_bits=OWN_BITS)
    return settings


def shared_table(blueprint: Blueprint, device: str) -> str | None:
    """The key of an embedding that the output layer shares in the checkpoint's type: its rows are read from the file,
    and nothing else needs the tensor. None if there is no such embedding."""
    tied = {path.removesuffix(".weight") for path in blueprint.outline.tied}
    return next((key for path, key in own_linears(blueprint, device).items() if path in tied), None)


def types_of(blueprint: Blueprint, keys: Iterable[str]) -> str:
    """The checkpoint's types of the layers that keep them, for messages: 'Q4_K, Q6_K'."""
    names = {blueprint.checkpoint.own_encoding(key) for key in keys}
    return ", ".join(sorted({label_of(name) for name in names if name is not None}))


def own_bytes(blueprint: Blueprint, device: str) -> tuple[int, int]:
    """(bytes at 16 bits, bytes as they lie) of these layers."""
    plain = packed = 0
    for key in own_linears(blueprint, device).values():
        plain += math.prod(blueprint.checkpoint.tensors[key].shape) * blueprint.dtype.itemsize
        packed += _own_format(blueprint, key).slot.nbytes
    return plain, packed


def read_own(
    blueprint: Blueprint, device: str, bias_of: Callable[[str], torch.Tensor | None]
) -> Iterator[tuple[str, PackedLinear]]:
    """`own_linears`, each with its path, read one after the other and given the bias that `bias_of` has for its path.
    ModelError if one cannot be read."""
    for path, key in own_linears(blueprint, device).items():
        form = _own_format(blueprint, key)
        encoding, (out, in_) = form.encodings["weight"], form.layer.parts[0].out_in
        matrix = PackedMatrix(encoding, blueprint.checkpoint.fields(key), out, in_, bias_of(path))
        kernel = linear_for(encoding.name, "cpu", blueprint.dtype)
        yield path, PackedLinear(kernel, matrix, blueprint.dtype, blueprint.checkpoint.columns(key))


def _own_format(blueprint: Blueprint, key: str) -> ExpertFormat:
    """How a layer in the checkpoint's type lies in memory."""
    encoding = blueprint.checkpoint.own_encoding(key)
    assert encoding is not None
    out, in_ = blueprint.checkpoint.tensors[key].shape
    return ExpertFormat(one_matrix(key, out, in_), OWN_BITS, blueprint.dtype, {"weight": encoding_named(encoding)})
