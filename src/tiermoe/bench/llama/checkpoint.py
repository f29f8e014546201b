"""Read a safetensors checkpoint with numpy alone, one tensor at a time, bfloat16 as its raw bits.

The interpreter that holds llama-cpp-python needs neither torch nor transformers, and numpy has no bfloat16,
which the safetensors package's own numpy interface therefore refuses. The format is a length, a JSON header
and the data.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U8": np.uint8}
INDEX = "model.safetensors.index.json"


def expert_count(config: dict[str, Any]) -> int:
    """Experts of a layer: transformers 5.23 writes Qwen3-MoE's ``num_experts`` as ``num_local_experts``."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next(config[name] for name in names if name in config))


def is_mxfp4(directory: Path) -> bool:
    """Whether a checkpoint's experts are stored in MXFP4."""
    config = json.loads((directory / "config.json").read_text())
    return (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"


class Checkpoint:
    """The tensors of a checkpoint directory by name; ``config`` is its config.json."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        index = directory / INDEX
        if index.exists():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            shards = ["model.safetensors"]
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for shard in shards:
            self._read_header(directory / shard)

    def _read_header(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            self._entries[name] = (path, 8 + length, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Every tensor, in the files' order."""
        return list(self._entries)

    def dtype(self, name: str) -> str:
        """The stored type, as safetensors names it."""
        return str(self._entries[name][2]["dtype"])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][2]["shape"])

    def raw(self, name: str) -> npt.NDArray[Any]:
        """The stored values, mapped read-only; a bfloat16 tensor comes as uint16 bits."""
        path, base, entry = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} in {path} is {entry['dtype']}; readable are {', '.join(DTYPES)}")
        dtype, shape = DTYPES[entry["dtype"]], self.shape(name)
        return np.memmap(path, dtype, "r", offset=base + entry["data_offsets"][0], shape=shape)

    def bfloat16_bits(self, name: str) -> npt.NDArray[np.uint16]:
        """The values as bfloat16 bits: as stored, or rounded to nearest even."""
        if self.dtype(name) == "BF16":
            return self.raw(name)
        bits = self.float32(name).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """The values in float32, which holds every stored type exactly."""
        raw = self.raw(name)
        if self.dtype(name) == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(raw, dtype=np.float32)
