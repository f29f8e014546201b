"""Facts of a GGUF file's tensors: layers, experts and sizes, by their names and shapes."""

from __future__ import annotations

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_file import GgufFile, GgufTensor

AGAIN = "download it again"
"""What to do about a file that contradicts itself."""
NGRAM_TABLE = "per_layer_token_embd.weight"
"""The table of n-grams (Qwen3.8): tens of GB, of which a token needs some rows."""


def blocks(file: GgufFile) -> int:
    """Layers, without those that predict several tokens. ModelError where there are more than tensors, or none."""
    layers = file.count("block_count") - file.count("nextn_predict_layers", 0)
    if not 0 < layers <= len(file.tensors):
        raise ModelError(f"{file.path} says that it has {layers:,} layers, of {len(file.tensors):,} tensors; {AGAIN}")
    return layers


def linear_layers(file: GgufFile) -> list[bool]:
    """Which layers have linear attention."""
    return [f"blk.{layer}.ssm_a" in file.tensors for layer in range(blocks(file))]


def experts(file: GgufFile) -> int:
    """Experts of a layer."""
    return file.count("expert_count")


def dense_layers(file: GgufFile) -> list[int]:
    """Layers without a router."""
    return [layer for layer in range(blocks(file)) if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors]


def read_whole(file: GgufFile) -> list[GgufTensor]:
    """The tensors that loading reads whole, in the order of the file: all but the experts, and the tables of which a
    token needs rows: of n-grams, and the input embedding unless it is the output layer too."""
    rows = (NGRAM_TABLE, "token_embd.weight" if "output.weight" in file.tensors else "")
    found = [tensor for name, tensor in file.tensors.items() if "_exps." not in name and name not in rows]
    return sorted(found, key=lambda tensor: (file.shards.index(tensor.file), tensor.offset))


def leading_dense(file: GgufFile) -> int:
    """Dense layers before those with experts. ModelError where one comes after."""
    layers = dense_layers(file)
    if layers != list(range(len(layers))):
        raise ModelError(f"{file.path} has dense layers among those with experts: {', '.join(map(str, layers))}")
    return len(layers)


def inner(file: GgufFile) -> int:
    """Columns between an expert's matrices."""
    return in_first_block(file, "ffn_down_exps.weight", 3)[2]


def dense_inner(file: GgufFile) -> int:
    """Columns between a dense layer's matrices; of no matter where there are none."""
    dense = dense_layers(file)
    return shape(file, f"blk.{dense[0]}.ffn_down.weight", 2)[1] if dense else inner(file)


def in_first_block(file: GgufFile, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor in the first layer with experts."""
    dense = set(dense_layers(file))
    layer = next((layer for layer in range(blocks(file)) if layer not in dense), 0)
    return shape(file, f"blk.{layer}.{name}", dimensions)


def shape(file: GgufFile, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor of so many dimensions. ModelError where there is none."""
    if name not in file.tensors:
        raise ModelError(f"{file.path} has no tensor {name}; convert the model again with a current llama.cpp")
    found = file.tensors[name].shape
    if len(found) != dimensions:
        raise ModelError(f"{file.path} has {name} of shape {found}, not of {dimensions} dimensions; {AGAIN}")
    return found
