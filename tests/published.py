"""Ways to publish a quantised checkpoint, and the tiny checkpoints that are published so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import tiny

Tensors = dict[str, Tensor]


WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Scheme:
    """convert: (name, values) → what the checkpoint holds of a tensor, and its values; None for one that stays."""

    settings: dict[str, Any]
    convert: Callable[[str, Tensor], tuple[Tensors, Tensor] | None]


def publish(directory: Path, family: str, scheme: str, **changes: Any) -> tuple[Path, Path]:
    """(a quantised checkpoint in bfloat16, a plain one in float32 of what it stands for)."""
    quantized = tiny.write(directory / "quantized", family, torch.bfloat16, **changes)
    plain = tiny.write(directory / "plain", family, torch.float32, **changes)
    torch.manual_seed(1)
    chosen, tensors, values = SCHEMES[scheme], Tensors(), Tensors()
    for name, tensor in load_file(quantized / WEIGHTS).items():
        made = chosen.convert(name, tensor.float())
        tensors |= {name: tensor} if made is None else made[0]
        values[name] = tensor.float() if made is None else made[1]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, quantized / WEIGHTS, {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, plain / WEIGHTS, {"format": "pt"})
    edit_config(quantized, quantization_config=chosen.settings)
    return quantized, plain


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def _mxfp4(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
    """gpt-oss: random codes, all of which occur; the values are transformers'."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    experts, in_, out = values.shape
    blocks = torch.randint(0, 256, (experts, out, in_ // 32, 16), dtype=torch.uint8)
    scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)
    return (
        {f"{name}_blocks": blocks, f"{name}_scales": scales},
        convert_moe_packed_tensors(blocks, scales, dtype=torch.float32),
    )


def _is_linear(name: str) -> bool:
    return name.endswith(("proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def _grid(values: Tensor, rows: int, columns: int, largest: float) -> Tensor:
    """The scale of each block of so many rows and columns."""
    down, across = (-(-size // block) for size, block in zip(values.shape, (rows, columns), strict=True))
    padded = torch.zeros(down * rows, across * columns)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.view(down, rows, across, columns).abs().amax((1, 3)).clamp(min=1e-6) / largest


def _spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    return scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _fp8(rows: int, columns: int, kind: torch.dtype, end: str) -> Any:
    def convert(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
        if not _is_linear(name):
            return None
        block = tuple(min(size, most) for size, most in zip(values.shape, (rows, columns), strict=True))
        scales = _grid(values, *block, 448).to(kind)
        full = _spread(scales, *block, values.shape)
        codes = (values / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}{end}": scales if scales.numel() > 1 else scales.view(())}, codes.float() * full

    return convert


def _packed(codes: Tensor) -> Tensor:
    """Two codes of 4 bits a byte, the first in its low half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _int4(group: int) -> Any:
    def convert(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
        if ".experts." not in name or not _is_linear(name):
            return None
        scales = _grid(values, 1, group, 7).bfloat16()
        full = _spread(scales, 1, group, values.shape)
        codes = (values / full).round().clamp(-8, 7)
        packed = _packed((codes + 8).to(torch.uint8)).view(torch.int32)
        stem = name.removesuffix(".weight")
        shape = torch.tensor(values.shape)
        return (
            {f"{stem}.weight_packed": packed, f"{stem}.weight_scale": scales, f"{stem}.weight_shape": shape},
            codes * full,
        )

    return convert


_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order of eight outputs in a word


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes after each other along dimension 1, in that order, as a word of 32 bits."""
    eight = codes.unflatten(1, (-1, 8)).long()[..., list(order)]
    words = (eight << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _with_zeros(method: str, group: int) -> Any:
    """GPTQ and AWQ, by what they write."""

    def convert(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
        if not _is_linear(name) or values.shape[0] % 8 or values.shape[1] % group:
            return None
        groups = values.unflatten(1, (-1, group))
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((most - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(1, 15)
        codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
        exact = ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1)
        codes, stem = codes.flatten(1).int(), name.removesuffix(".weight")
        if method == "awq":
            weight, stored = _words(codes.t(), _AWQ), _words(zeros.int().t(), _AWQ)
        else:
            weight, stored = _words(codes).t(), _words(zeros.int().t() - 1)
        more = {} if method == "awq" else {f"{stem}.g_idx": torch.arange(values.shape[1], dtype=torch.int32) // group}
        return {f"{stem}.qweight": weight, f"{stem}.qzeros": stored, f"{stem}.scales": scales.t(), **more}, exact

    return convert


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e2m1(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(codes in pairs, what they stand for), by the scale of each value."""
    codes = ((values / scales.clamp(min=1e-9))[..., None] - _E2M1).abs().argmin(-1).to(torch.uint8)
    return _packed(codes), _E2M1[codes.int()] * scales


def _mxfp4_packed(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
    if ".experts." not in name or not _is_linear(name):
        return None
    exponents = _grid(values, 1, 32, 6).log2().ceil()
    codes, exact = _e2m1(values, _spread(exponents.exp2(), 1, 32, values.shape))
    stem = name.removesuffix(".weight")
    return {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": (exponents + 127).to(torch.uint8)}, exact


def _nvfp4(end: str, factor_end: str, over: bool) -> Any:
    def convert(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
        if ".experts." not in name or not _is_linear(name):
            return None
        factor = (values.abs().amax() / (448 * 6)).reciprocal() if over else values.abs().amax() / (448 * 6)
        local = _grid(values, 1, 16, 6)
        scales = (local * factor if over else local / factor).to(torch.float8_e4m3fn)
        full = _spread(scales.float() / factor if over else scales.float() * factor, 1, 16, values.shape)
        codes, exact = _e2m1(values, full)
        made = {f"{name}{end}": codes, f"{name}_scale": scales, f"{name}{factor_end}": factor.view(1)}
        return {**made, f"{name.removesuffix('.weight')}.input_global_scale": torch.ones(1)}, exact

    return convert


def _deepseek_v4(expert_bits: int) -> Any:
    """By the names and types of DeepSeek's own files: experts in FP4 or FP8, other matrices in FP8."""
    in_fp8 = _fp8(128, 128, torch.float8_e8m0fnu, "_scale_inv")

    def convert(name: str, values: Tensor) -> tuple[Tensors, Tensor]:
        own = name.removeprefix("model.").replace("attn.norm.", "attn.kv_norm.").replace("embed_tokens", "embed")
        own = own.replace("hc_head.hc_", "hc_head_")
        scale = f"{own.removesuffix('.weight')}.scale"
        if ".experts." in name and expert_bits == 4:
            exponents = _grid(values, 1, 32, 6).log2().ceil()
            codes, exact = _e2m1(values, _spread(exponents.exp2(), 1, 32, values.shape))
            return {own: codes.view(torch.int8), scale: exponents.exp2().to(torch.float8_e8m0fnu)}, exact
        if re.search(r"attn\.w|indexer\.wq_b|experts\.", name):
            made, exact = in_fp8("proj.weight", values)
            codes, scales = made.values()
            return {own: codes, scale: scales.view(-(-len(values) // 128), -1)}, exact
        if name.endswith("tid2eid"):
            return {own: values.long()}, values.long()
        wide = re.search(r"hc_|attn_sink|\.ape|gate\.bias", name) is not None
        return {own: values if wide else values.bfloat16()}, values

    return convert


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_POWERS = {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}


SCHEMES = {
    "mxfp4": Scheme({"quant_method": "mxfp4", "modules_to_not_convert": []}, _mxfp4),
    "fp8": Scheme({**_FP8, "weight_block_size": [32, 32]}, _fp8(32, 32, torch.float32, "_scale_inv")),
    "fp8 in wide blocks": Scheme(
        {**_FP8, "weight_block_size": [128, 128]}, _fp8(128, 128, torch.bfloat16, "_scale_inv")
    ),
    "fp8 by row": Scheme(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _fp8(1, 1 << 20, torch.float32, "_scale"),
    ),
    "fp8 by matrix": Scheme(_FP8, _fp8(1 << 20, 1 << 20, torch.float32, "_scale_inv")),
    "int4": Scheme(_compressed("pack-quantized", num_bits=4, type="int", group_size=32, symmetric=True), _int4(32)),
    "gptq": Scheme({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, _with_zeros("gptq", 32)),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, _with_zeros("awq", 64)),
    "nvfp4": Scheme(
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        _nvfp4("_packed", "_global_scale", over=True),
    ),
    "nvfp4 of modelopt": Scheme(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4("", "_scale_2", over=False)
    ),
    "deepseek_v4": Scheme({**_FP8, **_POWERS, "expert_dtype": "fp4"}, _deepseek_v4(4)),
    "deepseek_v4 in fp8": Scheme({**_FP8, **_POWERS}, _deepseek_v4(8)),
    "mxfp4 packed": Scheme(_compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), _mxfp4_packed),
}
"""Ways to publish a checkpoint."""
