"""Schemes by which safetensors checkpoints come quantised: which tensors are codes, and which their scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tiermoe.errors import ModelError, StoreError
from tiermoe.formats.checkpoint_quant import SCALES, CheckpointQuant, Transposed4
from tiermoe.formats.safetensors import Entries, QuantizedTensor, TensorEntry


def pair_codes_with_scales(tensors: Entries, settings: Mapping[str, Any], directory: Path) -> Entries:
    """The tensors of a checkpoint by what they stand for: codes and scales become one `QuantizedTensor`. settings: the
    config's `quantization_config`. ModelError for a scheme that is not read, and where codes lack their scales."""
    method = str(settings.get("quant_method", "an unknown method"))
    if method not in _SCHEMES:
        raise ModelError(
            f"{directory} is quantised by {method}, which tiermoe does not read; it reads {', '.join(_SCHEMES)}: take "
            f"another checkpoint of the model, or a GGUF file"
        )
    plain = {name: entry for name, entry in tensors.items() if isinstance(entry, TensorEntry)}
    scheme = _Scheme(plain, settings, directory)
    for name in plain:
        _SCHEMES[method](scheme, name)
    return scheme.found()


class _Scheme:
    """The tensors of a checkpoint while codes are paired with their scales."""

    def __init__(self, tensors: Mapping[str, TensorEntry], settings: Mapping[str, Any], directory: Path) -> None:
        self.tensors, self.settings, self.directory = tensors, settings, directory
        self._made: dict[str, QuantizedTensor] = {}
        self._taken: set[str] = set()

    def found(self) -> Entries:
        """The quantised tensors, and all others but those that say how activations are rounded, and shapes."""
        kept = {
            name: entry
            for name, entry in self.tensors.items()
            if name not in self._taken and not name.endswith(_BESIDE)
        }
        return {**kept, **self._made}

    def beside(self, codes: str, names: tuple[str, ...]) -> str:
        """The first of the names that is there. ModelError where none is."""
        found = next((name for name in names if name in self.tensors), None)
        if found is None:
            raise ModelError(
                f"{self.directory} holds {codes} without its scales {' or '.join(names)}; download it again"
            )
        return found

    def require_codes(self, scales: str, codes: str) -> None:
        """ModelError where scales are there without their codes."""
        if codes not in self.tensors:
            raise ModelError(f"{self.directory} holds {scales} without its codes {codes}; download it again")

    def make(
        self,
        name: str,
        encoding: CheckpointQuant | Transposed4,
        fields: Mapping[str, str],
        shape: tuple[int, ...],
        transposed: bool = False,
    ) -> None:
        """Makes the fields of the encoding (field → tensor) one tensor called `name`, of matrices whose last dimension
        is that of a row. ModelError where the scales are not those of so many weights."""
        codes, *_ = fields.values()
        try:
            wanted = encoding.stored_fields(shape[-2], shape[-1], torch.float32)
        except StoreError as error:
            raise ModelError(f"{self.directory}: {codes}: {error}; download it again") from error
        for field in wanted:
            tensor, asked = self.tensors[fields[field.name]], (*shape[:-2], *field.shape)
            placed = field.name == "codes" or _without_ones(tensor.shape) == _without_ones(asked)
            if not placed or tensor.nbytes != math.prod(shape[:-2]) * field.nbytes:
                raise ModelError(
                    f"{self.directory}: {fields[field.name]} of shape {tensor.shape} are not the {field.name} of "
                    f"{codes} of shape {self.tensors[codes].shape}; download it again"
                )
        if transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        entries = {field: self.tensors[tensor] for field, tensor in fields.items()}
        self._made[name] = QuantizedTensor(encoding, entries, shape, transposed)
        self._taken |= set(fields.values())

    def refuse(self, name: str, what: str) -> ModelError:
        return ModelError(
            f"{self.directory}: {name} is {what}, which tiermoe does not read; take another checkpoint of the model or "
            f"a GGUF file"
        )

    def scale_kind(self, name: str) -> str:
        dtype = self.tensors[name].dtype
        if dtype in (torch.float8_e8m0fnu, torch.uint8):
            return "e8m0"
        kind = next((kind for kind, (read_as, _) in SCALES.items() if read_as == dtype), None)
        if kind is None:
            raise self.refuse(name, f"a scale in {_called(dtype)}")
        return kind


def _mxfp4(scheme: _Scheme, name: str) -> None:
    """gpt-oss: `NAME_blocks` (experts, rows, blocks of a row, 16), `NAME_scales` (experts, rows, blocks of a row)."""
    if name.endswith("_scales"):
        scheme.require_codes(name, f"{name.removesuffix('_scales')}_blocks")
    entry = scheme.tensors[name]
    if not name.endswith("_blocks") or len(entry.shape) != 4 or entry.shape[-1] != 16:
        return
    own = name.removesuffix("_blocks")
    scales = scheme.beside(name, (f"{own}_scales",))
    experts, rows, blocks, _ = entry.shape
    encoding = CheckpointQuant("e2m1", scheme.scale_kind(scales), 1, 32)
    scheme.make(own, encoding, {"codes": name, "scales": scales}, (experts, rows, 32 * blocks), transposed=True)


def _fp8(scheme: _Scheme, name: str) -> None:
    """A weight in FP8 beside its scales: one, one a row, or one a block of `weight_block_size`. DeepSeek-V4 has experts
    in FP4 among them: two codes a byte, with a scale for 32 columns."""
    entry = scheme.tensors[name]
    if entry.dtype == torch.float8_e5m2:
        raise scheme.refuse(name, "FP8 with five bits of exponent")
    if name.endswith(_SCALE):
        if entry.dtype == torch.float8_e8m0fnu:
            scheme.require_codes(name, _codes_of(name))
        return
    four_bits = entry.dtype == torch.int8 and name.endswith(".weight")
    if not four_bits and (entry.dtype != torch.float8_e4m3fn or len(entry.shape) not in (2, 3)):
        return
    stem = name.removesuffix(".weight")
    scales = scheme.beside(name, (f"{name}_scale_inv", f"{name}_scale", f"{stem}.scale"))
    if four_bits:
        _pairs(scheme, name, "e2m1", scheme.scale_kind(scales), {"codes": name, "scales": scales})
        return
    grid = scheme.tensors[scales].shape
    rows, columns = entry.shape[-2:]
    experts = math.prod(entry.shape[:-2])
    if math.prod(grid) == experts:
        together = (rows, columns)
    elif grid in ((*entry.shape[:-1], 1), entry.shape[:-1]):
        together = (1, columns)
    else:
        stated = (each["block_structure"] for each in _weights(scheme.settings) if each.get("block_structure"))
        first, second = scheme.settings.get("weight_block_size") or next(stated, (128, 128))
        together = (min(int(first), rows), int(second))
    encoding = CheckpointQuant("e4m3", scheme.scale_kind(scales), *together)
    scheme.make(name, encoding, {"codes": name, "scales": scales}, entry.shape)


def _compressed(scheme: _Scheme, name: str) -> None:
    """compressed-tensors: FP8, or `NAME_packed` with `NAME_scale`, for NVFP4 also `NAME_global_scale`."""
    own, packed, end = name.rpartition("_packed")
    entry = scheme.tensors[name]
    if not packed or end:
        if entry.dtype == torch.int8 and name.endswith(".weight"):
            raise scheme.refuse(name, "8-bit integers of compressed-tensors")
        _fp8(scheme, name)
        return
    for more, what in (("zero_point", "4 bits with zero points"), ("g_idx", "4 bits with columns in another order")):
        if f"{own}_{more}" in scheme.tensors:
            raise scheme.refuse(name, what)
    scales = scheme.beside(name, (f"{own}_scale",))
    bits = {int(each.get("num_bits") or 4) for each in _weights(scheme.settings) if each.get("type") == "int"} or {4}
    if scheme.tensors[scales].dtype == torch.float8_e4m3fn:
        factor = scheme.beside(name, (f"{own}_global_scale",))
        _pairs(scheme, own, "e2m1", "e4m3-over", {"codes": name, "scales": scales, "factors": factor})
    elif entry.dtype == torch.uint8:
        _pairs(scheme, own, "e2m1", scheme.scale_kind(scales), {"codes": name, "scales": scales})
    elif entry.dtype == torch.int32 and bits == {4}:
        _pairs(scheme, own, "s4", scheme.scale_kind(scales), {"codes": name, "scales": scales})
    else:
        raise scheme.refuse(name, f"packed {_called(entry.dtype)} of {' or '.join(map(str, sorted(bits)))} bits")


def _modelopt(scheme: _Scheme, name: str) -> None:
    """NVIDIA's Model Optimizer: FP8, or NVFP4 with `NAME_scale` and `NAME_scale_2`."""
    if not name.endswith(".weight") or scheme.tensors[name].dtype != torch.uint8:
        _fp8(scheme, name)
        return
    scales, factor = scheme.beside(name, (f"{name}_scale",)), scheme.beside(name, (f"{name}_scale_2",))
    if scheme.tensors[scales].dtype != torch.float8_e4m3fn:
        raise scheme.refuse(name, f"4 bits with scales in {_called(scheme.tensors[scales].dtype)}")
    _pairs(scheme, name, "e2m1", "e4m3-times", {"codes": name, "scales": scales, "factors": factor})


def _pairs(scheme: _Scheme, own: str, codes: str, scale: str, fields: Mapping[str, str]) -> None:
    """A matrix of 4-bit codes, the first of two in the low half of a byte, with the scales of groups of its columns."""
    entry, grid = scheme.tensors[fields["codes"]], scheme.tensors[fields["scales"]].shape
    if len(entry.shape) != 2:
        raise scheme.refuse(fields["codes"], f"4 bits in {len(entry.shape)} dimensions")
    rows, columns = entry.shape[0], entry.nbytes * 2 // entry.shape[0]
    group = _GROUPS.get(scale) or -(-columns // max(1, math.prod(grid) // rows))
    encoding = CheckpointQuant(codes, scale, 1, group, 1 if "factors" in fields else 0)
    scheme.make(own, encoding, fields, (rows, columns))


def _transposed(scheme: _Scheme, name: str) -> None:
    """GPTQ and AWQ: `NAME.qweight`, `NAME.qzeros` and `NAME.scales`."""
    stem, method = name.removesuffix(".qweight"), str(scheme.settings["quant_method"])
    if stem == name:
        return
    bits = scheme.settings.get("bits", scheme.settings.get("w_bit", 4))
    if bits != 4 or scheme.settings.get("desc_act") or scheme.settings.get("version", "gemm") != "gemm":
        what = "with columns in another order" if scheme.settings.get("desc_act") else f"of {bits} bits"
        raise scheme.refuse(name, f"{method.upper()} {what}, version {scheme.settings.get('version', 'gemm')}")
    zeros, scales = scheme.beside(name, (f"{stem}.qzeros",)), scheme.beside(name, (f"{stem}.scales",))
    groups, rows = scheme.tensors[scales].shape
    columns = scheme.tensors[name].nbytes * 2 // rows
    if scheme.settings.get("checkpoint_format") == "gptq_v2":
        method = "gptq_v2"
    encoding = Transposed4(method, scheme.scale_kind(scales), columns // groups)
    scheme.make(f"{stem}.weight", encoding, {"qweight": name, "qzeros": zeros, "scales": scales}, (rows, columns))


_SCHEMES: dict[str, Callable[[_Scheme, str], None]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "gptq": _transposed,
    "awq": _transposed,
}
_SCALE = ("_scale", "_scale_inv", ".scale")
"""Ends of the names of scales of FP8."""
_GROUPS = {"e8m0": 32, "e4m3-over": 16, "e4m3-times": 16}
"""Kind of scale → columns of 4 bits that share one, where that is a fact of the format (MXFP4, NVFP4)."""
_BESIDE = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".weight_shape", ".g_idx",
    ".q_scale", ".k_scale", ".v_scale",
)  # fmt: skip


def _weights(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of weights in compressed-tensors' config, one for each group of layers."""
    groups = settings.get("config_groups") or {}
    return [group["weights"] for group in groups.values() if isinstance(group, dict) and group.get("weights")]


def _codes_of(scale: str) -> str:
    """The name of the codes that a scale of FP8 belongs to."""
    stem = scale.removesuffix(".scale")
    return f"{stem}.weight" if stem != scale else scale.removesuffix("_inv").removesuffix("_scale")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
