"""A GGUF model: the headers of one file, or of its shards, and what they say of the model in llama.cpp's names of
entries and tensors. `tiermoe.model.gguf` maps these tensors to a model's parameters."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tiermoe.errors import ModelError
from tiermoe.formats.gguf_header import GgufTensor, Header, Strings, read_header
from tiermoe.formats.source import require_shards

SUFFIX = ".gguf"
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
AGAIN = "download it again"
"""What to do about a file that contradicts itself."""
CONVERT = "convert the model again with a current llama.cpp"
_NEEDED: Any = object()


@dataclass(frozen=True)
class GgufFile:
    """The headers of a model's files. A value that an entry must have raises ModelError where it is missing or
    wrong."""

    path: Path  # the file that was named
    shards: tuple[Path, ...]  # all files, in their order
    entries: dict[str, Any]  # of the first shard's header
    tensors: dict[str, GgufTensor]  # of all shards, by llama.cpp's names
    digests: tuple[bytes, ...]  # of the headers, a shard each

    @cached_property
    def longest(self) -> int:
        """The longest dimension of a tensor."""
        return max((size for tensor in self.tensors.values() for size in tensor.shape), default=0)

    @property
    def architecture(self) -> str:
        """`general.architecture`. ModelError where there is none."""
        return str(self.require("general.architecture"))

    def refusal(self, said: str, then: str = AGAIN) -> ModelError:
        """The error of a file that is damaged, or of no model of its family: what the file has or says, and what to do
        about it."""
        return ModelError(f"{self.path} {said}; {then}")

    def require(self, key: str) -> Any:
        """The value of an entry. ModelError where the file has no such entry."""
        if key not in self.entries:
            raise self.refusal(f"says nothing of {key}", CONVERT)
        return self.entries[key]

    def strings(self, key: str) -> list[str]:
        """The strings of an entry, read from the file; none where it has no such entry."""
        found = self.entries.get(key)
        return found.read() if isinstance(found, Strings) else []

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of an entry of the architecture: 'expert_count' for 'qwen3moe.expert_count'."""
        return self.entries.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int = _NEEDED, least: int = 0) -> int:
        """An entry of the architecture: a whole number of at least `least`. ModelError where it is no such number, or
        is missing and has no default."""
        value = self._entry(key, default)
        if not isinstance(value, int) or value < least:
            raise self._wrong(key, value, f"a whole number of at least {least}")
        return value

    def decimal(self, key: str, default: Any = _NEEDED) -> Any:
        """An entry of the architecture, `rounded`, or the default. ModelError where it is no finite number from 0 on,
        or is missing and has no default."""
        value = self._entry(key, default)
        if value is default:
            return value
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self._wrong(key, value, "a finite number of at least 0")
        return rounded(value)

    def uniform_count(self, key: str, default: int = _NEEDED) -> int:
        """`count`, at least 1, of an entry that newer files may have for each layer. ModelError where layers differ."""
        value = self.of_model(key, default)
        if not isinstance(value, list):
            return self.count(key, default, least=1)
        if not value or any(each != value[0] for each in value):
            raise ModelError(
                f"{self.path}: {key} differs between layers, which tiermoe does not compute from GGUF files"
            )
        if not isinstance(value[0], int) or value[0] < 1:
            raise self._wrong(key, value[0], "a whole number of at least 1")
        return value[0]

    def largest(self, key: str) -> int:
        """The largest value, at least 1, of an entry that files have for each layer, or for all."""
        value = self.of_model(key)
        if not isinstance(value, list):
            return self.count(key, least=1)
        found = max((each for each in value if isinstance(each, int)), default=0)
        if found < 1:
            raise self._wrong(key, value, "a whole number of at least 1 for some layer")
        return found

    def of_layers(self, key: str, what: str, default: Any = None) -> list[Any]:
        """An entry of the architecture that has a value for each layer. ModelError where it has fewer: the file does
        not say `what`."""
        found = self.of_model(key, default)
        if not isinstance(found, list) or len(found) < self.layers:
            raise self.refusal(f"does not say {what}")
        return found[: self.layers]

    def token_id(self, name: str) -> int | None:
        """The id of a token that the file names ('bos', 'eos', 'padding', …); None where it names none of its own."""
        token = self.entries.get(f"tokenizer.ggml.{name}_token_id")
        tokens = self.entries.get("tokenizer.ggml.tokens")
        return token if isinstance(token, int) and isinstance(tokens, Strings) and 0 <= token < tokens.count else None

    @cached_property
    def layers(self) -> int:
        """Layers, without those that predict several tokens. ModelError where there are more than tensors, or none."""
        layers = self.count("block_count") - self.count("nextn_predict_layers", 0)
        if not 0 < layers <= len(self.tensors):
            raise self.refusal(f"says that it has {layers:,} layers, of {len(self.tensors):,} tensors")
        return layers

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self.count("expert_count")

    def layers_with(self, tensor: str) -> list[bool]:
        """Which layers have a tensor."""
        return [f"blk.{layer}.{tensor}" in self.tensors for layer in range(self.layers)]

    @cached_property
    def linear_layers(self) -> list[bool]:
        """Which layers have linear attention."""
        return self.layers_with("ssm_a")

    @cached_property
    def dense_layers(self) -> list[int]:
        """Layers without a router."""
        return [layer for layer, routed in enumerate(self.layers_with("ffn_gate_inp.weight")) if not routed]

    def refuse_dense_layers(self, family: str, then: str = AGAIN) -> None:
        """ModelError if there is a layer without experts, which no model of the family has."""
        if self.dense_layers:
            named = ", ".join(map(str, self.dense_layers))
            raise self.refusal(f"has layers without experts ({named}), which no {family} has", then)

    @property
    def leading_dense(self) -> int:
        """Dense layers before those with experts. ModelError where one comes after."""
        layers = self.dense_layers
        if layers != list(range(len(layers))):
            raise ModelError(f"{self.path} has dense layers among those with experts: {', '.join(map(str, layers))}")
        return len(layers)

    @property
    def expert_columns(self) -> int:
        """Columns between an expert's matrices."""
        return self.shape_beside_experts("ffn_down_exps.weight", 3)[2]

    @property
    def dense_columns(self) -> int:
        """Columns between a dense layer's matrices; of no matter where there are none."""
        dense = self.dense_layers
        return self.shape(f"blk.{dense[0]}.ffn_down.weight", 2)[1] if dense else self.expert_columns

    def shape_beside_experts(self, tensor: str, dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a tensor in the first layer with experts."""
        layer = next((at for at in range(self.layers) if at not in self.dense_layers), 0)
        return self.shape(f"blk.{layer}.{tensor}", dimensions)

    def shape(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """The shape of a tensor of so many dimensions. ModelError where there is none."""
        if name not in self.tensors:
            raise self.refusal(f"has no tensor {name}", CONVERT)
        found = self.tensors[name].shape
        if len(found) != dimensions:
            raise self.refusal(f"has {name} of shape {found}, not of {dimensions} dimensions")
        return found

    def _entry(self, key: str, default: Any) -> Any:
        value = self.of_model(key, default)
        return self.require(f"{self.architecture}.{key}") if value is _NEEDED else value

    def _wrong(self, key: str, value: Any, instead: str) -> ModelError:
        return self.refusal(f"says that {key} is {str(value)[:80]}, which is not {instead}")


def rounded(value: float) -> float:
    """The shortest decimal of a float32: 1e-06 for 9.999999974752427e-07, as a config.json has it."""
    return float(f"{value:.7g}")


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GgufFile:
    """Reads the headers of a model's file, any of its shards named. ModelError: as `read_header`, or a shard is
    missing."""
    shards = _shards(path)
    headers = [read_header(shard) for shard in shards]
    stated = headers[0].entries.get("split.count", len(shards)) or 1
    if stated != len(shards):
        raise ModelError(
            f"{path} is one of {stated} shards, but is not called NAME-00001-of-{str(stated).zfill(5)}.gguf; give the "
            f"shards their names back"
        )
    digests = tuple(each.digest for each in headers)
    return GgufFile(path, tuple(shards), headers[0].entries, _merged(path, headers), digests)


def _shards(path: Path) -> list[Path]:
    found = SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    shards = [path.with_name(f"{found[1]}-{number:05}-of-{found[3]}{SUFFIX}") for number in range(1, count + 1)]
    require_shards(path.parent, shards)
    return shards


def _merged(path: Path, headers: list[Header]) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{name} lies in {tensors[name].file} and in {tensor.file}; download {path} again")
            tensors[name] = tensor
    stated = headers[0].entries.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise ModelError(f"the shards of {path} hold {len(tensors)} tensors of {stated}; download them again")
    return _with_factors(path, tensors)


def _with_factors(path: Path, tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
    """The tensors, those of NVFP4 with their factors, which llama.cpp's converter writes as tensors of their own."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if tensor.kind.name != "NVFP4" or suffix != "weight":
            continue
        found.pop(f"{stem}.input_scale", None)  # of activations in 4 bits, which are not computed with here
        factors = found.pop(f"{stem}.scale", None)
        if factors is not None:
            several = tensor.shape[0] if len(tensor.shape) == 3 else 1
            if factors.kind.name != "F32" or factors.shape != (several,):
                raise ModelError(
                    f"{path}: {stem}.scale is {factors.kind.name} of shape {factors.shape}, not F32 of ({several},); "
                    f"convert the model again with a current llama.cpp"
                )
            found[name] = replace(tensor, factors=factors)
    return found


NGRAM_TABLE = "per_layer_token_embd.weight"
"""The table of n-grams (Qwen3.8): tens of GB, of which a token needs some rows."""


def read_whole(file: GgufFile) -> list[GgufTensor]:
    """The tensors that loading reads whole, in the order of the file: all but the experts, and the tables of which a
    token needs rows: of n-grams, and the input embedding unless it is the output layer too."""
    rows = (NGRAM_TABLE, "token_embd.weight" if "output.weight" in file.tensors else "")
    found = [tensor for name, tensor in file.tensors.items() if "_exps." not in name and name not in rows]
    return sorted(found, key=lambda tensor: (file.shards.index(tensor.file), tensor.offset))
