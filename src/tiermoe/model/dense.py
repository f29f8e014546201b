"""Packed dense layers: at 8 and 4 dense bits attention and other linear layers are packed in memory too.

Each linear layer is packed like a one-matrix expert, into one file of the store. Routers, embeddings and an output
layer tied to the embedding stay as they are: a changed router would choose other experts. At 4 bits the layers that
lose most keep 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from tiermoe.errors import LoadError
from tiermoe.kernels import linear_for, machine_layout
from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.model.blueprint import Blueprint
from tiermoe.model.linear import PackedLinear
from tiermoe.model.own_linears import own_bytes
from tiermoe.quant import row_blocks
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.quant.registry import encoding_for
from tiermoe.quant.scratch import scratch
from tiermoe.store.files import ExtentWriter, forget_cached, whole_or_nothing
from tiermoe.store.layout import PAGE, ExpertFormat, align, relative_error
from tiermoe.store.lock import Progress, Waiting, adding_to
from tiermoe.store.store import Store, dense_file_name, dense_key, machine_of, one_matrix
from tiermoe.tiers.disk import Reader
from tiermoe.tiers.mapped import MappedFiles, MappedReader
from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey

_KEPT_AT_6 = ("lm_head",)
"""Kinds of layers that 4 bits leave at 6, or at 8 where 6 bits do not take the shape and for a GPU, which has no kernel
for them. Of what packing all dense layers to 4 bits costs, the output layer is 60 %; at 6 bits it loses a hundredth
of that (`python -m benchmarks.dense_kinds`)."""


def packable(blueprint: Blueprint) -> dict[str, str]:
    """Linear layers that `--dense-bits` packs: module path → checkpoint key of its weight."""
    outline = blueprint.outline
    return {name: str(outline.tensors[f"{name}.weight"].key) for name in outline.packable}


def kind_of(name: str) -> str:
    """What a linear layer at path `name` is called in its layer: 'q_proj', 'lm_head'."""
    return name.rpartition(".")[2]


def bits_of(blueprint: Blueprint, name: str, bits: int, layout: str) -> int:
    """The precision of the linear layer at path `name` for the kernels of `layout` where `bits` are asked for."""
    if kind_of(name) not in _KEPT_AT_6:
        return bits
    out, in_ = blueprint.outline.tensors[f"{name}.weight"].shape
    return max(bits, encoding_for(6, out, in_, blueprint.dtype, layout).bits)


def recipe(blueprint: Blueprint, bits: int, layout: str) -> dict[str, int]:
    """The kinds of dense layers that have other bits where `bits` are asked for, and these."""
    found = {kind_of(name): bits_of(blueprint, name, bits, layout) for name in packable(blueprint)}
    return {kind: its for kind, its in found.items() if its != bits}


def recipe_key(blueprint: Blueprint, bits: int, layout: str) -> str:
    """The name in a store of the dense layers packed at `bits`."""
    return dense_key(bits, layout, [f"{kind}{more}" for kind, more in sorted(recipe(blueprint, bits, layout).items())])


def dense_format(blueprint: Blueprint, name: str, bits: int, layout: str) -> ExpertFormat:
    """How the linear layer at path `name` is packed for the kernels of `layout` where `bits` are asked for."""
    bits = bits_of(blueprint, name, bits, layout)
    out, in_ = blueprint.outline.tensors[f"{name}.weight"].shape
    layer = one_matrix(name, out, in_)
    encoding = encoding_for(bits, *layer.parts[0].out_in, blueprint.dtype, layout, "hqq")
    return ExpertFormat(layer, bits, blueprint.dtype, {"weight": encoding})


def dense_bytes(blueprint: Blueprint, bits: int, layout: str) -> int:
    """Bytes of everything but the experts, with the layers that `bits` packs."""
    dense = blueprint.dense_bytes()
    if bits == 16:
        plain, packed = own_bytes(blueprint, "cpu" if layout == machine_layout("cpu") else layout)
        return dense - plain + packed
    plain, packed = packed_bytes(blueprint, bits, layout)
    return dense - plain + packed


def packed_bytes(blueprint: Blueprint, bits: int, layout: str) -> tuple[int, int]:
    """(bytes at 16 bits, bytes packed) of the layers that are packed at `bits`."""
    plain = packed = 0
    for name in packable(blueprint):
        plain += math.prod(blueprint.outline.tensors[f"{name}.weight"].shape) * blueprint.dtype.itemsize
        packed += dense_format(blueprint, name, bits, layout).slot.nbytes
    return plain, packed


def pack_dense(
    store: Store,
    blueprint: Blueprint,
    bits: int,
    layout: str,
    progress: Progress | None = None,
    workers: int = 1,
    waiting: Waiting | None = None,
) -> None:
    """Adds the packed dense layers at `bits` to the store, some rows at a time, each of the `workers` its own
    (`packing_bytes` each); written whole or not at all. progress: called with (blocks of rows done, in all). waiting:
    called with the progress of another process that packs into the folder, which is waited for."""
    key = recipe_key(blueprint, bits, layout)
    path = store.root / dense_file_name(key)
    with adding_to(store, waiting, progress) as report:
        if key in store.dense:
            return
        try:
            with whole_or_nothing(path) as handle:
                table = _pack_layers(handle, blueprint, bits, layout, report, workers)
                forget_cached(handle)
        finally:
            scratch.clear()  # what one worker alone, in this thread, has used
        store.dense[key] = {"file": path.name, "machine": machine_of(bits, layout), "layers": table}
        store.save()


def _pack_layers(
    handle: IO[bytes],
    blueprint: Blueprint,
    bits: int,
    layout: str,
    progress: Progress,
    workers: int,
) -> dict[str, Any]:
    """The dense layers' entries in the store's table, once they are written."""
    formats = {name: dense_format(blueprint, name, bits, layout) for name in packable(blueprint)}
    extents = [ExtentWriter(handle, form.stored) for form in formats.values()]
    matrices = [
        _matrix(blueprint, source, form, extent.write)
        for source, form, extent in zip(packable(blueprint).values(), formats.values(), extents, strict=True)
    ]
    total = sum(len(matrix.blocks()) for matrix in matrices)

    def report(blocks: int) -> None:
        progress(blocks, total)

    table = {}
    found = zip(formats.items(), extents, row_blocks.encode(matrices, report, workers), strict=True)
    for (name, form), extent, squares in found:
        table[name] = {
            "encoding": form.encodings["weight"].name,
            "shape": list(form.layer.parts[0].out_in),
            "offset": extent.offset,
            "checksum": extent.checksum(),
            "error": round(relative_error(*squares), 6),
        }
    return table


def _matrix(blueprint: Blueprint, source: str, form: ExpertFormat, write: row_blocks.WriteField) -> row_blocks.Matrix:
    def read(first: int, last: int) -> torch.Tensor:
        return blueprint.checkpoint.read_rows(source, first, last).to(blueprint.dtype)

    encoding = form.encodings["weight"]
    return row_blocks.Matrix(encoding, QUANTIZERS["hqq"], form.layer.parts[0].out_in, form.dtype, read, write)


def packing_bytes(blueprint: Blueprint, bits: int, layout: str) -> int:
    """The most that each worker of `pack_dense` holds at a time, 0 where it packs nothing."""
    quantizer, held = QUANTIZERS["hqq"], 0
    for name, source in packable(blueprint).items():
        form = dense_format(blueprint, name, bits, layout)
        stored = blueprint.checkpoint.tensors[source].dtype
        converted = stored.itemsize if stored != blueprint.dtype else 0
        encoding, shape = form.encodings["weight"], form.layer.parts[0].out_in
        held = max(held, row_blocks.workspace_bytes(encoding, quantizer, *shape, blueprint.dtype, converted))
    return held


def attach_dense(
    model: Any, store: Store, key: str, reader: ExtentReader, device: str, files: MappedFiles | None
) -> int:
    """Replaces the packed linear layers of a loaded model by the ones that the store holds under `key`, on
    `device`; returns their bytes. files: the store's, where the layers are used as they are mapped; None: they are read
    by `reader`."""
    total = 0
    for name, layer in packed_linears(store, key, reader, device, files, lambda name: model.get_submodule(name).bias):
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)
        total += store.dense_format(key, name).slot.nbytes
    return total


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
    places = _mapped(store, key, files) if files else _in_one_piece(store, key)
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


def _mapped(store: Store, key: str, files: MappedFiles) -> Iterator[memoryview]:
    """Where each dense layer lies in a mapped file."""
    for name in store.dense[key]["layers"]:
        yield files.view(store.dense_extent(key, name)).numpy().data


def _in_one_piece(store: Store, key: str) -> Iterator[memoryview]:
    """Memory for each dense layer, all in one piece, so that huge pages hold all but its ends."""
    rooms = [align(store.dense_format(key, name).stored.nbytes, PAGE) for name in store.dense[key]["layers"]]
    whole, begin = aligned_memory(sum(rooms)), 0
    for room in rooms:
        yield whole[begin : begin + room]
        begin += room
