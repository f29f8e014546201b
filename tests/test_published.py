"""Checkpoints that come quantised, used as published; beside transformers' eager model of what the codes stand for."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging as transformers_logging

import tiermoe
import tiny
from commands import Command
from gguf_engines import eager_greedy, engine_of, greedy, logits_of
from parity import close, tokens
from tiermoe.config import settings
from tiermoe.engine.load import resolve_for, starts_lean
from tiermoe.model.dense import own_linears
from tiermoe.model.hf.blueprint import inspect_model
from tiermoe.model.prepare_store import found_store
from tiny import oracle

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


def _mxfp4_packed(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
    if ".experts." not in name or not _is_linear(name):
        return None
    exponents = _grid(values, 1, 32, 6).log2().ceil()
    full = _spread(exponents.exp2(), 1, 32, values.shape)
    codes = ((values / full)[..., None] - _E2M1).abs().argmin(-1).to(torch.uint8)
    stem = name.removesuffix(".weight")
    return (
        {f"{stem}.weight_packed": _packed(codes), f"{stem}.weight_scale": (exponents + 127).to(torch.uint8)},
        _E2M1[codes.int()] * full,
    )


def _nvfp4(end: str, factor_end: str, over: bool) -> Any:
    def convert(name: str, values: Tensor) -> tuple[Tensors, Tensor] | None:
        if ".experts." not in name or not _is_linear(name):
            return None
        factor = (values.abs().amax() / (448 * 6)).reciprocal() if over else values.abs().amax() / (448 * 6)
        local = _grid(values, 1, 16, 6)
        scales = (local * factor if over else local / factor).to(torch.float8_e4m3fn)
        full = _spread(scales.float() / factor if over else scales.float() * factor, 1, 16, values.shape)
        codes = ((values / full.clamp(min=1e-9))[..., None] - _E2M1).abs().argmin(-1).to(torch.uint8)
        made = {f"{name}{end}": _packed(codes), f"{name}_scale": scales, f"{name}{factor_end}": factor.view(1)}
        return {**made, f"{name.removesuffix('.weight')}.input_global_scale": torch.ones(1)}, _E2M1[codes.int()] * full

    return convert


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


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
    "mxfp4 packed": Scheme(_compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), _mxfp4_packed),
}
"""Ways to publish a checkpoint."""


WIDE = {"moe_intermediate_size": 64, "hidden_size": 128}


CASES = [
    ("gpt_oss", "mxfp4", {}, "MXFP4"),
    ("qwen3_moe", "fp8", WIDE, "FP8"),
    ("deepseek_v3", "fp8", {}, "FP8"),
    ("minimax_m2", "fp8 in wide blocks", {"intermediate_size": 64}, "FP8"),
    ("qwen3_moe", "fp8 by row", WIDE, "FP8"),
    ("qwen3_moe", "fp8 by matrix", {}, "FP8"),
    ("qwen3_moe", "int4", WIDE, "INT4"),
    ("deepseek_v3", "int4", {}, "INT4"),
    ("qwen3_moe", "mxfp4 packed", WIDE, "MXFP4"),
    ("qwen3_moe", "nvfp4", WIDE, "NVFP4"),
    ("qwen3_moe", "gptq", WIDE, "GPTQ"),
    ("deepseek_v3", "gptq", {}, "GPTQ"),
    ("qwen3_moe", "awq", WIDE, "AWQ"),
    ("deepseek_v3", "nvfp4 of modelopt", {}, "NVFP4"),
]


def write(tmp_path: Path, family: str = "gpt_oss", scheme: str = "mxfp4", **changes: Any) -> tuple[Path, Any]:
    """(a quantised checkpoint, the eager model)."""
    quantized, plain = publish(tmp_path, family, scheme, **changes)
    return quantized, oracle(plain, family, torch.float32)


def eager(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize(("family", "scheme", "changes", "label"), CASES, ids=lambda value: str(value)[:20])
def test_logits_and_tokens(family: str, scheme: str, changes: dict[str, Any], label: str, tmp_path: Path) -> None:
    quantized, model = write(tmp_path, family, scheme, **changes)
    ids = tokens(1, 30)[0].tolist()
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store")
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert greedy(engine, ids, 24) == eager_greedy(model, ids, 24)
    engine.close()
    engine = engine_of(quantized, torch.bfloat16, store=tmp_path / "narrow")
    assert close(logits_of(engine, ids), wanted)
    assert engine.store.precisions.keys() == {"16"}
    blueprint = inspect_model(quantized, str(quantized), tmp_path / "narrow")
    assert blueprint.own_types() == label
    engine.close()


def test_experts_are_exactly_what_their_codes_stand_for(tmp_path: Path) -> None:
    quantized, model = write(tmp_path)
    engine = engine_of(quantized, torch.bfloat16, store=tmp_path / "store")
    experts = model.model.layers[1].mlp.experts
    of_layer = engine.store.expert_format("16", 1)
    blueprint = inspect_model(quantized, str(quantized), tmp_path / "store")
    for expert in (0, 5):
        read = blueprint.experts.read(1, expert)
        for part in of_layer.layer.parts:
            wanted = getattr(experts, part.name).data[expert]
            assert torch.equal(read[part.name].float(), wanted)
    engine.close()


@pytest.mark.parametrize(("family", "scheme"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "fp8"), ("qwen3_moe", "gptq")])
def test_a_small_cache_changes_no_bit(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, family, scheme)
    ids, found = tokens(1, 30)[0].tolist(), []
    for cache in ("100%", "40%"):
        engine = engine_of(quantized, torch.bfloat16, store=tmp_path / "store", cache=cache, lanes=2)
        found.append(logits_of(engine, ids))
        engine.close()
    assert torch.equal(*found)


@pytest.mark.parametrize(("family", "scheme"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")])
def test_the_disk_holds_no_second_copy(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, family, scheme)
    store, before = tmp_path / "store", sorted(quantized.iterdir())
    found = []
    for _ in range(2):  # the second starts from the outline
        engine = engine_of(quantized, torch.bfloat16, store=store)
        found.append(logits_of(engine, [3, 4, 5]))
        engine.close()
    assert torch.equal(*found)
    left = {each.name: each.stat().st_size for each in store.iterdir()}
    assert "outline.json" in left
    assert "store.json" not in left
    assert sum(left.values()) < 1 << 20
    assert sorted(quantized.iterdir()) == before
    blueprint = inspect_model(quantized, str(quantized), store)
    asked = settings(memory="4GiB", store=store)
    assert starts_lean(blueprint, resolve_for(blueprint, asked), found_store(blueprint, store))


def test_dense_layers_stay_in_eight_bits(tmp_path: Path) -> None:
    """Layers that the model does not have, as DeepSeek publishes for predicting several tokens, are not loaded."""
    quantized, _ = publish(tmp_path, "qwen3_moe", "fp8", **WIDE)
    name, more = "model.layers.0.self_attn.q_proj.weight", "model.layers.9.eh_proj.weight"
    edit_tensors(
        quantized,
        lambda tensors: tensors.update({f"{more}{end}": tensors[f"{name}{end}"].clone() for end in ("", "_scale_inv")}),
    )
    blueprint = inspect_model(quantized, str(quantized), tmp_path / "store")
    kept = own_linears(blueprint, "cpu")
    assert {path.rpartition(".")[2] for path in kept} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert own_linears(blueprint, "cuda") == {}
    assert name in blueprint.dense_keys
    assert more in blueprint.checkpoint
    assert more not in blueprint.dense_keys


@pytest.mark.parametrize(("family", "scheme"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4")])
@pytest.mark.parametrize("decoder", ["auto", "generic"])
def test_transformers_protocol(decoder: str, family: str, scheme: str, tmp_path: Path) -> None:
    quantized, model = write(tmp_path, family, scheme)
    loaded, _ = tiermoe.load(quantized, memory="4GiB", decoder=decoder, store=tmp_path / "store", threads=1)
    ids = tokens(2, 9)
    with torch.no_grad():
        assert close(loaded(ids).logits.flatten(0, 1), model(ids).logits.flatten(0, 1))
    assert loaded.generate(ids, max_new_tokens=6, do_sample=False).shape[1] <= 15
    loaded.tiermoe.close()


@pytest.mark.parametrize(("family", "scheme"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4")])
def test_bits_that_are_asked_for_are_packed(family: str, scheme: str, tmp_path: Path) -> None:
    quantized, model = write(tmp_path, family, scheme)
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store", bits=8)
    ids = tokens(1, 20)[0].tolist()
    found, wanted = logits_of(engine, ids), eager(model, ids)
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    assert engine.store.precisions.keys() == {"8", "16"}
    assert bool(engine.store.dense) == (scheme != "fp8")  # which its other layers have too: they stay
    engine.close()


def test_bits_that_a_preset_asks_for_are_packed(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gpt_oss", "mxfp4")
    engine = engine_of(quantized, torch.float32, store=tmp_path / "store", preset="io-qexp")
    assert engine.settings.bits_used == 4
    assert "4-linear" in engine.store.precisions
    engine.close()


def test_nothing_is_said_of_transformers_kernels(tmp_path: Path) -> None:
    told: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("transformers")
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    transformers_logging.warning_once.cache_clear()  # what was told before is told again
    logger.addHandler(handler)
    try:
        for family, scheme in (("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("qwen3_moe", "int4")):
            quantized, _ = publish(tmp_path / family, family, scheme)
            model, _ = tiermoe.load(quantized, memory="4GiB", device="cpu", store=tmp_path / family / "store")
            model.tiermoe.close()
    finally:
        logger.removeHandler(handler)
    assert not [message for message in told if re.search("mxfp4|fp8|quanti|kernel|triton", message, re.IGNORECASE)]


@pytest.mark.parametrize(("family", "scheme", "label"), [("gpt_oss", "mxfp4", "MXFP4"), ("qwen3_moe", "fp8", "FP8")])
def test_commands(family: str, scheme: str, label: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, family, scheme)
    common = ("--memory", "4GiB", "--store", tmp_path / "store")
    for _ in range(2):
        done = tiermoe_("run", quantized, "the", "--max-tokens", "4", *common)
        assert done.code == 0, done
        assert "packing" not in done.err
    plan = tiermoe_("plan", quantized, *common)
    assert plan.code == 0
    assert f"experts as the file has them ({label})" in " ".join(plan.out.split())
    assert "packing" not in plan.out
    shown = " ".join(tiermoe_("show", quantized, "--store", tmp_path / "store").out.split())
    assert f"{label}, used in place" in shown
    packed = tiermoe_("pack", quantized, "--out", tmp_path / "store")
    assert packed.code == 0, packed
    assert "served from the checkpoint, no copy" in packed.err
    assert not list((tmp_path / "store").glob("experts-*"))


# --- what cannot be used ---
def cause(tiermoe_: Command, quantized: Path) -> str:
    found = {tiermoe_(*words).cause for words in (("run", quantized, "hi"), ("plan", quantized), ("show", quantized))}
    assert len(found) == 1, found
    return found.pop()


def test_scales_that_are_missing(tmp_path: Path, tiermoe_: Command) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    quantized, _ = publish(tmp_path / "a", "gpt_oss", "mxfp4")
    edit_tensors(quantized, lambda tensors: tensors.pop(f"{name}_scales"))
    assert f"holds {name}_blocks without its scales {name}_scales; download it again" in cause(tiermoe_, quantized)
    quantized, _ = publish(tmp_path / "b", "gpt_oss", "mxfp4")
    edit_tensors(quantized, lambda tensors: tensors.pop(f"{name}_blocks"))
    assert f"holds {name}_scales without its blocks; download it again" in cause(tiermoe_, quantized)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    quantized, _ = publish(tmp_path / "c", "qwen3_moe", "fp8")
    edit_tensors(quantized, lambda tensors: tensors.pop(f"{name}_scale_inv"))
    assert f"holds {name} without its scales {name}_scale_inv" in cause(tiermoe_, quantized)


def test_scales_of_another_shape(tmp_path: Path, tiermoe_: Command) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    quantized, _ = publish(tmp_path, "gpt_oss", "mxfp4")
    edit_tensors(quantized, lambda tensors: tensors.update({name: tensors[name][:, :64].contiguous()}))
    assert re.search(rf"{re.escape(name)} of shape \(8, 64, 2\) are not the scales of", cause(tiermoe_, quantized))


@pytest.mark.parametrize("method", ["bitsandbytes", "quark"])
def test_a_method_that_is_not_read(method: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, "qwen3_moe", "int4")
    edit_config(quantized, quantization_config={"quant_method": method, "bits": 4})
    assert f"is quantised by {method}, which tiermoe does not read; it reads mxfp4, fp8" in cause(tiermoe_, quantized)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("weight_zero_point", "4 bits with zero points"),
        ("weight_g_idx", "4 bits with columns in another order"),
    ],
)
def test_a_variant_that_is_not_read(more: str, what: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, "qwen3_moe", "int4")
    name = f"model.layers.0.mlp.experts.0.gate_proj.{more}"
    edit_tensors(quantized, lambda tensors: tensors.update({name: torch.zeros(1)}))
    assert f"is {what}, which tiermoe does not read" in cause(tiermoe_, quantized)


@pytest.mark.parametrize(
    ("changes", "what"), [({"bits": 8}, "GPTQ of 8 bits"), ({"desc_act": True}, "GPTQ with columns in another order")]
)
def test_a_gptq_that_is_not_read(changes: dict[str, Any], what: str, tmp_path: Path, tiermoe_: Command) -> None:
    quantized, _ = publish(tmp_path, "qwen3_moe", "gptq")
    edit_config(quantized, quantization_config={"quant_method": "gptq", "bits": 4, **changes})
    assert f"is {what}" in cause(tiermoe_, quantized)
