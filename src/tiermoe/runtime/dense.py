"""Packed dense layers: at 8 and 4 dense bits attention and other linear layers are packed in memory too.

Each linear layer is packed like a one-matrix expert, into one file of the store. Routers, embeddings and an output
layer tied to the embedding stay as they are: a changed router would choose other experts. At 4 bits the layers that
lose most keep 8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import xxhash

from tiermoe.errors import LoadError
from tiermoe.kernels import linear_for
from tiermoe.kernels.native.attention import PackedMatrix
from tiermoe.model.linear import PackedLinear
from tiermoe.quant.encodings import encoding_for
from tiermoe.quant.quantizers import QUANTIZERS
from tiermoe.runtime.blueprint import Blueprint
from tiermoe.runtime.shells import is_shell
from tiermoe.store.atomic import whole_or_nothing
from tiermoe.store.layout import PAGE, ExpertFormat, align
from tiermoe.store.lock import adding_to
from tiermoe.store.store import Store, dense_file_name, dense_key, machine_of, one_matrix
from tiermoe.tiers.reader import ExtentReader, aligned_memory
from tiermoe.types import ExpertKey

_SMALLEST = 4096  # elements; smaller matrices save nothing worth a kernel call
_KEPT_AT_8 = ("lm_head",)
"""Kinds of layers that 4 bits leave at 8. Of what packing all dense layers to 4 bits costs, the output layer is 60 %
(`python -m benchmarks.dense_kinds`)."""


def packable(blueprint: Blueprint) -> dict[str, str]:
    """Linear layers that `--dense-bits` packs: module path → checkpoint key of its weight."""
    model = blueprint.skeleton
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    inside = [
        name for name, module in model.named_modules() if is_shell(module) or name.endswith(blueprint.family.router)
    ]
    keys = set(blueprint.dense_keys)
    found = {}
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or module.weight.numel() < _SMALLEST:
            continue
        key = blueprint.experts.direct_key(f"{name}.weight")
        routed = any(name == prefix or name.startswith(f"{prefix}.") for prefix in inside)
        if key in keys and f"{name}.weight" not in tied and not routed:
            found[name] = key
    return found


def kind_of(name: str) -> str:
    """What a linear layer at path `name` is called in its layer: 'q_proj', 'lm_head'."""
    return name.rpartition(".")[2]


def bits_of(name: str, bits: int) -> int:
    """The precision of the linear layer at path `name` where `bits` are asked for."""
    return max(bits, 8) if kind_of(name) in _KEPT_AT_8 else bits


def recipe(blueprint: Blueprint, bits: int) -> dict[str, int]:
    """The kinds of dense layers that have other bits where `bits` are asked for, and these."""
    return {kind_of(name): bits_of(name, bits) for name in packable(blueprint) if bits_of(name, bits) != bits}


def recipe_key(blueprint: Blueprint, bits: int, layout: str) -> str:
    """The name in a store of the dense layers packed at `bits`."""
    return dense_key(bits, layout, [f"{kind}{more}" for kind, more in sorted(recipe(blueprint, bits).items())])


def dense_format(blueprint: Blueprint, name: str, bits: int, layout: str) -> ExpertFormat:
    """How the linear layer at path `name` is packed for the kernels of `layout` where `bits` are asked for."""
    bits = bits_of(name, bits)
    module = blueprint.skeleton.get_submodule(name)
    layer = one_matrix(name, module.out_features, module.in_features)
    encoding = encoding_for(bits, *layer.parts[0].out_in, blueprint.dtype, layout, "hqq")
    return ExpertFormat(layer, bits, blueprint.dtype, {"weight": encoding})


def packed_bytes(blueprint: Blueprint, bits: int, layout: str) -> tuple[int, int]:
    """(bytes at 16 bits, bytes packed) of the layers that are packed at `bits`."""
    plain = packed = 0
    for name in packable(blueprint):
        plain += blueprint.skeleton.get_submodule(name).weight.numel() * blueprint.dtype.itemsize
        packed += dense_format(blueprint, name, bits, layout).slot.nbytes
    return plain, packed


def pack_dense(
    store: Store,
    blueprint: Blueprint,
    bits: int,
    layout: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Adds the packed dense layers at `bits` to the store (seconds; written whole or not at all)."""
    key = recipe_key(blueprint, bits, layout)
    path = store.root / dense_file_name(key)
    table: dict[str, Any] = {}
    names = packable(blueprint)
    with adding_to(store):
        if key in store.dense:
            return
        with whole_or_nothing(path) as handle:
            for count, (name, source) in enumerate(names.items()):
                form = dense_format(blueprint, name, bits, layout)
                buffer = torch.empty(form.stored.nbytes, dtype=torch.uint8)
                weight = blueprint.checkpoint.read(source).to(blueprint.dtype)
                error = form.encode({"weight": weight}, QUANTIZERS["hqq"], buffer)
                content = buffer.numpy().data
                table[name] = {
                    "encoding": form.encodings["weight"].name,
                    "shape": [form.layer.parts[0].shape[0], form.layer.parts[0].shape[1]],
                    "offset": handle.tell(),
                    "checksum": xxhash.xxh3_64_hexdigest(content),
                    "error": round(error, 6),
                }
                handle.write(content)
                if progress is not None:
                    progress(count + 1, len(names))
        store.dense[key] = {"file": path.name, "machine": machine_of(bits, layout), "layers": table}
        store.save()


def attach_dense(model: Any, store: Store, key: str, reader: ExtentReader, device: str) -> int:
    """Replaces the packed linear layers of a loaded model by the ones that the store holds under `key`, on
    `device`; returns their bytes."""
    total = 0
    layers = store.dense[key]["layers"]
    room = {name: align(store.dense_format(key, name).stored.nbytes, PAGE) for name in layers}
    whole, begin = aligned_memory(sum(room.values())), 0  # one piece, so that huge pages hold all but its ends
    for index, (name, packed) in enumerate(layers.items()):
        form = store.dense_format(key, name)
        memory = whole[begin : begin + room[name]]
        begin += room[name]
        try:
            reader.read(store.dense_extent(key, name), memory, ExpertKey(index, 0, form.bits))
        except LoadError as error:
            raise LoadError(
                f"dense layer {name} ({form.bits} bits) in {store.root} is damaged or cannot be read; "
                f"'tiermoe pack MODEL --dense-bits {form.bits} --force' packs anew"
            ) from error
        stored = torch.frombuffer(memory, dtype=torch.uint8)[: form.stored.nbytes]
        fields = form.slot.views(stored.to(device))["weight"]
        parent, _, attribute = name.rpartition(".")
        owner = model.get_submodule(parent)
        kernel = linear_for(packed["encoding"], torch.device(device).type, store.dtype)
        bias, (out, in_) = getattr(owner, attribute).bias, packed["shape"]
        matrix = PackedMatrix(form.encodings["weight"], fields, out, in_, bias)
        setattr(owner, attribute, PackedLinear(kernel, matrix, store.dtype))
        total += form.slot.nbytes
    return total
